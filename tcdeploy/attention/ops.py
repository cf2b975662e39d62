"""The `tcdeploy::` ops: what torch.compile sees of attention, as opaque nodes that never break a graph.

    kv_write           one step's keys and values into their slots of the paged cache
    prefill_attention  packed prompts (or chunks of them), each over its own pages
    decode_attention   one query per sequence over its pages

Each op takes the name of its backend as an argument, so the choice stands in the graph and in the cache's key; what
they compute is defined by `reference.py`. Nothing the graph sees depends on lengths: they are tensors. The few
integers that FlashAttention wants on the host travel in `host_facts`, a CPU tensor, which costs neither a guard nor
a synchronisation.

torch does not put an op's Python body into the key of its compile cache: compiler/programs.py does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.attention import backends

HOST_FACTS = ("tokens", "keys", "longest_query", "longest_key", "has_prefix")  # the entries of host_facts


@torch.library.custom_op("tcdeploy::kv_write", mutates_args=("k_cache", "v_cache"))
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, backend: str) -> None:
    """k and v [tokens, kv_heads, dim] into slots of [blocks, block_size, kv_heads, dim]; slot_mapping [tokens] int64.

    Several padding tokens may name one slot: which of them stays there is undefined.
    """
    backends.KV_WRITE[backend](k, v, k_cache, v_cache, slot_mapping)


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
    host_facts: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    """Causal attention of packed queries: q [tokens, heads, head_dim] -> [tokens, heads, v_head_dim].

    k and v are the queries' own, already written to the cache; block_table [sequences, width], cu_seqlens_q
    [sequences + 1] and seq_lens [sequences] are int32, host_facts [5] int64 on the CPU. Padding rows are zero.
    """
    pages = backends.Pages(k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, host_facts)
    return backends.PREFILL[backend](q, k, v, pages, backends.Rules(scale, window, softcap, sinks))


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
    host_facts: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])


@torch.library.custom_op("tcdeploy::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    """One query each: q [sequences, heads, head_dim] -> [sequences, heads, v_head_dim]; length 0 gives zeros."""
    rules = backends.Rules(scale, window, softcap, sinks)
    return backends.DECODE[backend](q, k_cache, v_cache, block_table, seq_lens, rules)


@decode_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
