"""How attention divides the keys of a sequence among thread blocks. Does not import torch.

Decode: with `splits`, several thread blocks share the keys of a sequence that belong to one KV head. They take turns,
and read a number of consecutive tiles of keys in each turn. Both numbers are constants of a captured CUDA graph.

- A small batch is split so that there is about one thread block per SM. A turn is one tile.
- A large batch has enough thread blocks without splits, but the longest sequence would then determine the time. With
  one sequence of 16,000 tokens among 15 of 300 to 1,500, attention and its two GEMMs take 357 us without splits, and
  114 us with 8 (one layer of an 8B shape, H100).
- A turn of a large batch is LARGE_BATCH_TURN tiles, so that short sequences are not split, which would cost time. With
  16 sequences of 512 tokens, splits that have no keys cost 0.7 of 55 us.

Prefill: a thread block, which is a Triton program, computes a tile of queries of one head. If a step has few tiles,
they use only part of the GPU, and the longest prefix determines the time. Its keys are then split (prefill.py). With 40
tokens after a prefix of 30,000, beside 16 decode rows, attention and its two GEMMs take 255 us, and 580 us without
splits and without the second stream of mixed.py (docs/performance-log.md, "Attention kernels").
"""

from __future__ import annotations

BLOCKS_PER_SM = 1  # in a small batch
LARGE_BATCH_PAIRS = 128  # (sequence, KV head) pairs of the smallest large batch
LARGE_BATCH_TURN = 8  # tiles
LARGE_BATCH_BLOCKS = 2048  # thread blocks to launch at most, unless the minimum number of splits needs more
MIN_LARGE_BATCH_SPLITS, MAX_LARGE_BATCH_SPLITS = 4, 8
PREFILL_BLOCKS_PER_SM = 2  # resident on one SM at once, at head size 128
# Tiles of all heads, which bound the number of counters. It is more than the limit in `make_split_workspace` of any
# current GPU.
MAX_PREFILL_TILES_TO_SPLIT = 1024
# Additional thread blocks per head. About 10 are idle in a step of few prompts anyway. With 4 more, 3 tiles per head
# get the 5 splits that `_prefill_splits` (prefill_kernel.py) chooses, and 5 tiles the 3 splits (32 heads, H100).
EXTRA_PREFILL_BLOCKS = 4
# With 512, attention and its GEMMs took 11% longer for 350 tokens after 800 than without splits, when steps of this
# size were still split.
MIN_KEYS_PER_PREFILL_SPLIT = 1024


def decode_splits(batch: int, kv_heads: int, num_sms: int) -> int:
    """The default number of splits, a power of two.

    It depends on static values only, so it is constant for a bucket, and not on the context, which is not part of a
    program. On 132 SMs with 8 KV heads, it is 16 for a batch of 1, 4 for 4, 8 for 16 and 32, and 4 from 64 on.
    """
    pairs = max(batch * kv_heads, 1)
    splits = BLOCKS_PER_SM * num_sms // pairs
    if pairs >= LARGE_BATCH_PAIRS:
        splits = min(max(LARGE_BATCH_BLOCKS // pairs, MIN_LARGE_BATCH_SPLITS), MAX_LARGE_BATCH_SPLITS)
    return 1 << (max(splits, 1).bit_length() - 1)


def tiles_per_turn(batch: int, kv_heads: int) -> int:
    """Consecutive tiles of keys in one turn of a split."""
    return LARGE_BATCH_TURN if batch * kv_heads >= LARGE_BATCH_PAIRS else 1


def num_prefill_counters(heads: int, sequences: int) -> int:
    """Counters that a prefill step of up to `sequences` sequences needs: one for each thread block of its grid."""
    return MAX_PREFILL_TILES_TO_SPLIT + heads * (sequences + 1 + EXTRA_PREFILL_BLOCKS)
