"""Traced tensors: what transformers' conversions do to them is what they do to real tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor, UnknownOperationError
from tcdeploy.models.weights.reader import stored_tensors
from tcdeploy.models.weights.sources import WeightSource, loading_weights

Tensors = dict[str, Tensor]
MOVES: dict[str, Callable[[Tensors], Tensor]] = {
    "cat of rows": lambda t: torch.cat([t["a"], t["b"], t["a"]]),
    "cat of columns": lambda t: torch.cat([t["a"], t["b"]], dim=-1),
    "cat of one": lambda t: torch.cat([t["a"]]),
    "stack": lambda t: torch.stack([t["a"], t["b"]]),
    "stack of columns": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "stack of joined experts": lambda t: torch.stack([torch.cat([t["a"], t["b"]]), torch.cat([t["b"], t["a"]])]),
    "joined stacks": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "joined columns of stacks": lambda t: torch.cat([torch.stack([t["a"]]), torch.stack([t["b"]])], dim=-1),
    "transposed experts": lambda t: torch.stack([t["a"], t["b"]]).transpose(1, 2).contiguous(),
    "transpose": lambda t: t["a"].T,
    "negative transpose": lambda t: t["c"].transpose(-1, 0),
    "permute": lambda t: t["c"].permute(2, 0, -2),
    "permute, then rows": lambda t: t["c"].permute(2, 0, 1)[1:3],
    "chunk": lambda t: t["a"].chunk(3)[1],
    "chunk of columns": lambda t: t["a"].chunk(2, dim=1)[1],
    "uneven split": lambda t: t["a"].split([1, 5])[1],
    "rows": lambda t: t["a"][2:5],
    "last rows": lambda t: t["a"][-2:],
    "rows beyond the end": lambda t: t["a"][4:100],
    "columns": lambda t: t["a"][:, 1:3],
    "rows of rows": lambda t: t["a"][1:5][1:3],
    "everything": lambda t: t["a"][...],
    "one element": lambda t: t["c"][-1],
    "one expert": lambda t: torch.stack([t["a"], t["b"]])[1],
    "one of the experts that are joined": lambda t: torch.stack([t["a"], t["b"]]).transpose(1, 2)[1],
    "one transposed expert": lambda t: t["c"].transpose(1, 2)[2],
    "one column": lambda t: t["c"][:, 1],
    "unbind": lambda t: t["c"].unbind(1)[2],
    "reshape": lambda t: t["a"].reshape(3, 2, 4),
    "flatten of columns": lambda t: t["a"].T.reshape(-1),
    "a dimension more, and less": lambda t: t["a"].unsqueeze(1).squeeze(1),
    "halves of rotary heads": lambda t: t["a"].view(1, 2, 3, 4).transpose(1, 2).reshape(6, 4),
    "fused heads": lambda t: torch.cat([part.reshape(-1, 2) for part in t["c"].split([1, 1, 1], dim=1)]),
    "cast": lambda t: t["a"].to(torch.bfloat16),
    "cast, then moved": lambda t: torch.cat([t["a"].to(torch.float16)[:2], t["b"].half()]),
    "copies": lambda t: t["a"].detach().clone().contiguous().to("cpu"),
    "padded by nothing": lambda t: torch.nn.functional.pad(t["a"], (0, 0)),
}


@pytest.fixture
def values() -> Tensors:
    return {"a": torch.randn(6, 4), "b": torch.randn(6, 4), "c": torch.randn(3, 3, 2)}


@pytest.fixture
def trace(tmp_path: Path, values: Tensors) -> Trace:
    save_file(values, tmp_path / "model.safetensors")
    return Trace(stored_tensors([tmp_path / "model.safetensors"]))


@pytest.mark.parametrize("name", MOVES)
def test_a_moved_tensor_is_read_and_loaded_as_torch_moves_it(name: str, trace: Trace, values: Tensors) -> None:
    expected, traced = MOVES[name](values), MOVES[name](trace.tensors())
    assert isinstance(traced, TracedTensor) and not trace.problem
    assert (traced.shape, traced.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(traced.read(), expected)
    described = WeightSource(str(expected.dtype).removeprefix("torch."), tuple(expected.shape), traced.source)
    with loading_weights({"w": described}, trace.checkpoint, "cpu") as loading:
        pass
    assert torch.equal(loading.tensors["w"], expected)
    assert loading.total.num_bytes > 0


def test_parts_of_a_weight_are_read_to_their_places(trace: Trace) -> None:
    """No source of a plain, packed or stacked weight is evaluated in host memory."""
    t = trace.tensors()
    assert t["a"].source == ["tensor", "a"]  # type: ignore[attr-defined]
    packed: Any = torch.cat([t["a"], t["b"][2:4]])
    assert packed.source == ["cat", 0, [["tensor", "a"], ["slice", 0, 2, 4, ["tensor", "b"]]]]
    experts: Any = MOVES["joined stacks"](t)
    pairs = [[["tensor", first], ["tensor", second]] for first, second in ("ab", "ba")]
    assert experts.source == ["stack", 0, [["cat", 0, pair] for pair in pairs]]


COMPUTED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "sum": (lambda t: t["a"] + t["b"], "aten.add.Tensor computes values of weights"),
    "scale": (lambda t: t["a"] * 2, "aten.mul.Tensor computes values of weights"),
    "every second row": (lambda t: t["a"][::2], "weights are sliced with a step"),
    "zeros": (lambda t: torch.nn.functional.pad(t["a"], (0, 1)), "weights are padded"),
    "foreign": (
        lambda t: torch.cat([t["a"], torch.ones(1, 4)]),
        "combined with a tensor that is not in the checkpoint",
    ),
    "two casts": (lambda t: t["a"].bfloat16().float(), "weights are cast to torch.bfloat16, and then to torch.float32"),
    "dtypes": (lambda t: torch.cat([t["a"], t["b"].half()]), "weights of different dtypes are joined"),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_an_operation_that_computes_values_is_an_error_which_the_trace_keeps(name: str, trace: Trace) -> None:
    operation, message = COMPUTED[name]
    with pytest.raises(UnknownOperationError, match=message):
        operation(trace.tensors())
    assert message in trace.problem
    with pytest.raises(UnknownOperationError):
        trace.tensors()["a"].sin()
    assert message in trace.problem, "the first problem, of which the others may be consequences"


def test_traced_tensors_are_compared_by_value(trace: Trace, tmp_path: Path, values: Tensors) -> None:
    """transformers ties two tensors of a checkpoint only if they are equal."""
    t = trace.tensors()
    assert torch.equal(t["a"], t["a"].clone()) and not torch.equal(t["a"], t["b"])
    path = tmp_path / "tied.safetensors"
    save_file({"a": values["a"], "copy": values["a"].clone()}, path)
    tied = Trace(stored_tensors([path])).tensors()
    assert torch.equal(tied["a"], tied["copy"]) and torch.equal(tied["a"][1:], tied["copy"][1:])
