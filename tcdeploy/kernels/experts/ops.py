"""The ops of mixture-of-experts layers, which programs call as opaque nodes.

    top_k                the experts of each token and their weights (routing.py)
    group_pairs          which (token, slot) pairs belong to which expert; once for the two products of a layer
    expert_linear        a product of each pair with the weight of its expert, dense or in any scheme
                         (planning/schemes.py)
    eager_expert_linear  the same in plain torch, for layers that run uncompiled
    gated_expert_linear  the same as expert_linear for few pairs, with SwiGLU
    expert_linear_sum    the same for few pairs, with the weighted sum over the pairs of a token

Graph passes insert `top_k` and the last two (programs/passes/router.py, experts.py). The weights of all experts stay in
device memory as they are stored. On a CPU, and where no kernel fits, each expert's weight is dequantised and multiplied
in plain torch (reference.py). Dense experts with many pairs use torch's grouped GEMM (grouped_mm.py).
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.experts import grouped_mm, matmul, routing
from tcdeploy.kernels.experts.grouping import group_by_expert, groups_length
from tcdeploy.kernels.experts.reference import expert_shape, multiply_by_expert

log = logging.getLogger("tcdeploy.programs")


@custom_op("top_k")
def top_k(scores: Tensor, k: int, softmax: str, dtype: str, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row, in descending order, in `dtype`, and their columns (int64): [rows, k] each.

    scores: [rows, columns], for which routing.is_supported. dtype: a key of routing.DTYPES.
    softmax: over "all" columns of the row or the "selected" ones, in float32; "none": values are scores.
    weights: [columns, ...] of experts, contiguous. On a GPU with PDL, the beginning of each half of a chosen expert's
        weights is prefetched into the L2 cache.
    routing.py says how equal scores and NaN are ordered.
    """
    if scores.is_cuda:
        return routing.launch_top_k(routing.adjacent_columns(scores), k, softmax, routing.DTYPES[dtype], weights)
    return routing.plain_top_k(scores, k, softmax, routing.DTYPES[dtype])


