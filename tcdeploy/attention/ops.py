"""The `tcdeploy::` ops: what torch.compile sees of attention, as nodes that never break a graph.

    kv_write           a prompt's keys and values into their slots of the paged cache
    prefill_attention  packed prompts (or chunks of them), each over its own pages
    decode_attention   one new token per sequence: written to its slot, and attending over its pages

All are opaque (decode.py says why its kernel is not a `triton_op`); the kernels that Triton builds for them lie in the
cache folder too. Each op takes the name of its backend as an argument, so the choice stands in the graph and in the
cache's key; what they compute is defined by `reference.py`. Nothing the graph sees depends on lengths: they
are tensors. The few integers that FlashAttention wants on the host travel in `host_scalars`, a CPU tensor, which costs
neither a guard nor a synchronisation.

torch does not put an op's Python body into the key of its compile cache: compiler/programs.py does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.attention import backends

HOST_SCALARS = ("tokens", "keys", "max_seqlen_q", "max_seqlen_k", "has_prefix")  # the entries of host_scalars


@torch.library.custom_op("tcdeploy::kv_write", mutates_args=("k_cache", "v_cache"))
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, backend: str) -> None:
    """k and v [tokens, kv_heads, dim] into slots of [blocks, block_size, kv_heads, dim]; slot_mapping [tokens] int64.

    Several padding tokens may name one slot: which of them stays there is undefined.
    """
    backends.KV_WRITE_BACKENDS[backend](k, v, k_cache, v_cache, slot_mapping)


@kv_write.register_fake
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, backend: str) -> None:
    return None


@torch.library.custom_op("tcdeploy::prefill_attention", mutates_args=())
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    host_scalars: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    """Causal attention of packed queries: q [tokens, heads, head_dim] -> [tokens, heads, v_head_dim].

    k and v are the queries' own, already written to the cache; v may be strided but for the last dimension.
    block_table [sequences, width], cu_seqlens_q [sequences + 1] and seq_lens [sequences] are int32, host_scalars [5]
    int64 on the CPU. Padding rows are zero.
    """
    batch = backends.PagedBatch(k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, host_scalars)
    return backends.PREFILL_BACKENDS[backend](q, k, v, batch, backends.AttentionParams(scale, window, softcap, sinks))


@prefill_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    host_scalars: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])


@torch.library.custom_op("tcdeploy::decode_attention", mutates_args=("k_cache", "v_cache", "split_counters"))
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    split_counters: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    splits: int,
    backend: str,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Write each sequence's newest token into the caches, and attend: one query each.

    q [sequences, heads, head_dim] -> [sequences, heads, v_head_dim]; k and v [sequences, kv_heads, dim] belong in the
    last slot of `seq_lens`, which counts them. A sequence of length 0 is padding: nothing is written, and zeros come
    back. arrivals [sequences, kv_heads] int32 is zero before and after; splits, a plain number that a bucket fixes,
    is the number of parts of a sequence: it changes the speed and the rounding. The reference needs neither.

    cos and sin [sequences, head_dim]: q and k are yet to be turned by them, by halves of the head, before all else.
    """
    assert (cos is None) == (sin is None)
    rotary = None if cos is None or sin is None else backends.RotaryCosSin(cos, sin)
    batch = backends.PagedDecodeBatch(k_cache, v_cache, block_table, seq_lens, split_counters)
    return backends.DECODE_BACKENDS[backend](
        q, k, v, batch, backends.AttentionParams(scale, window, softcap, sinks), splits, rotary
    )


@decode_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    split_counters: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    splits: int,
    backend: str,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])


# What a default number of splits aims at; measured on an H100.
PROGRAMS_PER_SM = 1
MIN_KEYS_PER_SPLIT = 64


def decode_splits(batch: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """The default number of parts of a sequence: a power of two that gives the GPU about one wave of programs.

    Only static facts enter (`max_context` is the block table's width in tokens, or the window), so a bucket has one
    answer: one sequence of 8 kv heads on 132 multiprocessors is cut in 16, 16 sequences are not cut.
    """
    programs = PROGRAMS_PER_SM * num_sms // max(batch * kv_heads, 1)
    parts = min(programs, max_context // MIN_KEYS_PER_SPLIT)
    return 1 << (max(parts, 1).bit_length() - 1)
