"""The `tcdeploy::` ops: attention as torch.compile sees it, as opaque nodes that never break a graph.

    kv_write           writes a prefill step's K and V into their slots of the paged cache
    prefill_attention  packed prompts, or chunks of them, each over its own KV blocks
    decode_attention   one new token per sequence: writes its K and V, and attends over the sequence's KV blocks
    mixed_attention    decode_attention for the first tokens, and prefill_attention for the others

Each op takes the name of its backend as an argument, so the choice is part of the graph and of the cache key.
`reference.py` defines what the ops compute. Lengths reach the graph only as tensors. The few integers that
FlashAttention needs on the host are passed in `host_scalars`, a CPU tensor, which costs neither a guard nor a
synchronisation.

The caches have the dtype of k and v, or they are float8_e4m3fn and hold k / kv_scales[0] and v / kv_scales[1]. The
scales are a tensor [2] float32: as numbers, they would be constants of the graph, and each layer would need a program
of its own. The new token of a decode step is rounded like those in the cache, so the output does not depend on how a
prompt is divided into steps.

torch does not include the Python body of an op in its compile cache key; `PostGradPass.uuid`
(programs/passes/post_grad.py) adds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.attention import backends
from tcdeploy.kernels.attention.metadata import DecodeMetadata, HeadNorms
from tcdeploy.kernels.attention.splits import decode_splits
from tcdeploy.kernels.custom_op import custom_op

# The entries of host_scalars. `tokens` includes the `decoding` tokens of the decode rows. `rows` is the number of rows
# that a mixed step launches, padding rows included; a CUDA graph of the step contains it as a constant.
HOST_SCALARS = ("tokens", "keys", "max_seqlen_q", "max_seqlen_k", "has_prefix", "decoding", "rows")


@custom_op("kv_write", mutates_args=("k_cache", "v_cache"))
def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, backend: str,
    kv_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write k and v [tokens, kv_heads, dim] into [blocks, block_size, kv_heads, dim]; slot_mapping [tokens] int64.

    Padding tokens may share a slot; which of them it holds afterwards is undefined.
    """
    write_kv = backends.IMPLEMENTATIONS[backend].write_kv
    assert write_kv is not None
    write_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)


@kv_write.register_fake
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: object, **named: object) -> None:
    return None


@custom_op("prefill_attention")
def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seq_lens: Tensor, host_scalars: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float,
    backend: str, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed queries: q [tokens, heads, head_dim] -> [tokens, heads, v_head_dim].

    k and v [tokens, kv_heads, dim] belong to the same tokens and are already in the cache; v must be contiguous only in
    its last dimension. block_table [sequences, width], cu_seqlens_q [sequences + 1] and seq_lens [sequences] are int32;
    host_scalars [7] is int64 on the CPU. Padding rows of the result are zero.
    """
    prefill = backends.IMPLEMENTATIONS[backend].prefill
    assert prefill is not None
    batch = backends.PagedBatch(k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, host_scalars)
    return prefill(q, k, v, batch, backends.AttentionParams(scale, window, softcap, sinks, kv_scales))


@custom_op("decode_attention", mutates_args=("k_cache", "v_cache", "split_counters"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    split_counters: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float, splits: int, backend: str,
    cos: Tensor | None = None, sin: Tensor | None = None, kv_scales: Tensor | None = None,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Write each sequence's newest K and V into the caches, then attend with one query per sequence.

    q [sequences, heads, head_dim] -> [sequences, heads, v_head_dim]. k and v [sequences, kv_heads, dim] are written to
    the last slot of the sequence; `seq_lens` [sequences] int32 already counts it. A sequence of length 0 is padding: it
    writes nothing, and its row of the result is zero. split_counters [max batch + 1 or more, kv_heads] int32 is zero
    before and after; a step uses the first rows. `splits` parts of a sequence, fixed per bucket, affect speed and
    rounding. If cos and sin [sequences, head_dim] are given, RoPE is applied to q and k first (rotate-half layout).
    If q_norm and k_norm [head_dim] are given too, each head x of q and k is x / sqrt(mean(x^2) + norm_eps) * norm
    before RoPE.
    """
    assert (cos is None) == (sin is None) and (q_norm is None) == (k_norm is None)
    assert q_norm is None or cos is not None
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, norm_eps)
    decode = backends.IMPLEMENTATIONS[backend].decode
    assert decode is not None
    rows = DecodeMetadata(block_table, seq_lens, split_counters)
    params = backends.AttentionParams(scale, window, softcap, sinks, kv_scales)
    return decode(q, k, v, k_cache, v_cache, rows, params, splits, cos, sin, norms, None)


@custom_op("mixed_attention", mutates_args=("k_cache", "v_cache", "split_counters"))
def mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seq_lens: Tensor, host_scalars: Tensor, row_block_table: Tensor, row_seq_lens: Tensor, split_counters: Tensor,
    sinks: Tensor | None, scale: float, window: int, softcap: float, prefill_backend: str, decode_backend: str,
    kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of decode rows and of packed prompts: q [tokens, heads, head_dim] -> [tokens, heads, v_head_dim].

    Token i below `rows` (host_scalars) belongs to decode row i if row_seq_lens[i] is not 0, and is computed as in
    `decode_attention`, which also writes its K and V. row_block_table [max rows, width] and row_seq_lens [max rows] are
    int32. The other tokens are computed as in `prefill_attention`; the first sequence of the prefill tensors has length
    0 and holds the tokens of the rows. With 0 rows no decode kernel is launched. Decode attention uses
    split_counters[:max rows]; the Triton backend uses the rest to split the keys of prompts (prefill.py).
    """
    rows = min(int(host_scalars[HOST_SCALARS.index("rows")]), q.shape[0])
    params = backends.AttentionParams(scale, window, softcap, sinks, kv_scales)
    batch = backends.PagedBatch(k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, host_scalars)
    decode_batch = DecodeMetadata(row_block_table[:rows], row_seq_lens[:rows], split_counters)
    splits = choose_decode_splits(rows, split_counters)
    backend = backends.IMPLEMENTATIONS[prefill_backend]
    if backend.mixed is not None and prefill_backend == decode_backend:
        prefill_counters = split_counters[row_block_table.shape[0] :]
        return backend.mixed(q, k, v, batch, decode_batch, prefill_counters, params, splits)
    assert backend.prefill is not None
    out = backend.prefill(q, k, v, batch, params)
    if rows:
        decode = backends.IMPLEMENTATIONS[decode_backend].decode
        assert decode is not None
        decode(
            q[:rows], k[:rows], v[:rows], k_cache, v_cache, decode_batch, params, splits, None, None, None, out[:rows]
        )
    return out


@prefill_attention.register_fake
@decode_attention.register_fake
@mixed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: object, **named: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])


def choose_decode_splits(batch_size: int, split_counters: Tensor) -> int:
    """The number of splits for `batch_size` rows on this GPU; 1 on a CPU."""
    if not split_counters.is_cuda:
        return 1
    num_sms = torch.cuda.get_device_properties(split_counters.device).multi_processor_count
    return decode_splits(batch_size, split_counters.shape[1], num_sms)
