"""The shapes that the kernels of quantised weights accept, and their tiles. Does not import Triton.

The heuristics choose the tiles that scripts/bench-scheme-linear found fastest on an H200, for the products of Llama 8B
and 1, 4, 8, 16, 32, 64 and 128 rows. With mxfp4 weights, the four products of a layer take at most 11% longer than with
the fastest tile of each, with interleaved int4 weights at most 3%, and with FP8 weights in blocks at most 4% with up to
32 rows, and 10% with 64. Tiles of more than 64 rows were not compared with 8-bit weights. The tiles of interleaved int4
and FP8 weights were timed with the operations that decode steps fuse. Those of 128 rows are also used for 129 to 384
rows, where other tiles of the register GEMM were slower. The number of parts in the Hopper GEMM follows from a model of
its time: for 129 to 2,048 rows, the fastest number took at most 8% less.

Rejected for the skinny GEMM: splitting the columns among programs, whose sums a second kernel adds. It was 3 to 9%
faster for 4-bit weights with many columns, and slower for all others.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from tcdeploy.kernels.linear.tile_configs import K_MULTIPLE, MAX_ROWS, N_MULTIPLE, ONE_WAVE_N, SMALL_N

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


class SchemeGemmTile(NamedTuple):
    """The shape of one program for many rows: rows of x, rows of the weight, and columns of each per loop step."""

    name: str
    block_m: int
    block_n: int
    block_k: int
    splits: int  # parts of the columns, each the work of a program
    num_warps: int
    num_stages: int  # of the software pipeline


class RegisterGemmTile(NamedTuple):
    """The shape of one program, which multiplies up to 128 rows of x by block_n rows of an int4 or FP8 weight."""

    name: str
    block_n: int
    splits: int  # parts of the columns, each the work of a program
    num_warps: int
    num_stages: int  # of the software pipeline
    scales_values: bool = False  # scales multiply the values, in x's dtype, instead of the sums; parts are in it too
    max_registers: int | None = None  # per thread
    max_programs: int | None = None  # of a product, so that wider weights have fewer parts
    unroll: int = 1  # steps of 128 columns between two barriers; fewer if the number of steps is not a multiple


class HopperGemmTile(NamedTuple):
    """The shape of one program on Hopper: rows of x, and rows of an int4 weight."""

    name: str
    block_m: int
    block_n: int
    stages: int  # of 64 columns in shared memory, an even number


Tile: TypeAlias = SchemeGemvTile | SchemeSkinnyGemmTile | SchemeGemmTile | RegisterGemmTile | HopperGemmTile

SCHEME_GEMV_TILES = (
    SchemeGemvTile("n4_b2048", 4, 2048, 4),
    SchemeGemvTile("n2_b2048", 2, 2048, 4),
    SchemeGemvTile("n8_b2048", 8, 2048, 4),
    SchemeGemvTile("n8_b1024", 8, 1024, 2),
)
N4_B2048, N2_B2048, N8_B2048, N8_B1024 = range(len(SCHEME_GEMV_TILES))
SCHEME_SKINNY_GEMM_TILES = (
    SchemeSkinnyGemmTile("n32_k512", 32, 512, 4, 4),
    SchemeSkinnyGemmTile("n16_k512", 16, 512, 4, 4),
    SchemeSkinnyGemmTile("n16_k256", 16, 256, 4, 5),
    SchemeSkinnyGemmTile("n16_k1024", 16, 1024, 4, 3),
    SchemeSkinnyGemmTile("n64_k256", 64, 256, 4, 4),
    SchemeSkinnyGemmTile("n64_k128", 64, 128, 4, 5),
    SchemeSkinnyGemmTile("n32_k512_s3", 32, 512, 4, 3),
)
N32_K512, N16_K512, N16_K256, N16_K1024, N64_K256, N64_K128, N32_K512_S3 = range(len(SCHEME_SKINNY_GEMM_TILES))
SCHEME_GEMM_TILES = (
    SchemeGemmTile("m64_n64_s4", 64, 64, 64, 4, 4, 4),
    SchemeGemmTile("m64_n128", 64, 128, 128, 1, 4, 3),
    SchemeGemmTile("m128_n64_s4", 128, 64, 64, 4, 4, 4),
    SchemeGemmTile("m128_n128", 128, 128, 64, 1, 8, 4),
)
M64_N64_S4, M64_N128, M128_N64_S4, M128_N128 = range(len(SCHEME_GEMM_TILES))
REGISTER_GEMM_TILES = (
    RegisterGemmTile("f64_s4", 64, 4, 4, 4),
    RegisterGemmTile("f128_s8", 128, 8, 8, 3),
    RegisterGemmTile("f128u2", 128, 1, 8, 3, unroll=2),
    RegisterGemmTile("f128_v", 128, 1, 8, 3, True, 128),
    RegisterGemmTile("f128_v_s8", 128, 8, 8, 3, True, 128, 2 * 132),  # two programs for each SM of an H100
    RegisterGemmTile("f128", 128, 1, 8, 3, False, 128),
    RegisterGemmTile("f128_s4", 128, 4, 8, 3),
)
F64_S4, F128_S8, F128U2, F128_V, F128_V_S8, F128, F128_S4 = range(len(REGISTER_GEMM_TILES))
HOPPER_GEMM_TILE = HopperGemmTile("h256_128", 256, 128, 6)
HOPPER_BLOCK_K = 128  # a program has a multiple of this number of columns: one group of the usual size
# Microseconds on an H200, from which the number of parts of the columns follows.
HOPPER_BLOCK_US, HOPPER_TILE_US, PARTS_US, PART_ELEMENT_US = 1.4, 1.5, 1.0, 0.73e-6
MAX_HOPPER_SPLITS = 8
REGISTER_BLOCK_K = 128  # columns of a step: at most one group of the usual size
MANY_COLUMNS = 8192  # of a narrow weight whose columns are split further
MAX_SUM_ROWS, MAX_WIDE_SUM_ROWS = 64, 32  # of x, for narrow and wide weights; with more, scales multiply values
MAX_GEMM_ROWS = 128  # with more, a dense copy and cuBLAS are faster
MAX_INTERLEAVED_ROWS = 384  # the four products of 384 rows take 366 us, with a dense copy 392; of 512 rows 452 and 435
MIN_HOPPER_ROWS, MAX_HOPPER_ROWS = 129, 2048  # of x; with more, a dense copy and cuBLAS are faster
WIDE_N = 4 * ONE_WAVE_N
MAX_4_BIT_SKINNY_ROWS = 32
MAX_8_BIT_SKINNY_ROWS = 8  # of x, if the register GEMM takes the weight


def is_supported(
    rows: int, n: int, k: int, group: int, per_byte: int, is_interleaved: bool = False, on_hopper: bool = False
) -> bool:
    """Whether the kernels compute x [rows, k] @ w [n, k].T with `group` columns to a scale and per_byte to a byte.

    `on_hopper`: whether the Hopper GEMM takes the weight.
    """
    is_group = group >= MIN_GROUP and (group % (16 * per_byte) == 0 or group == MIN_GROUP)
    max_rows = MAX_HOPPER_ROWS if on_hopper else MAX_INTERLEAVED_ROWS if is_interleaved else MAX_GEMM_ROWS
    return 1 <= rows <= max_rows and n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0 and is_group


def gemv_tile(n: int, per_byte: int, in_registers: bool) -> SchemeGemvTile:
    """A tile for one row: with fewer rows of the weight if there would be too few programs to fill the GPU.

    With 4-bit weights, instructions limit the speed. A program then has more rows of the weight, which share the
    conversion of the inputs to float32.
    """
    if n <= ONE_WAVE_N:
        return SCHEME_GEMV_TILES[N2_B2048]
    if per_byte == 2:
        return SCHEME_GEMV_TILES[N8_B1024 if in_registers and n > SMALL_N else N8_B2048]
    return SCHEME_GEMV_TILES[N4_B2048]


def choose_tile(rows: int, n: int, k: int, per_byte: int, in_registers: bool, on_hopper: bool = False) -> Tile:
    """The tile of a product. `in_registers`, `on_hopper`: whether the register or the Hopper GEMM takes the weight."""
    if rows == 1:
        return gemv_tile(n, per_byte, in_registers)
    if on_hopper and rows >= MIN_HOPPER_ROWS and not is_register_faster(rows, n):
        return HOPPER_GEMM_TILE
    if in_registers and per_byte == 2:
        return register_gemm_tile(rows, n, k)
    if in_registers and MAX_8_BIT_SKINNY_ROWS < rows <= MAX_ROWS:
        return fp8_gemm_tile(rows, n, k)
    if rows <= (MAX_4_BIT_SKINNY_ROWS if per_byte == 2 else MAX_ROWS):
        return skinny_gemm_tile(rows, n, per_byte)
    return gemm_tile(rows, n)


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
    elif per_byte == 2 and rows > 8:
        tile = N32_K512_S3
    elif per_byte == 2:
        tile = N32_K512 if is_wide else N16_K512
    elif rows > 8:
        tile = N16_K256 if is_wide else N16_K1024
    else:
        tile = N16_K1024 if is_wide else N16_K512
    return SCHEME_SKINNY_GEMM_TILES[tile]


def register_gemm_tile(rows: int, n: int, k: int) -> RegisterGemmTile:
    """A tile for 2 to 384 rows of x and int4 weights.

    Narrow weights have too few tiles, so their columns are split among programs. With up to 16 rows, wide weights are
    split too: `gate+up` took about the same time with and without.
    """
    is_wide = n >= WIDE_N
    if rows > (MAX_WIDE_SUM_ROWS if is_wide else MAX_SUM_ROWS):
        tile = F128_V if is_wide else F128_V_S8
    elif is_wide and rows > 16:
        tile = F128U2
    else:
        tile = F128_S8 if not is_wide and k >= MANY_COLUMNS and rows <= 32 else F64_S4
    return REGISTER_GEMM_TILES[tile]


def is_register_faster(rows: int, n: int) -> bool:
    """Whether the register GEMM, with tiles of 128 rows of x, is faster: a tile of the Hopper GEMM is half empty."""
    return n >= WIDE_N and HOPPER_GEMM_TILE.block_m < rows <= MAX_INTERLEAVED_ROWS


def count_hopper_tiles(tile: HopperGemmTile, rows: int, n: int) -> tuple[int, int]:
    """The number of tiles of rows of x, and of rows of the weight."""
    return -(-rows // tile.block_m), -(-n // tile.block_n)


def fit_hopper_splits(tile: HopperGemmTile, rows: int, n: int, k: int, multiprocessors: int) -> int:
    """The number of parts of the columns of a weight [n, k] that take least time, by a model of product and sum.

    An SM runs one program at a time.
    """
    tiles, blocks = math.prod(count_hopper_tiles(tile, rows, n)), k // HOPPER_BLOCK_K

    def microseconds(splits: int) -> float:
        waves = -(-tiles * splits // multiprocessors)
        sums = PARTS_US + splits * rows * n * PART_ELEMENT_US if splits > 1 else 0.0
        return waves * (HOPPER_TILE_US + -(-blocks // splits) * HOPPER_BLOCK_US) + sums

    return min(range(1, min(MAX_HOPPER_SPLITS, blocks) + 1), key=microseconds)


def fp8_gemm_tile(rows: int, n: int, k: int) -> RegisterGemmTile:
    """A tile for 9 to 64 rows of x and FP8 weights. With fewer rows, the skinny GEMM is faster for most products."""
    if n >= WIDE_N:
        return REGISTER_GEMM_TILES[F128]
    return REGISTER_GEMM_TILES[F128_S8 if k >= MANY_COLUMNS and rows <= 32 else F128_S4]


def gemm_tile(rows: int, n: int) -> SchemeGemmTile:
    """A tile for up to 128 rows. Narrow weights have too few tiles, so their columns are split among programs."""
    wide, narrow = (M128_N128, M128_N64_S4) if rows > 64 else (M64_N128, M64_N64_S4)
    return SCHEME_GEMM_TILES[wide if n >= WIDE_N else narrow]


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
