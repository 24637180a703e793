"""Identity of weights: equal for copies, different after any change that matters."""

import os
import shutil
from pathlib import Path

import pytest

from xinference.model.llm.weights import SAMPLE_BYTES, model_identity, weight_files, weights_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      " + bytes(SAMPLE_BYTES * 4))
    (path / "README.md").write_text("x")
    return path


def test_a_copy_with_its_times_has_the_same_identity(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert model_identity(copy) == model_identity(model)
    (copy / "README.md").write_text("other")
    assert model_identity(copy) == model_identity(model)


@pytest.mark.parametrize("change", ["config", "content", "time", "size", "name"])
def test_a_change_changes_the_identity(model: Path, change: str) -> None:
    before, weights = model_identity(model), model / "model.safetensors"
    info = weights.stat()
    if change == "config":
        (model / "config.json").write_text('{"a": 1}')
    elif change == "content":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns))
    elif change == "time":
        os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns + 1000))
    elif change == "size":
        with weights.open("ab") as file:
            file.write(b"x")
    else:
        weights.rename(model / "other.safetensors")
    assert model_identity(model) != before


def test_of_several_formats_the_one_that_is_loaded_counts(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"x" * 7)
    assert [f.name for f in weight_files(model)] == ["model.safetensors"]
    (model / "model.safetensors").unlink()
    assert weights_bytes(model) == 7
    (model / "pytorch_model.bin").unlink()
    assert weights_bytes(model) == 0
