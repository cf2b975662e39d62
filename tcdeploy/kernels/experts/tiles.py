"""Chooses the tiles of the products of experts, and the rows of a block. Does not import Triton.

The heuristics follow from the times of scripts/bench-experts and bench-moe-block on an H200: 1, 2 and 32 tokens, and
the experts of Qwen3 30B-A3B and gpt-oss 20B. Blocks of more than 32 rows have not been timed: dense experts then use
torch's grouped GEMM, and the tiles of quantised ones follow from the registers and shared memory of the compiled
kernels. The tiles of the summed product were timed with 8 slots, and in mxfp4 with 4 slots too, but not in int4.

Products with 4-bit weights may be bound by instructions instead of memory. Compiled for Hopper by Triton 3.7, the loop
of the GEMV has 6 to 9 (int4) or 8 to 10 (e2m1) instructions for each byte of the weight, and the GEMM for up to 32 rows
6 to 13. With FP8 weights both have about 4. An H100 issues about 11 instructions in the time that it takes to read a
byte.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from tcdeploy.kernels.linear.scheme_tiles import MAX_STAGES, MAX_SUMS, MIN_SLICE, MIN_STAGES, GemmSteps

GEMV_PAIRS = 16  # up to so many, pairs are not grouped, because few of them have the same expert

# (largest average number of pairs per expert, rows of a block). Blocks have more rows than the average, because each
# further block of an expert reads its weight again, from the L2 cache, and multiplies it again.
BLOCK_ROWS = ((4, 8), (10, 16), (24, 32), (192, 64))
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 8, 128
MAX_SHORT_ROW_BYTES = 1024  # of quantised rows
MAX_TIMED_ROWS = 32  # of a block; dense experts with more are multiplied by torch (grouped_mm.py)


class ExpertGemvTile(NamedTuple):
    """The shape of one GEMV program: rows of the weight, and bytes of each row per loop step."""

    name: str
    block_n: int
    block_bytes: int
    num_warps: int
    num_stages: int = 1  # of the software pipeline; dense weights only


class ExpertSumTile(NamedTuple):
    """The shape of one program of the summed product: rows of the weights of all slots, and columns per loop step."""

    name: str
    rows: int
    block_k: int
    num_warps: int


class SchemeSumTile(NamedTuple):
    """The same for quantised weights: rows of each slot's weight, and bytes of each row per loop step."""

    name: str
    block_n: int
    block_bytes: int


class ExpertGemmTile(NamedTuple):
    """The shape of one GEMM program: rows of the weight, and columns of each row per loop step."""

    name: str
    block_n: int
    block_k: int
    k_slices: int  # slices of block_k, one per warp; 1: all warps share one dot
    num_warps: int
    num_stages: int  # of the software pipeline


Tile: TypeAlias = ExpertGemvTile | ExpertGemmTile

GEMV_TILES = (
    ExpertGemvTile("n4_b2048", 4, 2048, 4),
    ExpertGemvTile("n8_b2048", 8, 2048, 4),
    ExpertGemvTile("n4_b1024", 4, 1024, 2),
    ExpertGemvTile("n8_b1024", 8, 1024, 2),
)
N4_B2048, N8_B2048, N4_B1024, N8_B1024 = range(len(GEMV_TILES))

DENSE_GEMV_TILES = (*GEMV_TILES, ExpertGemvTile("n8_b512", 8, 512, 1))  # of dense weights
N8_B512 = len(GEMV_TILES)

CODE_GEMV_TILES = (GEMV_TILES[N8_B1024], ExpertGemvTile("n4_b512", 4, 512, 1))  # of 4-bit weights
SHORT_ROW, LONG_ROW = range(len(CODE_GEMV_TILES))

# For weights that are contiguous along n: a load covers block_n consecutive outputs.
TRANSPOSED_GEMV_TILES = (ExpertGemvTile("n32_b128_s4", 32, 128, 4, 4),)

SUM_TILES = (
    ExpertSumTile("r32_k256", 32, 256, 8),
    ExpertSumTile("r16_k256", 16, 256, 4),
    ExpertSumTile("r8_k256", 8, 256, 2),
)

SCHEME_SUM_TILES = (SchemeSumTile("n4_b512", 4, 512), SchemeSumTile("n8_b512", 8, 512))

DECODE_GEMM_TILES = (
    ExpertGemmTile("n64_k128", 64, 128, 1, 4, 4),
    ExpertGemmTile("n32_k256", 32, 256, 4, 4, 4),
    ExpertGemmTile("n128_k128", 128, 128, 1, 4, 3),
)
N64_K128, N32_K256, N128_K128 = range(len(DECODE_GEMM_TILES))

