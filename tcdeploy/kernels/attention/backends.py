"""The functions behind the `tcdeploy::` ops: one `Implementation` for each row of planning/backends.py.

All FlashAttention versions implement one signature, `VarlenAttention`. The first chunk of a prompt uses the K and V
that it was called with. A later chunk gathers its KV blocks into a packed copy first, which costs one read of the
prefix and avoids the packages' incompatible paged layouts: FA2 requires a multiple of 256 slots per block, and
FlashAttention in torch 2.11 has no paged KV. A sink only adds to the softmax denominator, so the output is scaled by
sigmoid(log_sum_exp - sink), without support by the kernel.

Packages are imported at the first call: importing FlashAttention-4 takes 5 to 10 s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.kernels.attention import decode, mixed, prefill, reference
from tcdeploy.kernels.attention.metadata import DecodeMetadata, HeadNorms
from tcdeploy.torch_compat.torch_flash import flash_attention_forward

# FlashAttention-2 reads out of bounds for a padding sequence if max_seqlen_q is 1: it then packs the heads of a group
# as queries and reads one query per sequence, and a padding sequence has none. `_flash_prefill` passes at least this
# value.
MAX_SEQLEN_Q_FLOOR = 2


class AttentionParams(NamedTuple):
    """Scaling, window (0: none), soft cap (0: none) and sinks [heads]: see `reference.paged_decode`.

    kv_scales [2] float32, of K and V in an FP8 cache; None if the cache has the dtype of the queries.
    """

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    kv_scales: Tensor | None = None

    @property
    def window_sizes(self) -> tuple[int, int] | None:
        """(left, right) as FlashAttention counts them, without the query's own key; None without a window."""
        return (self.window - 1, 0) if self.window else None


class PagedBatch(NamedTuple):
    """The paged cache and a prefill batch: see `reference.paged_prefill`. host_scalars as in ops.HOST_SCALARS."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    host_scalars: Tensor


class VarlenSeqlens(NamedTuple):
    """Cumulative query and key counts [sequences + 1], and the longest of each over the sequences."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class VarlenResult(NamedTuple):
    out: Tensor  # [tokens, heads, head_dim]
    log_sum_exp: Tensor  # [heads, tokens]


VarlenAttention = Callable[[Tensor, Tensor, Tensor, VarlenSeqlens, AttentionParams], VarlenResult]


def _torch_flash(q: Tensor, k: Tensor, v: Tensor, seqlens: VarlenSeqlens, params: AttentionParams) -> VarlenResult:
    """FlashAttention-2 as shipped with torch (aten::_flash_attention_forward). Has no soft-capping."""
    options = dict(zip(("window_size_left", "window_size_right"), params.window_sizes or (), strict=False))
    out, log_sum_exp, *_ = flash_attention_forward(q, k, v, *seqlens, 0.0, True, False, scale=params.scale, **options)
    return VarlenResult(out, log_sum_exp)


def _flash_attn_2(q: Tensor, k: Tensor, v: Tensor, seqlens: VarlenSeqlens, params: AttentionParams) -> VarlenResult:
    from flash_attn import flash_attn_varlen_func

    out, log_sum_exp, *_ = flash_attn_varlen_func(
        q, k, v, *seqlens, softmax_scale=params.scale, causal=True, window_size=params.window_sizes or (-1, -1),
        softcap=params.softcap, return_attn_probs=True,
    )  # fmt: skip
    return VarlenResult(out, log_sum_exp)


def _flash_attn_4(q: Tensor, k: Tensor, v: Tensor, seqlens: VarlenSeqlens, params: AttentionParams) -> VarlenResult:
    from flash_attn.cute import flash_attn_varlen_func

    out, log_sum_exp, *_ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=seqlens.cu_seqlens_q, cu_seqlens_k=seqlens.cu_seqlens_k,
        max_seqlen_q=seqlens.max_seqlen_q, max_seqlen_k=seqlens.max_seqlen_k, softmax_scale=params.scale, causal=True,
        window_size=params.window_sizes or (None, None), softcap=params.softcap, return_lse=True,
    )  # fmt: skip
    return VarlenResult(out, log_sum_exp)


