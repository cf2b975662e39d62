"""Models that compute token positions of their own are refused before their weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.models.positions import PositionTracer
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.decide import decide
from tcdeploy.torch_compat.dynamo.dispatch_mode import observe_operations
from tests.model_families import SHAPE_ONLY, SUPPORTED, probe

TOKENS = 13
DIM = 8
REASON = "computes token positions of its own instead of using position_ids, so prompts cannot be packed"
BART: dict[str, Any] = {
    "vocab_size": 256, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "max_position_embeddings": 512,
    "is_decoder": True, "is_encoder_decoder": False, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    **SUPPORTED["qwen3"], "num_local_experts": 2, "layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0],
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 256}  # fmt: skip


@pytest.mark.parametrize("family", ["bart", "mbart", "plbart", "pegasus", "marian", "blenderbot"])
def test_a_decoder_that_numbers_its_tokens_is_refused_before_loading(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family, **BART).save_pretrained(tmp_path / "model")
    flags = {"model": str(tmp_path / "model"), "load_format": "dummy", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UnsupportedModelError) as caught:
        decide(build_recipe(flags, environ={}))
    assert caught.value.message == f"{family} {REASON}"
    assert caught.value.hint


def test_a_temperature_by_token_number_is_refused() -> None:
    """Llama 4 scales the queries of layers without rotary embedding by the number of the token in the row."""
    with pytest.raises(UnsupportedModelError, match=f"llama4_text {REASON}"):
        probe(AutoConfig.for_model("llama4_text", **LLAMA4))
    assert probe(AutoConfig.for_model("llama4_text", **LLAMA4, attn_temperature_tuning=False)).attention_layers


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "mixtral", "qwen2_moe", "opt", "biogpt", "gemma3_text"])
def test_a_model_that_uses_position_ids_is_accepted(family: str) -> None:
    """Learned positions looked up with position_ids; experts, whose routing sorts and counts tokens."""
    assert probe(AutoConfig.for_model(family, **{**SUPPORTED, **SHAPE_ONLY}.get(family, {}))).attention_layers


def test_rotary_factors_computed_in_the_forward_pass_are_accepted() -> None:
    sizes = {**SUPPORTED["phi3"], "rope_parameters": LONGROPE, "original_max_position_embeddings": 256}
    assert probe(AutoConfig.for_model("phi3", **sizes)).attention_layers


class Model(nn.Module):
    """Tables of weights and a hidden state per token, [1, TOKENS, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, DIM))
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.register_buffer("numbers", torch.arange(64)[None])

    def embed(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.table) @ self.weight


def counts_tokens(forward: Callable[[Model, Tensor, Tensor], Tensor]) -> bool:
    model, ids, position_ids = Model(), torch.ones(1, TOKENS, dtype=torch.long), torch.arange(TOKENS)[None]
    tracer = PositionTracer(TOKENS)
    tracer.start(ids, position_ids)
    with torch.no_grad(), observe_operations(tracer.record):
        output = forward(model, ids, position_ids)
    tracer.check(output)
    return tracer.counts_tokens


def embed_range(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    return model.embed(ids) + nn.functional.embedding(torch.arange(TOKENS) + 2, model.table)


def embed_mask_sum(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    return model.embed(ids) + model.table[mask.cumsum(-1) * mask - 1]


def embed_sum_of_ids(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    return model.embed(ids) + model.table.index_select(0, ids.ne(0).cumsum(1).view(-1))


def add_first_rows(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    return model.embed(ids) + model.table[:TOKENS]


def embed_buffer(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    return model.embed(ids) + model.table[model.numbers[:, :TOKENS]]


def add_sinusoids(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    angles = torch.arange(TOKENS).float()[:, None] * torch.arange(0, DIM, 2)
    return model.embed(ids) + torch.cat([angles.sin(), angles.cos()], -1)


def add_positions_in_place(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    positions = torch.zeros(1, TOKENS, DIM)
    positions[0, :, 0] = torch.arange(TOKENS)
    return model.embed(ids).add_(positions)


def rotate_by_range(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(TOKENS).float(), torch.arange(DIM // 2))
    states = torch.view_as_complex(model.embed(ids).unflatten(-1, (DIM // 2, 2)))
    return torch.view_as_real(states * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize(
    "forward",
    [embed_range, embed_mask_sum, embed_sum_of_ids, add_first_rows, embed_buffer, add_sinusoids,
     add_positions_in_place, rotate_by_range],
)  # fmt: skip
def test_own_positions_are_found(forward: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
    assert counts_tokens(forward)


def embed_position_ids(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    return model.embed(ids) + nn.functional.embedding(position_ids + 2, model.table)


def rotate_by_position_ids(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    angles = position_ids[..., None].float() / 10 ** (torch.arange(0, DIM) / DIM)
    return model.embed(ids) * angles.cos()


def mask_by_range(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    mask = torch.arange(TOKENS)[:, None] >= torch.arange(TOKENS)
    return mask.float() @ model.embed(ids)[0]


def sort_by_expert(model: Model, ids: Tensor, position_ids: Tensor) -> Tensor:
    """Routes each token to one expert: sorts, counts, moves rows and moves them back."""
    states = model.embed(ids)[0]
    expert = states[:, :2].argmax(-1)
    order = expert.argsort()
    offsets = nn.functional.one_hot(expert, 2).cumsum(0)
    moved = states[order] * model.weight[expert[order]]
    back = torch.empty_like(order)
    back[order] = torch.arange(TOKENS)
    by_capacity = torch.zeros(2, TOKENS, DIM).index_put((expert, offsets.gather(1, expert[:, None])[:, 0] - 1), states)
    return moved[back] + by_capacity[expert, torch.arange(TOKENS)]


@pytest.mark.parametrize("forward", [embed_position_ids, rotate_by_position_ids, mask_by_range, sort_by_expert])
def test_position_ids_masks_and_routing_are_not_mistaken_for_counted_positions(
    forward: Callable[[Model, Tensor, Tensor], Tensor],
) -> None:
    assert not counts_tokens(forward)
