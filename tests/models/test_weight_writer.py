"""safetensors files that are written tensor by tensor are those that safetensors reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tcdeploy.models.weights.files import read_headers
from tcdeploy.models.weights.reader import LENGTH_BYTES, read_tensor, stored_tensors
from tcdeploy.models.weights.weight_paths import INDEX
from tcdeploy.models.weights.writer import TensorSpec, writing_tensors

TENSORS = {
    "codes": torch.arange(15, dtype=torch.uint8).view(3, 5),
    "b.fp8": torch.linspace(-3, 3, 8).to(torch.float8_e4m3fn),
    "a.scale": torch.randn(3, 1).bfloat16(),
    "shape": torch.tensor([3, 5]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


def specs_of(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def save(folder: Path, max_file_bytes: int = 1 << 20) -> None:
    with writing_tensors(folder, specs_of(TENSORS), max_file_bytes) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])


def check_equal(found: dict[str, Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), TENSORS[name].reshape(-1).view(torch.uint8))


def test_one_file_is_read_by_safetensors_and_here(tmp_path: Path) -> None:
    save(tmp_path)
    [path] = tmp_path.iterdir()
    check_equal(load_file(path))
    check_equal({name: read_tensor(stored) for name, stored in stored_tensors([path]).items()})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_each_tensor_is_aligned_to_its_dtype(tmp_path: Path) -> None:
    save(tmp_path)
    [path] = tmp_path.iterdir()
    assert int.from_bytes(path.read_bytes()[:LENGTH_BYTES], "little") % 8 == 0
    stored = stored_tensors([path])
    assert [name for name, item in stored.items() if item.begin % item.dtype.itemsize] == []
    assert max(item.end for item in stored.values()) == path.stat().st_size


def test_several_files_have_an_index(tmp_path: Path) -> None:
    """A tensor that is larger than a file may be is alone in one."""
    save(tmp_path, max_file_bytes=14)
    index = json.loads((tmp_path / INDEX).read_text())
    files = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    numbers = {"codes": 0, "b.fp8": 1, "a.scale": 1, "shape": 2, "scalar": 3, "empty": 3}
    assert index["weight_map"] == {name: files[number] for name, number in numbers.items()}
    assert index["metadata"] == {"total_size": 15 + 8 + 6 + 16 + 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, INDEX]
    check_equal({name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()})
    checkpoint = read_headers(str(tmp_path), tmp_path)
    assert checkpoint is not None and checkpoint.tensors.keys() == TENSORS.keys()


def test_a_tensor_that_is_left_out_or_has_another_shape_is_an_error(tmp_path: Path) -> None:
    specs = specs_of(TENSORS)
    with (
        pytest.raises(ValueError, match="5 tensors were not written: a.scale"),
        writing_tensors(tmp_path, specs) as writer,
    ):
        writer.write("codes", TENSORS["codes"])
    (tmp_path / "model.safetensors").unlink()
    wrong_shape = pytest.raises(ValueError, match=r"codes is torch.uint8 \[15\], not torch.uint8 \[3, 5\]")
    with wrong_shape, writing_tensors(tmp_path, specs) as writer:
        writer.write("codes", TENSORS["codes"].view(15))
