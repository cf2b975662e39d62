"""How a model's tensors are found in its checkpoint, and read back from the description."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tcdeploy.models.weights import sources as weight_sources
from tcdeploy.models.weights.reader import stored_tensors
from tcdeploy.models.weights.sources import (
    DescribedWeights,
    Source,
    WeightNotInCheckpointError,
    WeightSource,
    copy_stored,
    describe_weights,
    loading_weights,
)


def model_of(parameters: dict[str, Tensor], buffers: dict[str, Tensor] | None = None) -> nn.Module:
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    for name, tensor in (buffers or {}).items():
        model.register_buffer(name, tensor, persistent=False)
    return model


def describe(
    tmp_path: Path, checkpoint: dict[str, Tensor], model: nn.Module, traced: dict[str, Source] | None = None
) -> DescribedWeights:
    """Describe, check that what is loaded back equals the model, and return the description.

    traced: the sources of the model's tensors; None: those of the same name.
    """
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.items()}, path)
    stored = stored_tensors([path])
    if traced is None:
        traced = {name: ["tensor", name] for name in checkpoint}
    described = describe_weights(model, traced, stored)
    with loading_weights(described.sources, stored, "cpu") as loading:
        pass
    copy_stored(described, loading.tensors)
    loaded = loading.tensors
    assert loading.total.num_bytes > 0 and loading.total.seconds > 0
    expected = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    return described


def sources(described: DescribedWeights) -> dict[str, Any]:
    return {name: item.source for name, item in described.sources.items()}


def test_renamed_and_cast_tensors_are_loaded(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    traced: dict[str, Source] = {"w": ["tensor", "model.w"]}
    assert sources(describe(tmp_path, {"model.w": w}, model_of({"w": w.to(torch.bfloat16)}), traced)) == traced


def test_packed_and_stacked_tensors_are_loaded_from_their_parts(tmp_path: Path) -> None:
    experts = {f"{index}.{part}": torch.randn(3, 4) for index in range(2) for part in ("w1", "w3")}
    checkpoint = {"q": torch.randn(6, 4), "k": torch.randn(2, 4), "v": torch.randn(2, 4), **experts}
    packed = torch.cat([checkpoint["q"], checkpoint["k"], checkpoint["v"]])
    stacked = torch.stack([torch.cat([experts[f"{index}.w1"], experts[f"{index}.w3"]]) for index in range(2)])
    traced: dict[str, Source] = {
        "qkv": ["cat", 0, [["tensor", name] for name in "qkv"]],
        "experts": [
            "stack", 0, [["cat", 0, [["tensor", f"{index}.w1"], ["tensor", f"{index}.w3"]]] for index in range(2)]
        ],
    }  # fmt: skip
    assert sources(describe(tmp_path, checkpoint, model_of({"qkv": packed, "experts": stacked}), traced)) == traced


def test_joined_stacks_are_read_element_by_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers stacks gate and up of all experts, and joins both, which would take gigabytes of memory."""
    experts = {f"{part}.{index}": torch.randn(3, 4) for index in range(3) for part in ("gate", "up")}
    stacks: list[Source] = [
        ["stack", 0, [["tensor", f"{part}.{index}"] for index in range(3)]] for part in ("gate", "up")
    ]
    by_part = [torch.stack([experts[f"{part}.{index}"] for index in range(3)]) for part in ("gate", "up")]
    model = model_of({"rows": torch.cat(by_part, 1), "columns": torch.cat(by_part, 2)})
    traced: dict[str, Source] = {"rows": ["cat", 1, stacks], "columns": ["cat", 2, stacks]}
    assert sources(describe(tmp_path, experts, model, traced)) == traced
    stored = stored_tensors([tmp_path / "model.safetensors"])
    monkeypatch.setattr(weight_sources, "evaluate", None)
    rows = {"rows": WeightSource("float32", (3, 6, 4), traced["rows"])}
    with loading_weights(rows, stored, "cpu") as loading:
        pass
    assert torch.equal(loading.tensors["rows"], torch.cat(by_part, 1))


