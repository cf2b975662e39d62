"""What tests of all formats do with one layer: store a weight, and decode every element by the format's definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, random_weight, read_tensors

PATH = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 12, 256
ValueAt = Callable[[dict[str, Tensor], int, int], float]
Kind = tuple[torch.dtype, tuple[int, ...]]


def store_layer(form: Format, rows: int = ROWS, columns: int = COLUMNS) -> StoredWeight:
    """A random weight as the layer PATH stores it."""
    stored = form.store(f"{PATH}.weight", random_weight(rows, columns))
    assert stored is not None
    tensors = {name.removeprefix(f"{PATH}."): tensor for name, tensor in stored.tensors.items()}
    return StoredWeight(tensors, stored.dense[f"{PATH}.weight"])


def decode(value_at: ValueAt, tensors: dict[str, Tensor], shape: torch.Size) -> Tensor:
    rows, columns = map(range, shape)
    return torch.tensor([[value_at(tensors, row, column) for column in columns] for row in rows])


def relative_error(weight: Tensor, expected: Tensor) -> float:
    return ((weight - expected).norm() / expected.norm()).item()


def layer_kinds(folder: Path, path: str) -> dict[str, Kind]:
    """The dtypes and shapes of a layer's tensors in a folder."""
    tensors = read_tensors(folder).items()
    layer = {name.removeprefix(f"{path}."): item for name, item in tensors if name.startswith(f"{path}.")}
    return {name: (item.dtype, tuple(item.shape)) for name, item in layer.items()}