PREFILL_GEMM_TILES = (
    ExpertGemmTile("n128_k64", 128, 64, 1, 4, 4),
    ExpertGemmTile("n128_k64_w8", 128, 64, 1, 8, 4),
    ExpertGemmTile("n64_k64", 64, 64, 1, 4, 4),
    ExpertGemmTile("n128_k128_w8", 128, 128, 1, 8, 3),
)
N128_K64, N128_K64_W8, N64_K64, N128_K128_W8 = range(len(PREFILL_GEMM_TILES))


def block_rows(pairs: int, num_experts: int) -> int:
    """Pairs in a block. The two products of a layer share their groups, so it does not depend on n and k."""
    for pairs_per_expert, rows in BLOCK_ROWS:
        if pairs <= pairs_per_expert * num_experts:
            return rows
    return MAX_BLOCK_ROWS


def gemv_tiles(per_byte: int, is_dense: bool, is_transposed: bool) -> tuple[ExpertGemvTile, ...]:
    if is_transposed:
        return TRANSPOSED_GEMV_TILES
    if is_dense:
        return DENSE_GEMV_TILES
    return CODE_GEMV_TILES if per_byte == 2 else GEMV_TILES


def gemv_tile(row_bytes: int, per_byte: int, is_dense: bool, is_transposed: bool) -> ExpertGemvTile:
    """A program has 2 to 8 KB of the weight in flight, or up to 16 KB of a dense one.

    Short quantised rows are read in one step, so that no load waits for a sum. Short dense rows and long rows of 4-bit
    weights are read by single warps, whose sums need no shared memory. gpt-oss in mxfp4 has rows of 1,440 bytes: in a
    step of 2,048, 30% of the threads would multiply zeros.
    """
    if is_transposed:
        return TRANSPOSED_GEMV_TILES[0]
    if is_dense:
        return DENSE_GEMV_TILES[N8_B512 if row_bytes <= GEMV_TILES[N8_B2048].block_bytes else N8_B2048]
    is_short = row_bytes <= MAX_SHORT_ROW_BYTES
    if per_byte == 2:
        return CODE_GEMV_TILES[SHORT_ROW if is_short else LONG_ROW]
    return GEMV_TILES[N4_B1024 if is_short else N4_B2048]


def fit_sum_block_n(tile: ExpertSumTile, slots: int) -> int:
    """Columns of the output per program: a power of two that divides n, since n is a multiple of 16."""
    return max(1, min(tile.rows // slots, 16))


def scheme_sum_tile(row_bytes: int, slots: int) -> SchemeSumTile:
    """8 rows of the weight if they are long and slots are few. With more slots, only one such program fits an SM."""
    return SCHEME_SUM_TILES[row_bytes > MAX_SHORT_ROW_BYTES and slots <= 4]


def sum_warps(slots: int, block_bytes: int) -> int:
    """Warps of a program: a thread has 16 bytes of each row per step, or more with the limit of 16 warps."""
    return max(1, min(slots * block_bytes // 512, 16))


def gemm_tiles(rows: int) -> tuple[ExpertGemmTile, ...]:
    """The tiles for blocks of this many rows."""
    return DECODE_GEMM_TILES if rows <= 32 else PREFILL_GEMM_TILES


def gemm_tile(rows: int) -> ExpertGemmTile:
    """A tile for blocks of this many rows."""
    if rows <= 32:
        return DECODE_GEMM_TILES[N64_K128]
    return PREFILL_GEMM_TILES[N128_K64 if rows <= 64 else N128_K64_W8]


def fit_block_bytes(tile: ExpertGemvTile | SchemeSumTile, row_bytes: int) -> int:
    """Bytes of a row per step: at most those of a row, rounded up to a power of two."""
    return min(tile.block_bytes, 1 << (row_bytes - 1).bit_length())


def fit_gemm(tile: ExpertGemmTile, rows: int, group: int) -> GemmSteps:
    """A step has one slice, which all warps share, or at least one per warp, since warps would repeat fewer slices.

    Several groups of less than MIN_SLICE columns share a slice. Their scales multiply the values instead of the sums.
    Steps of blocks of many rows have one slice, because the sums fill the registers.
    """
    widest = max(tile.block_k // tile.k_slices, MIN_SLICE)
    width = widest if group < MIN_SLICE else math.gcd(widest, group)
    slices, block_n = tile.block_k // width, tile.block_n
    if rows > 32:
        slices = 1
    elif slices > 1:
        slices = max(slices, tile.num_warps)
    while slices > 1 and block_n * slices * rows > MAX_SUMS * tile.num_warps:
        if slices > tile.num_warps:
            slices //= 2
        elif block_n > 16:
            block_n //= 2
        else:
            slices = 1
    stages = tile.num_stages * tile.block_k // (slices * width)
    return GemmSteps(block_n, width, slices, min(max(stages, MIN_STAGES), MAX_STAGES))
