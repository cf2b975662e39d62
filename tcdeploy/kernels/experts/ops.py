"""The ops of mixture-of-experts layers, which programs call as opaque nodes.

    group_pairs    which (token, slot) pairs belong to which expert; once for the two products of a layer
    expert_linear  a product of each pair with the weight of its expert, dense or in any scheme (planning/schemes.py)

The weights of all experts stay in device memory as they are stored. On a CPU, and where no kernel fits, each expert's
weight is dequantised and multiplied in plain torch (reference.py). Dense experts with many pairs use torch's grouped
GEMM (grouped_mm.py).
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.experts import grouped_mm, matmul
from tcdeploy.kernels.experts.grouping import group_by_expert, groups_length
from tcdeploy.kernels.experts.reference import expert_shape, multiply_by_expert

log = logging.getLogger("tcdeploy.programs")


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
