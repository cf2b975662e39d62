"""Attention over a paged KV cache in plain PyTorch: the definition of the `tcdeploy::` ops, and their CPU backend.

Computes one sequence at a time, in float32, with the textbook formula. Every other backend is tested against these
functions. Their `.tolist()` and `int()` synchronise a GPU, where the Plan reports them as a fallback. Rejected: one
padded batch for all sequences, which is no faster on two CPU cores, and reads `batch * longest` keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0  # the largest value of float8_e4m3fn


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """Causal attention of the last `len(q)` tokens of one sequence over all its keys.

    Shapes: q [queries, heads, head_dim], k [keys, kv_heads, head_dim], v [keys, kv_heads, v_head_dim],
    sinks [heads]; returns [queries, heads, v_head_dim] in q's dtype. `window` is the number of keys that a query sees,
    its own included (0: all). `softcap` bounds scores to `softcap * tanh(score / softcap)` (0: no bound). An attention
    sink is a score without a value: it only adds to the softmax's denominator (gpt-oss).
    """
    queries, (keys, kv_heads, _) = len(q), k.shape
    group = q.shape[1] // kv_heads
    grouped = q.float().unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
    scores = grouped.flatten(1, 2) @ k.float().permute(1, 2, 0) * scale
    scores = scores.unflatten(1, (group, queries))  # [kv_heads, group, queries, keys]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if queries > 1 or window:  # else the query sees all keys
        distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        masked = (distance < 0) | (distance >= window) if window else distance < 0
        scores = scores.masked_fill(masked, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        column = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :keys]
    out = (weights.flatten(1, 2) @ v.float().transpose(0, 1)).unflatten(1, (group, queries))
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def gather_sequence(cache: Tensor, block_table_row: Tensor, length: int) -> Tensor:
    """The first `length` slots of one sequence: cache [blocks, block_size, heads, dim] -> [length, heads, dim]."""
    block_size = cache.shape[1]
    blocks = block_table_row[: -(-length // block_size)]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """K or V as an FP8 cache stores them: x / scale [1] as float8_e4m3fn. Values beyond its largest saturate.

    Not every version of torch saturates when it casts: beyond 464 some return NaN.
    """
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)  # a scale [1], not [], makes x float32 first


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """As `ops.kv_write`."""
    if kv_scales is not None:
        k, v = (to_fp8(x, scale) for x, scale in zip((k, v), kv_scales.split(1), strict=True))
    k_cache.flatten(0, 1)[slot_mapping] = k
    v_cache.flatten(0, 1)[slot_mapping] = v


def _read_sequence(
    k_cache: Tensor, v_cache: Tensor, block_table_row: Tensor, length: int, kv_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """K and V of the first `length` tokens of a sequence, in float32 if the cache is in FP8."""
    k, v = (gather_sequence(cache, block_table_row, length) for cache in (k_cache, v_cache))
    if kv_scales is None:
        return k, v
    k_scale, v_scale = kv_scales.split(1)
    return k.float() * k_scale, v.float() * v_scale


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `ops.prefill_attention`: k_cache [blocks, block_size, kv_heads, head_dim], v_cache likewise with v_head_dim.

    seq_lens counts prefix and queries. Rows past `cu_seqlens_q[-1]` and those of a sequence of length 0 are padding.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
    starts = cu_seqlens_q.tolist()
    for row, (start, stop, length) in enumerate(zip(starts, starts[1:], seq_lens.tolist(), strict=False)):
        if stop > start and length:
            k, v = _read_sequence(k_cache, v_cache, block_table[row], length, kv_scales)
            out[start:stop] = attend(q[start:stop], k, v, scale, window, softcap, sinks)
    return out


def normalise_heads(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head of x [sequences, heads, head_dim], in float32, with weights norm [head_dim]: float32."""
    return torch.nn.functional.rms_norm(x.float(), norm.shape, norm.float(), eps)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [sequences, heads, head_dim] over pairs (i, i + head_dim / 2); cos and sin are [sequences, head_dim].

    As `apply_rotary_pos_emb` of transformers' Llama, but rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos[:, None].float() + torch.cat([-second, first], -1) * sin[:, None].float()).to(x.dtype)


def paged_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None, out: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `ops.decode_attention`. If `out` is given, it is returned, and rows of padding keep their contents."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1]) if out is None else out
    block_size = k_cache.shape[1]
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            block, offset = divmod(length - 1, block_size)
            newest = block_table[row, block, None].long() * block_size + offset
            write_kv(k[row, None], v[row, None], k_cache, v_cache, newest, kv_scales)
            keys, values = _read_sequence(k_cache, v_cache, block_table[row], length, kv_scales)
            out[row] = attend(q[row, None], keys, values, scale, window, softcap, sinks)[0]
    return out
