"""Tile configs of the linear kernels, and the heuristics that choose one for a shape. Does not import Triton.

The ops' `config` argument is an index into `GEMV_TILES` (one row) or `SKINNY_GEMM_TILES` (2 to 64 rows), so the choice
is part of the graph and of its cache key. The heuristics return the best guess first, then the other tiles worth
timing. Their thresholds are set between the measured shapes: Llama 3.1 8B, Qwen2.5 7B and Llama 3.2 1B on an H100
(scripts/bench-linear).
"""

from __future__ import annotations

from typing import NamedTuple

# Shapes that the kernels accept.
N_MULTIPLE, K_MULTIPLE = 16, 64
MIN_N_AND_K = 1024  # smaller shapes were not measured, except for routers
MIN_GEMV_BLOCK_K = 512  # in a shorter step, several threads of a GEMV program load the same elements
MIN_ROWS, MAX_ROWS = 2, 64  # of the skinny GEMM; one row is the GEMV's

# Thresholds of the heuristics.
ONE_WAVE_N = 16 * 132  # at most one tile of 16 columns per SM of an H100
SMALL_N, MEDIUM_N, LM_HEAD_N = 4096, 8192, 65536  # up to o and down; up to qkv; the LM head
SMALL_K = 2048


class GemvTile(NamedTuple):
    """The shape of one GEMV program: rows of w (columns of y), and elements of each row per loop step."""

    name: str
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1  # more than one: the loop loads by asynchronous copies that many steps ahead


class SkinnyGemmTile(NamedTuple):
    """The shape of one skinny-GEMM program: rows of w (columns of y), and elements of each row per loop step."""

    name: str
    block_n: int
    block_k: int
    k_slices: int  # slices of block_k, one per warp; 1: all warps share one dot
    num_warps: int
    num_stages: int  # of the software pipeline


GEMV_TILES = (
    GemvTile("n1_k1024", 1, 1024, 4),
    GemvTile("n1_k2048", 1, 2048, 4),
    GemvTile("n2_k2048", 2, 2048, 4),
    GemvTile("n4_k2048", 4, 2048, 8),
    GemvTile("n2_k1024", 2, 1024, 2),
    GemvTile("n4_k512", 4, 512, 4),
    GemvTile("n4_k512_s3", 4, 512, 2, 3),
    GemvTile("n8_k1024", 8, 1024, 8, 3),
)
N1_K1024, N1_K2048, N2_K2048, N4_K2048, N2_K1024, N4_K512, N4_K512_S3, N8_K1024 = range(len(GEMV_TILES))

SKINNY_GEMM_TILES = (
    SkinnyGemmTile("n16_k128", 16, 128, 2, 2, 6),
    SkinnyGemmTile("n16_k1024", 16, 1024, 4, 4, 3),
    SkinnyGemmTile("n16_k512", 16, 512, 4, 4, 6),
    SkinnyGemmTile("n64_k64", 64, 64, 1, 4, 8),
    SkinnyGemmTile("n64_k128_s4", 64, 128, 1, 4, 4),
    SkinnyGemmTile("n64_k128_s7", 64, 128, 1, 4, 7),
    SkinnyGemmTile("n128_k128", 128, 128, 1, 4, 4),
)
N16_K128, N16_K1024, N16_K512, N64_K64, N64_K128_S4, N64_K128_S7, N128_K128 = range(len(SKINNY_GEMM_TILES))


def gemv_configs(n: int, k: int) -> tuple[int, ...]:
    """Indices into GEMV_TILES for x [1, k] @ w [n, k].T, the best guess first; at most 3% slower than the best tile.

    Empty if the kernel does not take the shape, or the shape is smaller than any that was measured. Routers of mixtures
    of experts, which have fewer rows than other weights (16 to 512), have one config: they take the time of a launch.
    """
    if n < MIN_N_AND_K <= k and n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0:
        return (N1_K2048 if k % GEMV_TILES[N1_K2048].block_k == 0 else N1_K1024,)
    if not _is_supported(n, k):
        return ()
    return _ranked(_gemv_heuristic(n, k), *range(len(GEMV_TILES)))


def skinny_gemm_configs(rows: int, n: int, k: int) -> tuple[int, ...]:
    """Indices into SKINNY_GEMM_TILES worth timing for x [rows, k] @ w [n, k].T, the best guess first.

    Empty if the kernel does not take the shape or cuBLAS is as fast. On the measured shapes the guess was at most 3%
    slower than the best tile. For Hopper: other GPUs were not measured and may lack the shared memory.
    """
    if not MIN_ROWS <= rows <= MAX_ROWS or not _is_supported(n, k):
        return ()
    if rows <= 8:
        return _ranked(_skinny_gemm_heuristic_up_to_8_rows(n, k), N16_K128, N16_K1024, N16_K512, N64_K128_S4)
    if n <= ONE_WAVE_N:
        return (N16_K512,) if rows <= 16 else ()
    if rows <= 32:
        guess = N64_K128_S7 if n <= SMALL_N else N64_K64 if n <= MEDIUM_N else N128_K128
        return _ranked(guess, N64_K128_S7, N128_K128, N64_K64, N64_K128_S4)
    return (N128_K128,) if n >= 2 * MEDIUM_N else ()


def fit_block_k(block_k: int, k: int) -> int:
    """`block_k` halved until it divides k, so that no loop step needs a mask."""
    while k % block_k:
        block_k //= 2
    return block_k


def fit_gemv_block_k(block_k: int, k: int) -> int:
    """`block_k` or a half, a quarter, ... of it: the size that masks the fewest columns in the last step over k.

    The largest of equally good sizes is taken, and none below MIN_GEMV_BLOCK_K if `block_k` is above. For example,
    gpt-oss has 2,880 columns: steps of 1,024 mask 192 in the last one. The largest step that needs no mask has 64.
    """
    blocks = [block_k >> halvings for halvings in range(block_k.bit_length())]
    candidates = [block for block in blocks if min(MIN_GEMV_BLOCK_K, block_k) <= block <= k]
    return min(candidates, key=lambda block: (-k % block, -block)) if candidates else fit_block_k(block_k, k)


def _is_supported(n: int, k: int) -> bool:
    return min(n, k) >= MIN_N_AND_K and n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0


def _ranked(guess: int, *others: int) -> tuple[int, ...]:
    return (guess, *(other for other in others if other != guess))


def _gemv_heuristic(n: int, k: int) -> int:
    is_multiple_of_2048 = k % GEMV_TILES[N1_K2048].block_k == 0
    if n >= LM_HEAD_N:  # with 2,048 columns, programs of 8 KB took 145 us, and those of 4 KB 228
        return N2_K1024 if k <= SMALL_K else N1_K2048
    if n > 2 * k:  # gate and up
        return N2_K1024 if k <= SMALL_K else N1_K2048 if is_multiple_of_2048 else N4_K512_S3
    if n > k:  # qkv
        return N8_K1024 if k <= SMALL_K else N2_K2048 if is_multiple_of_2048 else N4_K512
    if k > 2 * n or k <= SMALL_K:  # down; o of a small model
        return N1_K1024
    return N4_K2048 if is_multiple_of_2048 else N2_K2048


def _skinny_gemm_heuristic_up_to_8_rows(n: int, k: int) -> int:
    if n <= ONE_WAVE_N:
        return N16_K512
    if n <= MEDIUM_N:
        return N16_K128 if k < 2 * n else N16_K1024
    if k <= SMALL_K:
        return N64_K128_S4 if n <= LM_HEAD_N else N16_K1024
    return N16_K1024 if n <= LM_HEAD_N else N16_K512
