"""Where engine sockets lie."""

import tempfile
from pathlib import Path

import pytest

from xinference.model.llm.sockets import MAX_SOCKET_PATH_BYTES, SocketPathRefused, check_length, prepare_directory, socket_path


def test_a_socket_lies_in_a_private_directory_under_a_short_name(tmp_path: Path) -> None:
    path = socket_path(tmp_path / "run", "worker", "replica-" + "x" * 40)
    assert path.parent == tmp_path / "run"
    assert len(path.name) == 21
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_replicas_and_workers_have_sockets_of_their_own(tmp_path: Path) -> None:
    paths = {socket_path(tmp_path, w, r) for w in ("w0", "w1") for r in ("r0", "r1")}
    assert len(paths) == 4
    assert socket_path(tmp_path, "w0", "r0") in paths


def test_a_deep_home_falls_back_to_a_short_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr("tempfile.gettempdir", lambda: short)
        path = socket_path(tmp_path / ("deep" * 30), "w0", "r0")
        assert path.is_relative_to(short)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        check_length(path)


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o777)
    (tmp_path / "run").chmod(0o777)
    prepare_directory(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketPathRefused):
        prepare_directory(tmp_path / "run")


def test_a_path_the_kernel_cannot_bind_is_refused() -> None:
    check_length(Path("/" + "x" * (MAX_SOCKET_PATH_BYTES - 2)))
    with pytest.raises(SocketPathRefused):
        check_length(Path("/" + "x" * (MAX_SOCKET_PATH_BYTES - 1)))
