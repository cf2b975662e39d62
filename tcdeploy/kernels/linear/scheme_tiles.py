"""The shapes that the kernels of quantised weights accept, and their tiles. Does not import Triton.

The heuristics choose the tiles that scripts/bench-scheme-linear found fastest on an H200, for the products of Llama 8B
and 1, 8, 16, 32 and 64 rows. With them, the four products of a layer take at most 11% longer than with the fastest tile
of each, 7% without mxfp4.

Rejected: splitting the columns among programs, whose sums a second kernel adds. It was 3 to 9% faster for 4-bit weights
with many columns, and slower for all others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tcdeploy.kernels.linear.tile_configs import K_MULTIPLE, MAX_ROWS, N_MULTIPLE, ONE_WAVE_N

MIN_GROUP = 16  # columns that share a scale
MIN_SLICE = 32  # columns of a slice of the skinny GEMM. With 16, code of Triton 3.6 adds some products twice
MAX_SLICE = 128  # columns of a slice of the skinny GEMM
MAX_SUMS = 1024  # per warp of a GEMM: 32 registers of each thread, and as many for those of a step
MIN_STAGES, MAX_STAGES = 3, 8  # if steps are of another size than the tile's


class SchemeGemvTile(NamedTuple):
    """The shape of one GEMV program: rows of the weight, and bytes of each row per loop step."""

    name: str
    block_n: int
    block_bytes: int
    num_warps: int


class SchemeSkinnyGemmTile(NamedTuple):
    """The shape of one skinny-GEMM program: rows of the weight, and columns of each row per loop step."""

    name: str
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # of the software pipeline


SCHEME_GEMV_TILES = (
    SchemeGemvTile("n4_b2048", 4, 2048, 4),
    SchemeGemvTile("n2_b2048", 2, 2048, 4),
    SchemeGemvTile("n8_b2048", 8, 2048, 4),
)
N4_B2048, N2_B2048, N8_B2048 = range(len(SCHEME_GEMV_TILES))

SCHEME_SKINNY_GEMM_TILES = (
    SchemeSkinnyGemmTile("n32_k512", 32, 512, 4, 4),
    SchemeSkinnyGemmTile("n16_k512", 16, 512, 4, 4),
    SchemeSkinnyGemmTile("n16_k256", 16, 256, 4, 5),
    SchemeSkinnyGemmTile("n16_k1024", 16, 1024, 4, 3),
    SchemeSkinnyGemmTile("n64_k256", 64, 256, 4, 4),
    SchemeSkinnyGemmTile("n64_k128", 64, 128, 4, 5),
)
N32_K512, N16_K512, N16_K256, N16_K1024, N64_K256, N64_K128 = range(len(SCHEME_SKINNY_GEMM_TILES))
WIDE_N = 4 * ONE_WAVE_N


def is_supported(rows: int, n: int, k: int, group: int, per_byte: int) -> bool:
    """Whether the kernels compute x [rows, k] @ w [n, k].T with `group` columns to a scale and per_byte to a byte."""
    is_group = group >= MIN_GROUP and (group % (16 * per_byte) == 0 or group == MIN_GROUP)
    return 1 <= rows <= MAX_ROWS and n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0 and is_group


def gemv_tile(n: int, per_byte: int) -> SchemeGemvTile:
    """A tile for one row: with fewer rows of the weight if there would be too few programs to fill the GPU.

    With 4-bit weights, instructions limit the speed. A program then has more rows of the weight, which share the
    conversion of the inputs to float32.
    """
    if n <= ONE_WAVE_N:
        return SCHEME_GEMV_TILES[N2_B2048]
    return SCHEME_GEMV_TILES[N8_B2048 if per_byte == 2 else N4_B2048]


def skinny_gemm_tile(rows: int, n: int, per_byte: int) -> SchemeSkinnyGemmTile:
    """A tile for 2 to 64 rows.

    Each program reads all inputs. Many rows of inputs are more bytes than the program's part of the weight, so its tile
    then has more rows of the weight, unless too few programs would be left for a narrow weight.
    """
    is_wide = n >= WIDE_N
    if rows > 32:
        tile = N64_K128 if is_wide else N64_K256
    elif rows > 16:
        tile = N64_K256
    elif per_byte == 2:
        tile = N32_K512 if is_wide or rows > 8 else N16_K512
    elif rows > 8:
        tile = N16_K256 if is_wide else N16_K1024
    else:
        tile = N16_K1024 if is_wide else N16_K512
    return SCHEME_SKINNY_GEMM_TILES[tile]


def fit_block(block: int, size: int) -> int:
    """The largest divisor of `size` that divides the power of two `block`, so that no loop step needs a mask."""
    return math.gcd(block, size)


class GemmSteps(NamedTuple):
    """A tile fitted to a weight: rows, columns of a slice, slices of a step, and stages of the pipeline."""

    block_n: int
    width: int
    slices: int
    num_stages: int


def fit_skinny_gemm(tile: SchemeSkinnyGemmTile, padded_rows: int, k: int, group: int) -> GemmSteps:
    """A step has one slice, which all warps share, or at least one per warp, since warps would repeat fewer slices.

    Several groups of less than MIN_SLICE columns share a slice. Their scales multiply the values instead of the sums.
    Steps are smaller, but more of them are in flight, if the sums of all slices would not fit the registers.
    """
    widest = min(MAX_SLICE, max(tile.block_k // tile.num_warps, MIN_SLICE)) if tile.block_k > MAX_SLICE else MAX_SLICE
    width = math.gcd(widest, k) if group < MIN_SLICE else math.gcd(widest, k, group)
    slices, block_n = max(tile.block_k // width, 1), tile.block_n
    slices = fit_block(max(slices, tile.num_warps) if slices > 1 else 1, k // width)
    while slices > 1 and block_n * slices * padded_rows > MAX_SUMS * tile.num_warps:
        if slices > tile.num_warps or block_n == N_MULTIPLE:
            slices //= 2
        else:
            block_n //= 2
    stages = tile.num_stages * tile.block_k // (slices * width)
    return GemmSteps(block_n, width, slices, min(max(stages, MIN_STAGES), MAX_STAGES))
