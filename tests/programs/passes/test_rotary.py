"""RoPE is fused into decode attention if q and k come from a linear layer; anything else is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tcdeploy.kernels.attention import ops
from tcdeploy.programs.passes.post_grad import PostGradPass
from tests.programs.passes.compiled_targets import compile_and_run

HEADS, KV_HEADS, DIM, BATCH, WIDTH = 4, 2, 16, 3, 48
ENDS = (HEADS * DIM, (HEADS + KV_HEADS) * DIM, (HEADS + 2 * KV_HEADS) * DIM)
torch.manual_seed(10)
WEIGHT = torch.randn(ENDS[-1], WIDTH) / WIDTH**0.5
ANGLES = torch.randn(1, BATCH, DIM // 2).repeat(1, 1, 2)
Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention(rotate: Rotation, batch: int) -> Callable[..., Tensor]:
    """Decode attention as transformers' layers call it: q, k and v [1, heads, tokens, dim], slices of one product."""

    def run(x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        packed = linear(x, WEIGHT.to(x.dtype))
        parts = [packed[..., begin:end] for begin, end in zip((0, *ENDS), ENDS, strict=False)]
        q, k, v = (part.view(1, batch, -1, DIM).transpose(1, 2) for part in parts)
        q, k = rotate(q, k, cos, sin)
        q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
        table = torch.arange(1, 1 + 2 * batch, dtype=torch.int32).view(batch, 2)
        lengths = torch.tensor([5, 20, 32][:batch], dtype=torch.int32)
        split_counters = torch.zeros(batch, KV_HEADS, dtype=torch.int32)
        return ops.decode_attention(
            q, k, v, k_cache, v_cache, table, lengths, split_counters, None, 0.25, 0, 0.0, 1, "reference"
        )

    return run


class RotaryCheckingPass(PostGradPass):
    is_fused: bool

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        [self.is_fused] = [node.kwargs.get("cos") is not None for node in graph.nodes if "q" in node.kwargs]


def is_rope_fused(
    rotate: Rotation,
    fused_epilogues: bool = True,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dtype: Any = torch.float32,
    codegen: bool = False,
    batch: int = BATCH,
) -> bool:
    """Whether RoPE was fused. The result and both caches must match the uncompiled function."""
    checking_pass, function = RotaryCheckingPass(fused_epilogues=fused_epilogues), attention(rotate, batch)
    caches = [torch.randn(1 + 2 * batch, 16, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
    x = torch.randn(1, batch, WIDTH, dtype=dtype)
    cos, sin = (
        getattr(ANGLES[:, :batch], name)().to(dtype) if factor is None else factor
        for name, factor in (("cos", cos), ("sin", sin))
    )
    expected_caches = [cache.clone() for cache in caches]
    expected = function(x, cos, sin, *expected_caches)
    out = compile_and_run(function, x, cos, sin, *caches, post_grad_pass=checking_pass, codegen=codegen)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches, expected_caches, rtol=tolerance, atol=tolerance)
    return checking_pass.is_fused


def test_transformers_rope_is_fused_into_attention() -> None:
    assert is_rope_fused(apply_rotary_pos_emb, codegen=True)
    assert is_rope_fused(apply_rotary_pos_emb, dtype=torch.bfloat16, codegen=True)
    assert not is_rope_fused(apply_rotary_pos_emb, fused_epilogues=False), "fused_epilogues is off"


def test_unsupported_layouts_of_cos_and_sin_are_not_fused() -> None:
    shared_angles = ANGLES[:, :1]
    assert not is_rope_fused(apply_rotary_pos_emb, cos=shared_angles.cos(), sin=shared_angles.sin())
    column_first = ANGLES.sin().transpose(1, 2).contiguous().transpose(1, 2)
    assert not is_rope_fused(apply_rotary_pos_emb, sin=column_first), "strides differ"


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + halves(x) * sin[:, None]


def normalised_before(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rope(torch.nn.functional.rms_norm(q, (DIM,)), cos, sin), apply_rope(k, cos, sin)


def make_norm(dtype: torch.dtype, eps: float = 1e-2) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(DIM, eps)
    norm.weight = torch.nn.Parameter(torch.randn(DIM, dtype=dtype), requires_grad=False)
    return norm


NORMS = {dtype: (make_norm(dtype), make_norm(dtype)) for dtype in (torch.float32, torch.bfloat16)}
Q_NORM, K_NORM = NORMS[torch.float32]
OTHER_EPS = make_norm(torch.float32, eps=0.5)


def normalised_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """As in Qwen3, which normalises before it transposes."""
    q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in zip(NORMS[q.dtype], (q, k), strict=True))
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_heads_are_fused_with_rope_at_batch_1(dtype: Any) -> None:
    assert is_rope_fused(normalised_heads, dtype=dtype, codegen=True, batch=1)
    assert not is_rope_fused(normalised_heads, dtype=dtype)


def only_queries_normalised(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rope(Q_NORM(q), cos, sin), apply_rope(k, cos, sin)


def with_two_eps(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rope(Q_NORM(q), cos, sin), apply_rope(OTHER_EPS(k), cos, sin)


def by_factors_of_each_token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return tuple(apply_rope(rms_norm(x, (DIM,), None, 1e-2) * cos[0, 0], cos, sin) for x in (q, k))


def over_all_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The mean is over all heads, as in OLMo 2. The weights are those of one head."""

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean((1, 3), keepdim=True) + 1e-2) * weight

    return apply_rope(normalise(q, Q_NORM.weight), cos, sin), apply_rope(normalise(k, K_NORM.weight), cos, sin)


def in_another_shape(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return tuple(
        apply_rope(norm(x.transpose(1, 2)).reshape(x.shape), cos, sin) for norm, x in ((Q_NORM, q), (K_NORM, k))
    )


def of_sums(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Norms of sums instead of products."""
    return tuple(apply_rope(norm(x + 1), cos, sin) for norm, x in ((Q_NORM, q), (K_NORM, k)))


@pytest.mark.parametrize(
    "rotate",
    [only_queries_normalised, with_two_eps, by_factors_of_each_token, over_all_heads, in_another_shape, of_sums],
)
def test_other_norms_are_not_fused(rotate: Rotation) -> None:
    assert not is_rope_fused(rotate, batch=1)


def keys_only(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return q, apply_rope(k, cos, sin)


def by_different_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rope(q, cos, sin), apply_rope(k, cos.abs(), sin)


def in_the_other_direction(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return tuple(x * cos[:, None] - halves(x) * sin[:, None] for x in (q, k))


def with_the_sign_on_the_other_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def swapped(x: Tensor) -> Tensor:
        return torch.cat((x[..., DIM // 2 :], -x[..., : DIM // 2]), dim=-1)

    return tuple(x * cos[:, None] + swapped(x) * sin[:, None] for x in (q, k))


def by_quarters(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def swapped(x: Tensor) -> Tensor:
        return torch.cat((-x[..., DIM // 4 :], x[..., : DIM // 4]), dim=-1)

    return tuple(x * cos[:, None] + swapped(x) * sin[:, None] for x in (q, k))


def part_of_the_head(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def partly(x: Tensor) -> Tensor:
        first, rest = x.chunk(2, -1)
        swapped = torch.cat((-first[..., DIM // 4 :], first[..., : DIM // 4]), dim=-1)
        return torch.cat([first * cos[:, None, :, : DIM // 2] + swapped * sin[:, None, :, : DIM // 2], rest], -1)

    return partly(q), partly(k)


def rotated_in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return tuple(apply_rope(x.float(), cos, sin).to(x.dtype) for x in (q, k))


@pytest.mark.parametrize("rotate", [normalised_before, rotated_in_float32])
def test_in_bfloat16_too_only_a_product_is_fused(rotate: Rotation) -> None:
    """A conversion to bfloat16 does not make its argument a product."""
    assert not is_rope_fused(rotate, dtype=torch.bfloat16)


def one_token_broadcast_to_all_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rope(q[:, :, :1], cos, sin), apply_rope(k[:, :, :1], cos, sin)


@pytest.mark.parametrize(
    "rotate",
    [
        one_token_broadcast_to_all_positions, normalised_before, keys_only, by_different_angles, in_the_other_direction,
        with_the_sign_on_the_other_half, by_quarters, part_of_the_head,
    ],
)  # fmt: skip
def test_other_rotations_are_not_fused(rotate: Rotation) -> None:
    assert not is_rope_fused(rotate)
