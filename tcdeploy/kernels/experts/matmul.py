"""Launches the Triton kernels of experts.

- Up to GEMV_PAIRS pairs (`_gemv`): a program multiplies the row of one pair by a few rows of its expert's weight on the
  CUDA cores. A thread loads 16 bytes at a time. Pairs are not grouped. Programs of all pairs for the same rows of the
  weight run next to each other, so an expert that two tokens select is read from memory once. The first product may end
  in SwiGLU and normalise its input, as the GEMVs of kernels/linear do.
- The second product of so few pairs (`sum_experts`): a program multiplies by the same few rows of the weights of all
  pairs of a token, and stores the weighted sum. The ids are known before the first product ends, so programs load their
  first weights before they wait for it.
- More pairs (`_gemm`): pairs are grouped by expert (grouping.py). A program multiplies a block of them by some rows of
  their expert's weight on the tensor cores, as the skinny GEMM of kernels/linear does: y.T = w @ x.T. The columns of a
  step are cut into slices of at most one group, whose sums are multiplied by the group's scale. A slice of nvfp4 has
  several groups, whose scales multiply the values. Both keep values exact, so only sums are rounded. A program gathers
  the rows of x and scatters those of y, so nothing is permuted in memory. Programs of one block run next to each other,
  and then those of the next block of the same expert, which find its weight in the L2 cache.

k need not be a multiple of a step: gpt-oss has 2,880 columns, and their last step is masked.

Rejected: sorting the rows of x in memory, as for torch._grouped_mm, which costs two more passes over x and y. Also
rejected: a fixed number of programs that loop over blocks, since a program without a block ends after three loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tcdeploy.kernels.experts.grouping import max_blocks, table_length
from tcdeploy.kernels.experts.tiles import (
    GEMV_PAIRS,
    SUM_TILES,
    ExpertGemmTile,
    ExpertGemvTile,
    ExpertSumTile,
    SchemeSumTile,
    Tile,
    block_rows,
    fit_block_bytes,
    fit_gemm,
    fit_sum_block_n,
    gemm_tile,
    gemv_tile,
    scheme_sum_tile,
    sum_warps,
)
from tcdeploy.kernels.linear.fp4_scheme import NVFP4_NAME
from tcdeploy.kernels.linear.int4_scheme import INTERLEAVED_NAMES
from tcdeploy.kernels.linear.scheme_matmul import is_capable
from tcdeploy.kernels.linear.scheme_operands import FORMATS, Operands, operands
from tcdeploy.kernels.linear.scheme_tiles import MIN_SLICE
from tcdeploy.kernels.linear.tile_configs import fit_block_k
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

GEMV = Kernel("tcdeploy.kernels.experts.scheme_gemv_kernel", "_expert_gemv_kernel")
DENSE_GEMV = Kernel("tcdeploy.kernels.experts.gemv_kernel", "_dense_expert_gemv_kernel")
CODE_GEMV = Kernel("tcdeploy.kernels.experts.scheme_gemv_kernel", "_expert_code_gemv_kernel")
SUM = Kernel("tcdeploy.kernels.experts.scheme_gemv_kernel", "_expert_gemv_sum_kernel")
DENSE_SUM = Kernel("tcdeploy.kernels.experts.gemv_kernel", "_dense_expert_gemv_sum_kernel")
GEMM = Kernel("tcdeploy.kernels.experts.experts_kernel", "_expert_gemm_kernel")
DENSE = "dense"  # the format of weights without a scheme
N_MULTIPLE, ALIGNMENT_BYTES = 16, 16
MIN_SUM_BLOCK_K = 64  # columns per step of `sum_experts`, which has no mask along k
MAX_EXPERT_BYTES = 1 << 31  # kernels of quantised weights have 32-bit offsets in the weight of an expert
NO_GROUPS = 1 << 30  # columns of a group that is all of a row; a power of two, so it does not limit a slice


class ExpertWeights(Operands):
    """The tensors of weights [experts, n, k]. `weight` and `columns` have a leading dimension of experts. In the shapes
    of the others, n is experts * n. A dense `weight` has elements instead of bytes: [experts, n, k].
    """

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is contiguous along n, not along k."""
        return self.weight.stride(2) != 1

    @property
    def strides(self) -> tuple[int, int]:
        """Of the experts, and of the dimension that is not contiguous."""
        return self.weight.stride(0), self.weight.stride(2 if self.is_transposed else 1)


def expert_weights(scheme: str, tensors: Sequence[Tensor]) -> ExpertWeights:
    """The tensors of a scheme of FORMATS, or of scheme "", by their use."""
    if not scheme:
        return ExpertWeights(DENSE, tensors[0], None, None, None, None, 1, NO_GROUPS, 1)
    by_use = operands(scheme, [tensor.flatten(0, 1) for tensor in tensors])
    columns = tensors[-1] if by_use.columns is not None else None
    group = by_use.group if by_use.groups > 1 or by_use.group_scale is not None else NO_GROUPS
    return ExpertWeights(*by_use._replace(weight=tensors[0], columns=columns, group=group))


