"""How a model's tensors are found in its checkpoint, and read back from the description."""

from __future__ import annotations

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
    WeightNotInCheckpointError,
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
    tmp_path: Path, checkpoint: dict[str, Tensor], model: nn.Module, packed: tuple[tuple[str, ...], ...] = ()
) -> DescribedWeights:
    """Describe, check that what is loaded back equals the model, and return the description."""
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.items()}, path)
    stored = stored_tensors([path])
    described = describe_weights(model, stored, packed)
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


def test_renamed_and_cast_tensors_are_found_by_value(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    described = describe(tmp_path, {"model.w": w}, model_of({"w": w.to(torch.bfloat16)}))
    assert sources(described) == {"w": ["tensor", "model.w"]}


def test_equal_tensors_are_told_apart_by_their_names(tmp_path: Path) -> None:
    """Norms are often all ones. Another checkpoint of the same shapes need not have this in common."""
    ones = {name: torch.ones(5) for name in ("a_norm", "b_norm", "c_norm")}
    model = model_of({name: tensor.clone() for name, tensor in ones.items()})
    assert sources(describe(tmp_path, ones, model)) == {name: ["tensor", name] for name in ones}


def test_packed_and_stacked_tensors_are_found_by_their_parts(tmp_path: Path) -> None:
    experts = {f"{index}.{part}": torch.randn(3, 4) for index in range(2) for part in ("w1", "w3")}
    checkpoint = {"q": torch.randn(6, 4), "k": torch.randn(2, 4), "v": torch.randn(2, 4), **experts}
    packed = torch.cat([checkpoint["q"], checkpoint["k"], checkpoint["v"]])
    stacked = torch.stack([torch.cat([experts[f"{index}.w1"], experts[f"{index}.w3"]]) for index in range(2)])
    found = sources(describe(tmp_path, checkpoint, model_of({"qkv": packed, "experts": stacked})))
    assert found["qkv"] == ["cat", [["tensor", "q"], ["tensor", "k"], ["tensor", "v"]]]
    assert found["experts"] == [
        "stack", [["cat", [["tensor", f"{index}.w1"], ["tensor", f"{index}.w3"]]] for index in range(2)]
    ]  # fmt: skip


def test_packed_layers_are_found_by_their_names(tmp_path: Path) -> None:
    """The biases of a model may all be zeros. Then their values are equal, and only their names differ."""
    checkpoint = {
        f"model.layers.{layer}.{part}.{leaf}": torch.randn(rows, 4) if leaf == "weight" else torch.zeros(rows)
        for layer in range(2)
        for part, rows in (("q", 6), ("k", 2), ("v", 2))
        for leaf in ("weight", "bias")
    }
    checkpoint["model.norm.bias"] = torch.zeros(10)  # of the shape of the packed biases
    model, groups = nn.Module(), []
    for layer in range(2):
        group = tuple(f"layers.{layer}.{part}" for part in "qkv")
        groups.append(group)
        tensors = {
            f"packed_{leaf}": torch.cat([checkpoint[f"model.{path}.{leaf}"] for path in group])
            for leaf in ("weight", "bias")
        }
        for path in group:
            parent = model
            for name in path.split("."):
                if not hasattr(parent, name):
                    parent.register_module(name, nn.Module())
                parent = parent.get_submodule(name)
            for leaf, tensor in tensors.items():
                parent.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    found = sources(describe(tmp_path, checkpoint, model, tuple(groups)))
    expected = [["tensor", f"model.layers.1.{part}.bias"] for part in "qkv"]
    assert found["layers.1.q.packed_bias"] == ["cat", expected]
    assert found["layers.1.v.packed_bias"] == ["same", "layers.1.q.packed_bias"]


@pytest.mark.parametrize("form", ["whole", "joined"])
def test_equal_tensors_without_a_name_of_the_model_are_ambiguous(tmp_path: Path, form: str) -> None:
    checkpoint = {"a": torch.zeros(4), "b": torch.zeros(4)}
    model = model_of({"w": torch.zeros(4 if form == "whole" else 8)})
    with pytest.raises(WeightNotInCheckpointError, match="w is not in the checkpoint"):
        describe(tmp_path, checkpoint, model)


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


def test_a_long_table_is_compared_up_to_the_first_row_that_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    compared: list[Tensor] = []

    class CountingFinder(weight_sources._Finder):
        def _candidates(self, tensor: Tensor) -> list[str]:
            compared.append(tensor)
            return super()._candidates(tensor)

    save_file({"w": torch.randn(4, 6)}, tmp_path / "model.safetensors")
    finder = CountingFinder(stored_tensors([tmp_path / "model.safetensors"]), (), [torch.float32])
    assert finder.find("cos", torch.linspace(0, 1, 6000).view(1000, 6)) is None
    assert len(compared) == 2  # the table, and its first row


@pytest.mark.parametrize("change", ["value", "transposed"])
def test_a_parameter_that_the_checkpoint_lacks_is_an_error(tmp_path: Path, change: str) -> None:
    w = torch.randn(64, 64)
    other = w.clone()
    other[-1, -1] += 1  # the first elements are equal
    model = model_of({"w": other if change == "value" else w.T.contiguous().T})
    with pytest.raises(WeightNotInCheckpointError, match="w is not in the checkpoint"):
        describe(tmp_path, {"w": w}, model)


@pytest.mark.parametrize("position", [40, -1])  # behind the fingerprint
def test_tensors_are_compared_in_chunks(tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sources, "CHUNK_ELEMENTS", 5)
    w = torch.arange(60.0).view(10, 6)
    assert sources(describe(tmp_path, {"w": w}, model_of({"renamed": w.clone()})))["renamed"] == ["tensor", "w"]
    other = w.clone()
    other.view(-1)[position] += 1
    with pytest.raises(WeightNotInCheckpointError, match="renamed is not in the checkpoint"):
        describe(tmp_path, {"w": w}, model_of({"renamed": other}))


def test_a_checkpoint_with_other_shapes_does_not_fit(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    described = describe(tmp_path, {"w": w}, model_of({"w": w.clone()}))
    path = tmp_path / "other.safetensors"
    save_file({"w": torch.randn(6, 4)}, path)
    with pytest.raises(ValueError, match=r"w has the shape \[6, 4\], not \[4, 6\]"):
        loading_weights(described.sources, stored_tensors([path]), "cpu").__enter__()
