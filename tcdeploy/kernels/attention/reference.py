"""Attention over a paged KV cache in plain PyTorch: the definition of the `tcdeploy::` ops, and their CPU backend.

Computes one sequence at a time, in float32, with the textbook formula. Every other backend is tested against these
functions. Their `.tolist()` synchronises a GPU, where the Plan reports them as a fallback. Rejected: one padded batch
for all sequences, which is no faster on two CPU cores, and reads `batch * longest` keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """Causal attention of the last `len(q)` tokens of one sequence over all its keys.

    Shapes: q [queries, heads, head_dim], k [keys, kv_heads, head_dim], v [keys, kv_heads, v_head_dim],
    sinks [heads]; returns [queries, heads, v_head_dim] in q's dtype. `window` is the number of keys that a query sees,
    its own included (0: all). `softcap` bounds scores to `softcap * tanh(score / softcap)` (0: no bound). An attention
    sink is a score without a value: it only adds to the softmax's denominator (gpt-oss).
    """
    queries, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale  # [heads, queries, keys]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    masked = (distance < 0) | (distance >= window) if window else distance < 0
    scores = scores.masked_fill(masked, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, queries, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :keys]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def gather_sequence(cache: Tensor, block_table_row: Tensor, length: int) -> Tensor:
    """The first `length` slots of one sequence: cache [blocks, block_size, heads, dim] -> [length, heads, dim]."""
    block_size = cache.shape[1]
    blocks = block_table_row[: -(-length // block_size)].long()
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `ops.prefill_attention`: k_cache [blocks, block_size, kv_heads, head_dim], v_cache likewise with v_head_dim.

    seq_lens counts prefix and queries. Rows past `cu_seqlens_q[-1]` and those of a sequence of length 0 are padding.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
    starts = cu_seqlens_q.tolist()
    for row, (start, stop, length) in enumerate(zip(starts, starts[1:], seq_lens.tolist(), strict=False)):
        if stop > start and length:
            k, v = (gather_sequence(cache, block_table[row], length) for cache in (k_cache, v_cache))
            out[start:stop] = attend(q[start:stop], k, v, scale, window, softcap, sinks)
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [sequences, heads, head_dim] over pairs (i, i + head_dim / 2); cos and sin are [sequences, head_dim].

    As `apply_rotary_pos_emb` of transformers' Llama, but rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos[:, None].float() + torch.cat([-second, first], -1) * sin[:, None].float()).to(x.dtype)


def paged_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `ops.decode_attention`. If `out` is given, it is returned, and rows of padding keep their contents."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1]) if out is None else out
    block_size = k_cache.shape[1]
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            newest_slot = (block_table[row, (length - 1) // block_size].long(), (length - 1) % block_size)
            k_cache[newest_slot], v_cache[newest_slot] = k[row], v[row]
            keys, values = (gather_sequence(cache, block_table[row], length) for cache in (k_cache, v_cache))
            out[row] = attend(q[row, None], keys, values, scale, window, softcap, sinks)[0]
    return out
