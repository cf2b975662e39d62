"""Launches the Triton kernels of quantised weights, by number of rows.

- One row (`_gemv`): a program owns a few rows of the weight and reads them from end to end, 16 bytes per thread at a
  time, into float32. The sum of such 16 bytes is multiplied by its group's scale. It loads weights before the PDL wait.
- 2 to 64 rows, or 32 of 4-bit weights (`_skinny_gemm`): a step's columns are cut into slices of at most one group. Each
  slice is a dot of the tensor cores, in x's dtype, whose sums are multiplied by the group's scale. So values are exact,
  and only sums are rounded. The groups of nvfp4 are too short for a slice each: their scales multiply the values, which
  is exact too. The bytes arrive through asynchronous copies and become values in the registers that the dot reads.
- 2 to 384 rows with interleaved int4 weights, which the skinny GEMM and scheme_gemm.py do not take, and 9 to 64 rows
  with FP8 weights (register_gemm.py): the weight is the first operand of larger tensor-core instructions.
- 129 to 2,048 rows with interleaved int4 weights on Hopper, unless the register GEMM is faster (hopper_gemm.py): codes
  are converted in registers while the tensor cores multiply.
- Up to 128 rows (scheme_gemm.py): values are multiplied by their scales and rounded, tile by tile, in the loop.
- More rows, and shapes that these kernels do not take (`dequantised_matmul`): a kernel writes the dense weight, which
  cuBLAS multiplies. It reads and writes each element once; plain torch would make several copies of it.

The epilogues are those of the dense kernels (gemv.py, skinny_gemm.py): a bias or residual, SwiGLU on the halves, and
RMSNorm of a single row. Permuted weights read x through `index_select`: gathered in the kernel, each program would
gather it again.

Instructions limit products with 4-bit weights: scheme_codes.py describes how values are made. Rejected: two dots of the
even and the odd columns, since joining the two values of a byte costs no instruction; one launch per scheme with a
kernel of its own, since only `FORMAT` differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.linear import fp4_scheme
from tcdeploy.kernels.linear.hopper_gemm import hopper_gemm
from tcdeploy.kernels.linear.hopper_gemm import takes as hopper_takes
from tcdeploy.kernels.linear.int4_scheme import INTERLEAVED_NAMES
from tcdeploy.kernels.linear.register_gemm import register_gemm
from tcdeploy.kernels.linear.scheme_gemm import gemm
from tcdeploy.kernels.linear.scheme_linear import KERNELS, SchemeKernel
from tcdeploy.kernels.linear.scheme_operands import FORMATS, Operands, operands
from tcdeploy.kernels.linear.scheme_tiles import (
    MAX_GEMM_ROWS,
    MIN_SLICE,
    WIDE_N,
    HopperGemmTile,
    RegisterGemmTile,
    SchemeGemvTile,
    SchemeSkinnyGemmTile,
    Tile,
    choose_tile,
    fit_block,
    fit_skinny_gemm,
    is_supported,
)
from tcdeploy.kernels.linear.tile_configs import N_MULTIPLE
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

GEMV = Kernel("tcdeploy.kernels.linear.scheme_kernel", "_scheme_gemv_kernel")
SKINNY_GEMM = Kernel("tcdeploy.kernels.linear.scheme_kernel", "_scheme_skinny_gemm_kernel")
DEQUANTISE = Kernel("tcdeploy.kernels.linear.scheme_kernel", "_scheme_dequantise_kernel")
DEQUANTISE_ROWS, DEQUANTISE_BYTES, DEQUANTISE_WARPS = 8, 256, 4  # of the weight per program
CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)  # compute capabilities with bfloat16 and with fp8


def is_fusable(scheme: str, rows: int, dtype: torch.dtype, tensors: Sequence[Tensor], gated: bool = False) -> bool:
    """Whether the kernels compute a product of this many rows. Works on fake tensors."""
    if scheme not in FORMATS or dtype not in (torch.bfloat16, torch.float16):
        return False
    return _is_fusable(operands(scheme, tensors), scheme, rows, tensors, gated)


def _is_fusable(weight: Operands, scheme: str, rows: int, tensors: Sequence[Tensor], gated: bool) -> bool:
    n = weight.weight.shape[0]
    is_whole = n % (2 * N_MULTIPLE) == 0 if gated else n % N_MULTIPLE == 0
    is_contiguous = all(tensor.is_contiguous() for tensor in tensors)
    # Scales of such groups multiply the values, which is exact in nvfp4 only.
    if rows > 1 and weight.group % MIN_SLICE and scheme != fp4_scheme.NVFP4_NAME:
        return False
    on_hopper = hopper_takes(weight, weight.weight.device)
    is_size = is_supported(rows, n, weight.k, weight.group, weight.per_byte, weight.is_interleaved, on_hopper)
    return is_whole and is_contiguous and is_size


def is_norm_fusable(scheme: str, tensors: Sequence[Tensor]) -> bool:
    """Whether a product of one row should normalise its input. Works on fake tensors.

    Each program of the fused GEMV normalises the row. With many programs, this takes longer than a kernel of the norm
    before the product. That was measured for interleaved int4 weights (docs/performance-log.md).
    """
    return scheme not in INTERLEAVED_NAMES or len(tensors[0]) < WIDE_N


def is_capable(tensors: Sequence[Tensor]) -> bool:
    """Whether the GPU of these tensors of a weight can run the kernels."""
    needs_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors)
    return torch.cuda.get_device_capability(tensors[0].device) >= (FP8_CAPABILITY if needs_fp8 else CAPABILITY)


def accepts(scheme: str, x: Tensor, tensors: Sequence[Tensor], gated: bool = False) -> bool:
    """Whether the kernels compute x [rows, k] times the weight, on this GPU."""
    return is_capable(tensors) and x.stride(1) == 1 and is_fusable(scheme, len(x), x.dtype, tensors, gated)


def matmul(
    scheme: str, x: Tensor, tensors: Sequence[Tensor], addend: Tensor | None = None, gated: bool = False,
    norm: Tensor | None = None, eps: float = 0.0, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x [rows, k] @ w [n, k].T + addend ([n] or [rows, n]), summed in float32: [rows, n], contiguous, in x's dtype.

    `gated` returns silu(y[:, : n/2]) * y[:, n/2 :] and takes no addend. With `norm` [k], the single row x is replaced
    by x / sqrt(mean(x^2) + eps) * norm. The weight may be read before the previous kernel on the stream has ended.
    `tile`: by default that of the heuristics.
    """
    weight = operands(scheme, tensors)
    (rows, k), n = x.shape, weight.weight.shape[0]
    assert _is_fusable(weight, scheme, rows, tensors, gated) and weight.k == k and x.stride(1) == 1
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert addend is None or (addend.dtype == x.dtype and addend.stride(-1) == 1 and addend.shape in ((n,), (rows, n)))
    assert not (gated and addend is not None)
    assert norm is None or (rows == 1 and norm.shape == (k,) and norm.is_contiguous())
    if weight.columns is not None:
        x = x.index_select(1, weight.columns)
        norm = None if norm is None else norm.index_select(0, weight.columns)
    out = x.new_empty(rows, n // 2 if gated else n)
    tile = tile or choose_tile(rows, n, k, weight.per_byte, weight.is_register_operand, hopper_takes(weight, x.device))
    assert rows == 1 or not isinstance(tile, SchemeGemvTile)
    assert norm is None or isinstance(tile, SchemeGemvTile)
    assert not weight.is_interleaved or isinstance(tile, SchemeGemvTile | RegisterGemmTile | HopperGemmTile)
    if isinstance(tile, SchemeGemvTile):
        _gemv(out, x, weight, addend, gated, norm, eps, tile)
    elif isinstance(tile, SchemeSkinnyGemmTile):
        _skinny_gemm(out, x, weight, addend, gated, tile)
    elif isinstance(tile, RegisterGemmTile):
        register_gemm(out, x, weight, addend, gated, tile)
    elif isinstance(tile, HopperGemmTile):
        hopper_gemm(out, x, weight, addend, gated, tile)
    else:
        gemm(out, x, weight, addend, gated, tile)
    return out


def _gemv(
    out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, norm: Tensor | None, eps: float,
    tile: SchemeGemvTile,
) -> None:  # fmt: skip
    n, row_bytes = weight.weight.shape
    use_pdl = supports_pdl(x.device)
    GEMV.launch(
        (n // tile.block_n,),
        out, x, weight.weight, weight.row_scale, weight.group_scale, weight.zero, addend, norm, n, x.shape[1],
        row_bytes, weight.groups, eps, weight.format, weight.group, weight.row_block, tile.block_n,
        fit_block(tile.block_bytes, row_bytes), weight.is_interleaved, gated, use_pdl,
        num_warps=tile.num_warps, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip


def _skinny_gemm(
    out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, tile: SchemeSkinnyGemmTile
) -> None:
    (rows, k), (n, row_bytes) = x.shape, weight.weight.shape
    use_pdl = supports_pdl(x.device)
    padded_rows = max(8, next_power_of_2(rows))  # for the tensor cores; batches with equal padding share a kernel
    steps = fit_skinny_gemm(tile, padded_rows, k, weight.group)
    SKINNY_GEMM.launch(
        (-(-n // steps.block_n),),
        out, x, weight.weight, weight.row_scale, weight.group_scale, weight.zero, addend, rows, n, k, row_bytes,
        weight.groups, x.stride(0), addend.stride(0) if addend is not None and addend.ndim == 2 else 0,
        weight.format, weight.group, weight.row_block, padded_rows, steps.block_n, steps.width,
        steps.slices, gated, use_pdl,
        num_warps=tile.num_warps, num_stages=steps.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip


def dequantised(scheme: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The dense weight [n, k] in the order of the stored columns, computed in float32 and rounded once."""
    weight = operands(scheme, tensors)
    n, row_bytes = weight.weight.shape
    out = torch.empty(n, weight.k, dtype=dtype, device=weight.weight.device)
    columns_per_scale = math.gcd(DEQUANTISE_BYTES * weight.per_byte, weight.group)
    DEQUANTISE.launch(
        (-(-n // DEQUANTISE_ROWS), -(-row_bytes // DEQUANTISE_BYTES)),
        out, weight.weight, weight.row_scale, weight.group_scale, weight.zero, n, weight.k, row_bytes, weight.groups,
        weight.format, weight.group, weight.row_block, DEQUANTISE_ROWS, DEQUANTISE_BYTES, columns_per_scale,
        weight.is_interleaved,
        num_warps=DEQUANTISE_WARPS,
    )  # fmt: skip
    return out


def dequantised_matmul(scheme: str, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x [rows, k] @ w [n, k].T + bias [n]: [rows, n] in x's dtype, through a dense copy of the weight."""
    columns = operands(scheme, tensors).columns
    if columns is not None:
        x = x.index_select(1, columns)
    return torch.nn.functional.linear(x, dequantised(scheme, tensors, x.dtype), bias)


def can_dequantise(scheme: str, x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel serves this GPU and weight. Groups of 4-bit values begin with a byte."""
    weight = operands(scheme, tensors)
    return (
        is_capable(tensors)
        and weight.group % weight.per_byte == 0
        and all(tensor.is_contiguous() for tensor in tensors)
    )


@custom_op("fused_scheme_linear")
def fused_scheme_linear(
    x: Tensor, tensors: list[Tensor], addend: Tensor | None, gated: bool, norm: Tensor | None, eps: float, scheme: str
) -> Tensor:
    """`matmul`: a product with a quantised weight, and the operations around it, as one node of a graph.

    On a CPU and on GPUs without the kernel, the weight is dequantised, and the formulas are computed in float32.
    """
    if x.is_cuda and accepts(scheme, x, tensors, gated):
        return matmul(scheme, x, tensors, addend, gated, norm, eps)
    row = x.float()
    if norm is not None:
        row = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    y = row @ SCHEMES[scheme].dequantise(tensors, torch.float32).T
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    return (y if addend is None else y + addend.float()).to(x.dtype)


@fused_scheme_linear.register_fake
def _(
    x: Tensor, tensors: list[Tensor], addend: Tensor | None, gated: bool, norm: Tensor | None, eps: float, scheme: str
) -> Tensor:
    n, _ = SCHEMES[scheme].dense_shape([tuple(tensor.shape) for tensor in tensors])
    return x.new_empty(x.shape[0], n // 2 if gated else n)


for _scheme in FORMATS:
    KERNELS[_scheme] = (
        SchemeKernel(
            "cuda",
            functools.partial(matmul, _scheme),
            max_rows=None if _scheme in INTERLEAVED_NAMES else MAX_GEMM_ROWS,  # None: `accepts` decides
            accepts=functools.partial(accepts, _scheme),
        ),
        SchemeKernel(
            "cuda", functools.partial(dequantised_matmul, _scheme), accepts=functools.partial(can_dequantise, _scheme)
        ),
    )