def is_supported(scheme: str, dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels multiply inputs of this dtype by these weights. Works on fake tensors."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    has_format = scheme in FORMATS and scheme not in INTERLEAVED_NAMES
    if scheme and not (has_format and all(tensor.is_contiguous() for tensor in tensors)):
        return False
    weights = expert_weights(scheme, tensors)
    n, row_size = weights.weight.shape[1:]
    if not scheme:
        strides = weights.weight.stride()[1:]
        return weights.weight.dtype == dtype and 1 in strides and n % N_MULTIPLE == 0 and row_size % N_MULTIPLE == 0
    is_aligned = n % N_MULTIPLE == 0 and row_size % ALIGNMENT_BYTES == 0 and n * row_size < MAX_EXPERT_BYTES
    # As in kernels/linear: a slice has one scale, except in nvfp4, where multiplying values by scales is exact.
    is_group = weights.group % MIN_SLICE == 0 or scheme == NVFP4_NAME
    return is_aligned and is_group


def accepts(scheme: str, x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels compute the product on this GPU."""
    return is_capable(tensors) and x.stride(1) == 1 and is_supported(scheme, x.dtype, tensors)


def matmul(
    x: Tensor, expert_ids: Tensor, groups: Tensor | None, tensors: Sequence[Tensor], bias: Tensor | None, scheme: str,
    tile: Tile | None = None, gated: bool = False, norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """`expert_linear` of ops.py, or with `gated` `gated_expert_linear`, summed in float32.

    `tile`: by default the one that `choose_tile` returns. With a GEMV tile, `groups` may be None and the product may be
    gated; the GEMV of dense weights can also normalise its input.
    """
    weights = expert_weights(scheme, tensors)
    pairs, (experts, n, _) = expert_ids.numel(), weights.weight.shape
    assert is_supported(scheme, x.dtype, tensors) and x.stride(1) == 1 and x.shape[1] == weights.k
    assert len(x) in (len(expert_ids), pairs) and expert_ids.is_contiguous()
    assert bias is None or (bias.shape == (experts, n) and bias.is_contiguous())
    if weights.columns is not None:
        x = x.repeat_interleave(pairs // len(x), 0)
        x = x.gather(1, weights.columns.index_select(0, expert_ids.flatten()).long())
    assert not gated or n % (2 * N_MULTIPLE) == 0
    assert norm is None or (norm.shape == (weights.k,) and norm.is_contiguous() and weights.format == DENSE)
    out = x.new_empty(pairs, n // 2 if gated else n)
    if tile is None:
        tile = choose_tile(pairs, weights)
    if isinstance(tile, ExpertGemvTile):
        _gemv(out, x, expert_ids, weights, bias, tile, gated, norm, eps)
    else:
        assert groups is not None and not gated and norm is None
        _gemm(out, x, groups, weights, bias, tile)
    return out


def choose_tile(pairs: int, weights: ExpertWeights) -> Tile:
    experts, _, row_size = weights.weight.shape
    if pairs <= GEMV_PAIRS:
        row_bytes = row_size * weights.weight.itemsize
        return gemv_tile(row_bytes, weights.per_byte, weights.format == DENSE, weights.is_transposed)
    return gemm_tile(block_rows(pairs, experts))


def is_fusable(scheme: str, pairs: int, dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    """Whether a GEMV computes this many pairs, so that the product can be gated. Works on fake tensors."""
    if pairs > GEMV_PAIRS or not is_supported(scheme, dtype, tensors):
        return False
    weights = expert_weights(scheme, tensors)
    return weights.columns is None and weights.weight.shape[1] % (2 * N_MULTIPLE) == 0


def is_summable(scheme: str, pairs: int, dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    """Whether `sum_experts` takes this many pairs and these weights. Works on fake tensors."""
    if pairs > GEMV_PAIRS or not is_supported(scheme, dtype, tensors):
        return False
    weights = expert_weights(scheme, tensors)
    if scheme:
        return weights.columns is None
    return weights.k % MIN_SUM_BLOCK_K == 0 and not weights.is_transposed


def sum_experts(
    x: Tensor, expert_ids: Tensor, factors: Tensor, tensors: Sequence[Tensor], bias: Tensor | None,
    addend: Tensor | None, scheme: str, tile: ExpertSumTile | SchemeSumTile | None = None,
) -> Tensor:  # fmt: skip
    """`expert_linear_sum` of ops.py, for weights for which `is_summable`."""
    weights, (tokens, top_k) = expert_weights(scheme, tensors), expert_ids.shape
    experts, n, row_size = weights.weight.shape
    assert is_summable(scheme, len(x), x.dtype, tensors)
    assert x.shape == (tokens * top_k, weights.k) and x.stride(1) == 1
    assert expert_ids.is_contiguous() and factors.is_contiguous() and factors.shape == expert_ids.shape
    assert bias is None or (bias.shape == (experts, n) and bias.is_contiguous())
    assert addend is None or (addend.shape == (tokens, n) and addend.stride(1) == 1)
    out, slots, use_pdl = x.new_empty(tokens, n), next_power_of_2(top_k), supports_pdl(x.device)
    addend_stride, pdl = 0 if addend is None else addend.stride(0), {"launch_pdl": True} if use_pdl else {}
    if not scheme:
        tile = tile or SUM_TILES[0]
        assert isinstance(tile, ExpertSumTile)
        block_n = fit_sum_block_n(tile, slots)
        DENSE_SUM.launch(
            (tokens, n // block_n),
            out, x, expert_ids, factors, weights.weight, bias, addend, n, row_size, x.stride(0), *weights.strides,
            addend_stride, top_k, slots, block_n, fit_block_k(tile.block_k, row_size), use_pdl,
            num_warps=tile.num_warps, **pdl,
        )  # fmt: skip
        return out
    tile = tile or scheme_sum_tile(row_size, slots)
    assert isinstance(tile, SchemeSumTile)
    block_bytes = fit_block_bytes(tile, row_size)
    SUM.launch(
        (tokens, n // tile.block_n),
        out, x, expert_ids, factors, weights.weight, weights.row_scale, weights.group_scale, weights.zero, bias,
        addend, n, row_size, weights.groups, x.stride(0), addend_stride, weights.format, weights.group,
        weights.row_block, top_k, slots, tile.block_n, block_bytes, row_size % block_bytes == 0, use_pdl,
        num_warps=sum_warps(slots, block_bytes), **pdl,
    )  # fmt: skip
    return out


def _gemv(
    out: Tensor, x: Tensor, expert_ids: Tensor, weights: ExpertWeights, bias: Tensor | None, tile: ExpertGemvTile,
    gated: bool, norm: Tensor | None, eps: float,
) -> None:  # fmt: skip
    pairs, n, use_pdl = len(out), weights.weight.shape[1], supports_pdl(x.device)
    slots, row_size = pairs // len(x), weights.weight.shape[2]
    launch_options = {"num_warps": tile.num_warps, **({"launch_pdl": True} if use_pdl else {})}
    if weights.format == DENSE:
        block_k = fit_block_bytes(tile, row_size * weights.weight.itemsize) // weights.weight.itemsize
        DENSE_GEMV.launch(
            (pairs, -(-n // tile.block_n)),
            out, x, expert_ids, weights.weight, bias, norm, n, row_size, eps, slots, x.stride(0),
            *weights.strides, weights.is_transposed, tile.block_n, block_k, tile.num_stages, gated, use_pdl,
            **launch_options,
        )  # fmt: skip
        return
    block_bytes = fit_block_bytes(tile, row_size)
    kernel, is_whole = (GEMV, ()) if weights.per_byte == 1 else (CODE_GEMV, (row_size % block_bytes == 0,))
    kernel.launch(
        (pairs, n // tile.block_n),
        out, x, expert_ids, weights.weight, weights.row_scale, weights.group_scale, weights.zero, bias, n, row_size,
        weights.groups, slots, x.stride(0), weights.format, weights.group, weights.row_block, tile.block_n,
        block_bytes, *is_whole, gated, use_pdl, **launch_options,
    )  # fmt: skip


def _gemm(
    out: Tensor, x: Tensor, groups: Tensor, weights: ExpertWeights, bias: Tensor | None, tile: ExpertGemmTile
) -> None:
    (pairs, n), (experts, _, _), use_pdl = out.shape, weights.weight.shape, supports_pdl(x.device)
    rows = block_rows(pairs, experts)
    steps = fit_gemm(tile, rows, weights.group)
    is_whole = n % steps.block_n == 0 and weights.k % (steps.width * steps.slices) == 0
    GEMM.launch(
        (-(-n // steps.block_n), max_blocks(pairs, experts, rows)),
        out, x, groups, weights.weight, weights.row_scale, weights.group_scale, weights.zero, bias, pairs,
        table_length(pairs, experts), n, weights.k, weights.groups, pairs // len(x), x.stride(0),
        *weights.strides, weights.format, weights.group, weights.row_block, weights.is_transposed, rows, steps.block_n,
        steps.width, steps.slices, is_whole, use_pdl,
        num_warps=tile.num_warps, num_stages=steps.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
