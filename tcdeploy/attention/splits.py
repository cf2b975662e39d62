"""How decode attention divides the keys of a sequence among thread blocks. Does not import torch.

Without splits, one thread block reads all keys of a sequence that belong to one KV head. With `splits`, several share
them: they take turns, and read a number of consecutive tiles of keys in each turn. Both numbers depend on the batch
size only, since a CUDA graph contains them as constants, and the host does not know the lengths when it is captured.

- A small batch is split so that there is about one thread block per SM. A turn is one tile.
- A large batch has enough thread blocks without splits, but the longest sequence would then determine the time: with
  one sequence of 16,000 tokens among 15 of 300 to 1,500, attention takes 310 us without splits, and 58 us with 16 (one
  layer of an 8B shape, H100). A turn is LARGE_BATCH_TURN tiles, so that short sequences are not split. Splitting those
  would cost time: 16 sequences of 512 tokens take 16.7 us without splits, 19.6 with turns of 8 tiles, and 21.2 with
  turns of 4.
"""

from __future__ import annotations

BLOCKS_PER_SM = 1  # in a small batch
MIN_KEYS_PER_SPLIT = 64
LARGE_BATCH_PAIRS = 128  # pairs of a sequence and a KV head, from which on a batch is large
LARGE_BATCH_TURN = 8  # tiles
LARGE_BATCH_BLOCKS = 2048  # thread blocks; those without keys end at once
MIN_LARGE_BATCH_SPLITS, MAX_LARGE_BATCH_SPLITS = 4, 8


def decode_splits(batch: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """The default number of splits, a power of two.

    It depends on static values only, so it is constant for a bucket. `max_context` bounds a sequence's length in
    tokens; the engine passes UNBOUNDED_CONTEXT_TOKENS, because programs must not depend on the context. On 132 SMs with
    8 KV heads, it is 16 for a batch of 1, 4 for 4, 8 for 16 and 32, and 4 from 64 on.
    """
    pairs = max(batch * kv_heads, 1)
    splits = BLOCKS_PER_SM * num_sms // pairs
    if pairs >= LARGE_BATCH_PAIRS:
        splits = min(max(LARGE_BATCH_BLOCKS // pairs, MIN_LARGE_BATCH_SPLITS), MAX_LARGE_BATCH_SPLITS)
    return 1 << (max(min(splits, max_context // MIN_KEYS_PER_SPLIT), 1).bit_length() - 1)


def tiles_per_turn(batch: int, kv_heads: int) -> int:
    """Consecutive tiles of keys that a split reads before it is the next split's turn."""
    return LARGE_BATCH_TURN if batch * kv_heads >= LARGE_BATCH_PAIRS else 1