@top_k.register_fake
def _(scores: Tensor, k: int, softmax: str, dtype: str, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows = scores.shape[0]
    return scores.new_empty(rows, k, dtype=routing.DTYPES[dtype]), scores.new_empty(rows, k, dtype=torch.int64)


@custom_op("group_pairs")
def group_pairs(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The `groups` of `expert_linear`: int32, of a length that depends on the shape of expert_ids and num_experts only.

    expert_ids [tokens, top_k] is int64, from 0 to num_experts - 1. A token may name an expert more than once.
    """
    return group_by_expert(expert_ids.contiguous(), num_experts)


@group_pairs.register_fake
def _(expert_ids: Tensor, num_experts: int) -> Tensor:
    length = groups_length(expert_ids.shape[0] * expert_ids.shape[1], num_experts)
    return expert_ids.new_empty(length, dtype=torch.int32)


@custom_op("expert_linear")
def expert_linear(
    x: Tensor, expert_ids: Tensor, groups: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str
) -> Tensor:
    """x @ w[expert].T + bias[expert] for each pair: [tokens * top_k, n] in x's dtype, contiguous.

    x: [tokens, k], the same row for all slots of a token; or [tokens * top_k, k], a row for each pair, which is
        token * top_k + slot.
    groups: group_pairs(expert_ids, experts).
    tensors: of the weights w [experts, n, k]. With scheme "" one dense tensor, which may be transposed; otherwise those
        of the scheme, in its order, contiguous, each with a leading dimension of experts.
    bias: [experts, n].
    """
    if x.is_cuda and matmul.accepts(scheme, x, tensors):
        if grouped_mm.takes(expert_ids.numel(), tensors, scheme):
            return grouped_mm.multiply_sorted(x, expert_ids, groups, tensors[0], bias)
        return matmul.matmul(x, expert_ids.contiguous(), groups, tensors, bias, scheme)
    if x.is_cuda:
        _warn_of_plain_torch(scheme or "no scheme", x.dtype)
    return multiply_by_expert(x, expert_ids, tensors, bias, scheme)


@functools.cache
def _warn_of_plain_torch(scheme: str, dtype: torch.dtype) -> None:
    """Once for each scheme and dtype."""
    log.warning(
        "no GPU kernel multiplies experts in %s by inputs in %s; plain torch does, which is slow", scheme, dtype
    )


@expert_linear.register_fake
def _(x: Tensor, expert_ids: Tensor, groups: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    n, _ = expert_shape(tensors, scheme)
    return x.new_empty(expert_ids.shape[0] * expert_ids.shape[1], n)


@custom_op("eager_expert_linear")
def eager_expert_linear(
    x: Tensor, expert_ids: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str
) -> Tensor:
    """`expert_linear` in plain torch. As one op, it costs precise_math (engine/check) one dispatch instead of many."""
    return multiply_by_expert(x, expert_ids, tensors, bias, scheme)


@eager_expert_linear.register_fake
def _(x: Tensor, expert_ids: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    n, _ = expert_shape(tensors, scheme)
    return x.new_empty(expert_ids.shape[0] * expert_ids.shape[1], n)


@custom_op("gated_expert_linear")
def gated_expert_linear(
    x: Tensor, expert_ids: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str,
    norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """silu(gate) * up of the halves of `expert_linear`, rounded once: [tokens * top_k, n / 2].

    For few pairs: matmul.is_fusable. With `norm` [k], for dense weights only, x is replaced by
    x / sqrt(mean(x^2) + eps) * norm, which is not rounded.
    """
    if x.is_cuda and matmul.accepts(scheme, x, tensors):
        ids = expert_ids.contiguous()
        return matmul.matmul(x, ids, None, tensors, bias, scheme, gated=True, norm=norm, eps=eps)
    if x.is_cuda:
        _warn_of_plain_torch(scheme or "no scheme", x.dtype)
    inputs = x.float()
    if norm is not None:
        inputs = inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    gate, up = multiply_by_expert(inputs, expert_ids, tensors, bias, scheme).chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@gated_expert_linear.register_fake
def _(
    x: Tensor, expert_ids: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str,
    norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    n, _ = expert_shape(tensors, scheme)
    return x.new_empty(expert_ids.shape[0] * expert_ids.shape[1], n // 2)


@custom_op("expert_linear_sum")
def expert_linear_sum(
    x: Tensor, expert_ids: Tensor, factors: Tensor, tensors: list[Tensor], bias: Tensor | None, addend: Tensor | None,
    scheme: str,
) -> Tensor:  # fmt: skip
    """The sum over the pairs of each token of factor * (x @ w[expert].T + bias[expert]), plus addend: [tokens, n].

    x: [tokens * top_k, k]. factors: [tokens, top_k]. tensors: of weights for which matmul.is_summable.
    addend: [tokens, n]. Summed in float32 and rounded once, to x's dtype.

    With PDL, the kernel reads expert_ids before the previous kernel has ended, so the previous kernel must not be the
    one that writes them. It is not if x was computed with expert_ids: the kernel that computed x is then in between.
    They must be contiguous, since a kernel that copied them would be the previous one.
    """
    if x.is_cuda and matmul.accepts(scheme, x, tensors):
        return matmul.sum_experts(x, expert_ids, factors.contiguous(), tensors, bias, addend, scheme)
    if x.is_cuda:
        _warn_of_plain_torch(scheme or "no scheme", x.dtype)
    y = multiply_by_expert(x.float(), expert_ids, tensors, bias, scheme)
    total = (y * factors.float().reshape(-1, 1)).view(*expert_ids.shape, -1).sum(1)
    return (total if addend is None else total + addend.float()).to(x.dtype)


@expert_linear_sum.register_fake
def _(
    x: Tensor, expert_ids: Tensor, factors: Tensor, tensors: list[Tensor], bias: Tensor | None, addend: Tensor | None,
    scheme: str,
) -> Tensor:  # fmt: skip
    n, _ = expert_shape(tensors, scheme)
    return x.new_empty(expert_ids.shape[0], n)