def test_tied_tensors_are_loaded_once(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
    model.embedding.weight = model.head.weight = nn.Parameter(w, requires_grad=False)
    described = describe(tmp_path, {"embedding.weight": w}, model)
    assert sources(described)["head.weight"] == ["same", "embedding.weight"]


def test_a_computed_buffer_is_stored(tmp_path: Path) -> None:
    w, frequencies = torch.randn(4, 6), torch.linspace(0, 1, 8)
    described = describe(tmp_path, {"w": w}, model_of({"w": w.clone()}, {"inv_freq": frequencies}))
    assert sources(described)["inv_freq"] == ["stored", "inv_freq"] and described.stored.keys() == {"inv_freq"}


def test_a_parameter_that_the_checkpoint_lacks_is_an_error(tmp_path: Path) -> None:
    w = torch.randn(8, 8)
    with pytest.raises(WeightNotInCheckpointError, match="other is not in the checkpoint"):
        describe(tmp_path, {"w": w}, model_of({"w": w.clone(), "other": w.clone()}))


def test_a_parameter_of_another_shape_is_an_error(tmp_path: Path) -> None:
    w = torch.randn(8, 8)
    with pytest.raises(WeightNotInCheckpointError, match=r"w does not fit the checkpoint: w has the shape \[8, 8\]"):
        describe(tmp_path, {"w": w}, model_of({"w": w[:4].clone()}))


def test_a_source_that_is_not_in_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    w = torch.randn(8, 8)
    with pytest.raises(WeightNotInCheckpointError, match="w does not fit the checkpoint: 'other'"):
        describe(tmp_path, {"w": w}, model_of({"w": w}), {"w": ["tensor", "other"]})


def test_a_parameter_that_is_not_contiguous_is_an_error(tmp_path: Path) -> None:
    w = torch.randn(8, 8)
    with pytest.raises(WeightNotInCheckpointError, match="w is not contiguous"):
        describe(tmp_path, {"w": w}, model_of({"w": w.T.contiguous().T}))


@pytest.mark.parametrize("position", [0, 40, -1])
@pytest.mark.parametrize("form", ["plain", "cast", "transposed", "part"])
def test_other_values_are_an_error_wherever_they_are(
    tmp_path: Path, form: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sources, "CHUNK_ELEMENTS", 5)
    stored = torch.arange(120.0).view(20, 6)
    forms: dict[str, tuple[Tensor, Source]] = {
        "plain": (stored, ["tensor", "w"]),
        "cast": (stored.bfloat16(), ["tensor", "w"]),
        "transposed": (stored.T.contiguous(), ["permute", [1, 0], ["tensor", "w"]]),
        "part": (stored[7:17], ["slice", 0, 7, 17, ["tensor", "w"]]),
    }
    w, source = forms[form]
    assert sources(describe(tmp_path, {"w": stored}, model_of({"v": w.clone()}), {"v": source})) == {"v": source}
    other = w.clone()
    other.view(-1)[position] += 1
    with pytest.raises(WeightNotInCheckpointError, match="v has other values than the checkpoint"):
        describe(tmp_path, {"w": stored}, model_of({"v": other}), {"v": source})


@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_values_are_compared_on_the_host_if_the_device_has_no_memory_left(
    tmp_path: Path, fault: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, calls = weight_sources._has_values, list[int]()

    def compare_twice(tensor: Tensor, values: Tensor) -> bool:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return compare(tensor, values)

    monkeypatch.setattr(weight_sources, "_has_values", compare_twice)
    w = torch.randn(4, 6)
    with pytest.raises(WeightNotInCheckpointError) if fault else contextlib.nullcontext():
        describe(tmp_path, {"w": w}, model_of({"w": w + fault}))
    assert len(calls) == 2


def test_a_checkpoint_with_other_shapes_does_not_fit(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    described = describe(tmp_path, {"w": w}, model_of({"w": w.clone()}))
    path = tmp_path / "other.safetensors"
    save_file({"w": torch.randn(6, 4)}, path)
    with pytest.raises(ValueError, match=r"w has the shape \[6, 4\], not \[4, 6\]"):
        loading_weights(described.sources, stored_tensors([path]), "cpu").__enter__()
