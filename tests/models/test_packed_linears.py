"""Packing linear layers that share an input: how groups are found, equal logits, and no second copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tcdeploy.models.convert.packed_linears import PackedSlice, pack_linears
from tcdeploy.models.load import load_config
from tcdeploy.planning.recipe import build_recipe
from tests.model_families import LAYERS, probe, save_config

QKV_AND_MLP = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]
GROUPS = {
    "llama": QKV_AND_MLP,
    "qwen2": QKV_AND_MLP,
    "gemma2": QKV_AND_MLP,
    "mixtral": [{"q_proj", "k_proj", "v_proj"}],  # its experts are not linear layers
    "cohere": QKV_AND_MLP,  # all five read one tensor, but attention and MLP can be separate regions
    "qwen2_moe": QKV_AND_MLP,  # of the shared expert; its gate has one row
    "phi3": [],  # packed in the checkpoint
    "gpt2": [],
}


def small_model(family: str, folder: Path) -> tuple[Any, Any]:
    config = load_config(build_recipe({"model": save_config(family, folder)}, environ={}))
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    return config, AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("family", GROUPS)
def test_the_probe_finds_the_layers_that_share_an_input(family: str, tmp_path: Path) -> None:
    config, _ = small_model(family, tmp_path)
    groups = probe(config).packed_linears
    assert [{path.rpartition(".")[2] for path in group} for group in groups] == GROUPS[family] * LAYERS


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_packed_weights_are_the_only_copy_and_give_the_same_logits(family: str, tmp_path: Path) -> None:
    config, model = small_model(family, tmp_path)
    ids = torch.arange(3, 20)[None]
    before = model(input_ids=ids, use_cache=False).logits
    bytes_before = sum(parameter.nbytes for parameter in model.parameters())
    groups = probe(config).packed_linears
    pack_linears(model, groups)
    slices = [model.get_submodule(path) for group in groups for path in group]
    assert all(isinstance(module, PackedSlice) for module in slices)
    assert sum(parameter.nbytes for parameter in model.parameters()) == bytes_before
    assert len({module.packed_weight.data_ptr() for module in slices}) == len(groups)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_a_slice_equals_the_layer_that_it_replaced() -> None:
    holder = nn.ModuleDict({name: nn.Linear(8, rows) for name, rows in (("a", 3), ("b", 5))})
    x = torch.randn(2, 8)
    expected = {name: holder[name](x) for name in holder}
    weights = {name: holder[name].weight.clone() for name in holder}
    pack_linears(holder, (("a", "b"),))
    for name in ("a", "b"):
        torch.testing.assert_close(holder[name](x), expected[name], rtol=0, atol=1e-6)
        assert torch.equal(holder[name].weight, weights[name])


def test_smaller_groups_are_packed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = nn.ModuleDict({name: nn.Linear(8, rows) for name, rows in (("a", 30), ("b", 50), ("c", 3), ("d", 5))})
    packed = []
    concatenate = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: (packed.append(sum(map(len, parts))), concatenate(parts))[1])
    pack_linears(holder, (("a", "b"), ("c", "d")))
    assert packed == [8, 8, 80, 80]  # weights and biases


@pytest.mark.gpu
def test_packing_leaves_no_part_of_a_block_unused() -> None:
    """Shapes of an 8B model: memory that is reserved but not allocated is lost to other processes."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    sizes = {"q": 4096, "k": 1024, "v": 1024, "gate": 14336, "up": 14336}
    layers = {
        f"{name}{layer}": nn.Linear(4096, rows, bias=False, device="cuda", dtype=torch.bfloat16)
        for layer in range(8)
        for name, rows in sizes.items()
    }
    groups = [(f"q{layer}", f"k{layer}", f"v{layer}") for layer in range(8)]
    groups += [(f"gate{layer}", f"up{layer}") for layer in range(8)]
    model = nn.ModuleDict(layers)
    del layers
    pack_linears(model, tuple(sorted(groups, key=lambda paths: paths[0][-1])))  # layer by layer
    torch.cuda.empty_cache()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before
    assert unused < 64 << 20, f"{unused >> 20} MiB"


def _add_scale(layer: nn.Linear) -> None:
    layer.weight_scale = nn.Parameter(torch.ones(1))


def _add_buffer(layer: nn.Linear) -> None:
    layer.register_buffer("input_scale", torch.ones(1))


def _replace_forward(layer: nn.Linear) -> None:
    layer.forward = lambda x: x  # type: ignore[method-assign]


def _store_in_8_bits(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize("change", [_add_scale, _add_buffer, _replace_forward, _store_in_8_bits])
def test_a_layer_that_does_more_than_multiply_is_not_packed(change: Callable[[nn.Linear], None]) -> None:
    """As quantised checkpoints have them, whose layers keep the class nn.Linear."""
    holder = nn.ModuleDict({name: nn.Linear(8, 4) for name in ("a", "b")})
    for layer in holder.values():
        change(layer)  # type: ignore[arg-type]
    pack_linears(holder, (("a", "b"),))
    assert all(type(layer) is nn.Linear for layer in holder.values())