def gather_paged_kv(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, keys: int) -> Tensor:
    """Packs the slots of all sequences: cache [blocks, block_size, heads, dim] -> [keys, heads, dim]."""
    block_size = cache.shape[1]
    index = torch.arange(keys, device=cache.device)
    row = torch.searchsorted(cu_seqlens_k, index, right=True) - 1
    offset = index - cu_seqlens_k[row]
    slot = block_table[row, offset // block_size].long() * block_size + offset % block_size
    return cache.flatten(0, 1).index_select(0, slot)


def _flash_prefill(
    varlen: VarlenAttention, q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, params: AttentionParams
) -> Tensor:
    """Q [tokens, heads, head_dim] over the given K and V, or over gathered KV blocks if there is a prefix.

    Reads host_scalars on the host, so a CUDA graph cannot contain it. The packages read K and V in 16 bits only.
    """
    assert params.kv_scales is None
    tokens, keys, max_seqlen_q, max_seqlen_k, has_prefix, decoding, _ = batch.host_scalars.tolist()
    if decoding:  # a mixed step: the first sequence holds the tokens of the decode rows and has no keys
        host_scalars = torch.tensor([tokens - decoding, keys, max_seqlen_q, max_seqlen_k, has_prefix, 0, 0])
        prompts = batch._replace(
            block_table=batch.block_table[1:], cu_seqlens_q=batch.cu_seqlens_q[1:] - decoding,
            seq_lens=batch.seq_lens[1:], host_scalars=host_scalars,
        )  # fmt: skip
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        out[:decoding] = 0
        out[decoding:] = _flash_prefill(varlen, q[decoding:], k[decoding:], v[decoding:], prompts, params)
        return out
    if has_prefix:
        cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        k, v = (gather_paged_kv(cache, batch.block_table, cu_seqlens_k, keys) for cache in batch[:2])
    else:
        cu_seqlens_k, k, v = batch.cu_seqlens_q, k[:tokens], v[:tokens].contiguous()
    seqlens = VarlenSeqlens(batch.cu_seqlens_q, cu_seqlens_k, max(max_seqlen_q, MAX_SEQLEN_Q_FLOOR), max_seqlen_k)
    result = varlen(q[:tokens], k, v, seqlens, params)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    out[tokens:] = 0
    if params.sinks is None:
        out[:tokens] = result.out
    else:
        share = torch.sigmoid(result.log_sum_exp.T - params.sinks.float())  # [tokens, heads]
        out[:tokens] = (result.out * share[..., None]).to(q.dtype)
    return out


def _paged_prefill(
    paged_prefill: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, params: AttentionParams
) -> Tensor:
    return paged_prefill(q, *batch[:5], *params[:4], kv_scales=params.kv_scales)


def _triton_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: DecodeMetadata, params: AttentionParams,
    splits: int, cos: Tensor | None, sin: Tensor | None, norms: HeadNorms | None, out: Tensor | None,
) -> Tensor:  # fmt: skip
    return decode.paged_decode(
        q, k, v, k_cache, v_cache, rows.block_table, rows.seq_lens, rows.split_counters, *params[:4], splits,
        cos, sin, out, params.kv_scales, norms,
    )  # fmt: skip


def _triton_mixed(
    q: Tensor, k: Tensor, v: Tensor, prompts: PagedBatch, rows: DecodeMetadata, prefill_counters: Tensor,
    params: AttentionParams, splits: int,
) -> Tensor:  # fmt: skip
    return mixed.paged_mixed(
        q, k, v, *prompts[:5], rows.block_table, rows.seq_lens, rows.split_counters, prefill_counters,
        *params[:4], splits, params.kv_scales,
    )  # fmt: skip


def _reference_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: DecodeMetadata, params: AttentionParams,
    splits: int, cos: Tensor | None, sin: Tensor | None, norms: HeadNorms | None, out: Tensor | None,
) -> Tensor:  # fmt: skip
    dtype = q.dtype
    if norms is not None:
        q, k = (reference.normalise_heads(states, norm, norms.eps) for states, norm in ((q, norms.q), (k, norms.k)))
    if cos is not None and sin is not None:
        q, k = (reference.apply_rotary(states, cos, sin).to(dtype) for states in (q, k))
    return reference.paged_decode(
        q, k, v, k_cache, v_cache, rows.block_table, rows.seq_lens, *params[:4], out, params.kv_scales
    )


PrefillFunction = Callable[[Tensor, Tensor, Tensor, PagedBatch, AttentionParams], Tensor]
# The last arguments are cos and sin (see `reference.apply_rotary`), the norms before RoPE, and `out`: if given, it is
# written and returned, and rows of length 0 keep their contents.
DecodeFunction = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, DecodeMetadata, AttentionParams, int,
     Tensor | None, Tensor | None, HeadNorms | None, Tensor | None], Tensor,
]  # fmt: skip
MixedFunction = Callable[[Tensor, Tensor, Tensor, PagedBatch, DecodeMetadata, Tensor, AttentionParams, int], Tensor]
WriteKVFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]


class Implementation(NamedTuple):
    """The functions of one backend; None for an op that it does not implement. For `mixed`, the other two then run."""

    prefill: PrefillFunction | None = None
    decode: DecodeFunction | None = None
    write_kv: WriteKVFunction | None = None
    mixed: MixedFunction | None = None


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(
        partial(_paged_prefill, reference.paged_prefill), _reference_decode, reference.write_kv
    ),
    "triton": Implementation(
        partial(_paged_prefill, prefill.paged_prefill), _triton_decode, prefill.write_kv, _triton_mixed
    ),
    "torch-flash": Implementation(partial(_flash_prefill, _torch_flash)),
    "flash-attn-2": Implementation(partial(_flash_prefill, _flash_attn_2)),
    "flash-attn-4": Implementation(partial(_flash_prefill, _flash_attn_4)),
}
