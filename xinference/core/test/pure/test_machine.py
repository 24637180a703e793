"""What is measured of a machine, and the secrets and names that lie on its disk."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from xinference.core.actor_directory import actor_directory, sweep
from xinference.core.cluster_key import ClusterKeyRefused, cluster_key
from xinference.core.errors import Unreachable
from xinference.core.inventory import host_identity, measure, memory, read_devices
from xinference.core.load import parse_load
from xinference.core.machine import Machine
from xinference.core.runner import Watch
from xinference.core.topology import HostFacts
from xinference.core.worker_identity import take_identity


def cgroup(folder: Path, limit: str, current: int, inactive: int) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(current))
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return folder


def test_a_containers_limit_counts_and_droppable_file_pages_do_not(tmp_path: Path) -> None:
    total, free = memory(cgroup(tmp_path, "1000000", 400000, 100000))
    assert (total, free) == (1000000, 700000)


def test_a_container_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    assert memory(cgroup(tmp_path, "1000000", 1200000, 0))[1] == 0


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    unlimited = memory(cgroup(tmp_path, "max", 1, 0))
    assert unlimited[0] == memory(tmp_path / "nowhere")[0] > 0


def test_the_identity_of_shared_memory_is_that_of_its_file_system(tmp_path: Path) -> None:
    assert host_identity(tmp_path) == host_identity(tmp_path)
    assert host_identity(Path("/proc")) != host_identity(tmp_path)


def test_facts_survive_the_wire(tmp_path: Path) -> None:
    facts = measure(tmp_path, "127.0.0.1", None)
    assert HostFacts.from_wire(facts.to_wire()) == facts
    assert facts.shm_free_bytes > 0


def test_the_cluster_key_is_made_once_and_closed_to_others(tmp_path: Path) -> None:
    key = cluster_key(tmp_path / "home")
    assert len(key) == 64
    assert cluster_key(tmp_path / "home") == key
    assert (tmp_path / "home" / "cluster.key").stat().st_mode & 0o777 == 0o600


def test_a_cluster_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    cluster_key(tmp_path)
    (tmp_path / "cluster.key").chmod(0o644)
    with pytest.raises(ClusterKeyRefused, match="chmod 600"):
        cluster_key(tmp_path)


def test_an_empty_cluster_key_is_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "cluster.key", os.O_CREAT | os.O_WRONLY, 0o600)
    os.close(fd)
    with pytest.raises(ClusterKeyRefused, match="empty"):
        cluster_key(tmp_path)


def test_a_workers_name_is_stable_and_held_by_one_at_a_time(tmp_path: Path) -> None:
    first = take_identity(tmp_path)
    second = take_identity(tmp_path)
    assert first.worker_id != second.worker_id
    first.release()
    first.release()
    again = take_identity(tmp_path)
    assert again.worker_id == first.worker_id
    again.release()
    second.release()


def test_the_load_is_read_from_vllms_metrics() -> None:
    lines = ["x 1", 'vllm:num_requests_running{engine="0"} 2.0', 'vllm:num_requests_running{engine="1"} 1.0']
    assert parse_load("\n".join([*lines, 'vllm:num_requests_waiting{engine="0"} 4'])) == (3, 4)


def test_a_page_without_the_counts_says_so() -> None:
    with pytest.raises(Unreachable):
        parse_load("vllm:num_requests_running 2.0\n")


def test_a_replicas_socket_path_fits_the_kernel_however_deep_the_home_is(tmp_path: Path) -> None:
    deep = Machine("w1", str(tmp_path / ("d" * 90) / "run"), "/dev/shm", Watch())
    assert len(str(deep.socket_of("m-0"))) < 100
    assert deep.socket_of("m-0") != deep.socket_of("m-1")
    assert Machine.from_wire(deep.to_wire()) == deep


def test_the_actor_systems_sockets_fit_the_kernel_however_deep_the_home_is(tmp_path: Path) -> None:
    assert actor_directory(Path("/home/u/.xinference"), 7) == Path("/home/u/.xinference/actors/7")
    deep = actor_directory(tmp_path / ("d" * 90), 4_000_000)
    assert len(f"{deep}/.xoscar/socket/{'0' * 32}") < 108


def test_directories_of_dead_processes_are_swept_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    mine, dead, other = tmp_path / str(os.getpid()), tmp_path / "999999999", tmp_path / "notes"
    for directory in (mine, dead, other):
        directory.mkdir()
    assert sweep(mine) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


class FakeNvml:
    """Three devices."""

    NVMLError = RuntimeError

    def __init__(self, driver: bool = True) -> None:
        self.driver = driver
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise RuntimeError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, free=90 - handle)

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaa-bbb"


@pytest.mark.parametrize(
    ("visible", "indexes"), [(None, [0, 1, 2]), ("2,0", [0, 2]), ("", []), ("GPU-1aaa", [1]), ("-1", []), (" 1 , 2 ", [1, 2])]
)
def test_only_visible_devices_are_offered(visible: str | None, indexes: list[int]) -> None:
    library = FakeNvml()
    found = read_devices(library, visible)
    assert [device.index for device in found] == indexes
    assert all(device.name == "H200" and device.free_bytes == 90 - device.index for device in found)
    assert library.open == 0


def test_without_binding_or_driver_there_are_no_devices() -> None:
    assert read_devices(None, None) == ()
    assert read_devices(FakeNvml(driver=False), None) == ()
