"""The implementations behind the ops: reference, Triton, torch's FlashAttention, and the flash-attn packages 2 to 4.

Every FlashAttention is used through one adapter, `VarlenAttention`: packed queries and packed keys in, output and log-sum-exp
out. A prompt's first chunk has its keys at hand; a later chunk gathers its pages into a packed copy first, which
costs one read of the prefix and spares four packages' different ideas of a page table (FA2 wants pages of 256 slots;
torch 2.11 knows none). Attention sinks need no support in the kernel: a sink only adds to the softmax's denominator,
so the output is scaled by sigmoid(log_sum_exp - sink).

Packages are imported at the first call: FlashAttention-4 takes 5 to 10 s to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.attention import reference
from tcdeploy.torch_compat.torch_flash import flash_attention_forward

# Told that no sequence has more than one query, FlashAttention-2 folds the heads of a group into queries and reads as
# many tokens as there are sequences; ours may be padding without any.
MIN_MAX_SEQLEN_Q = 2


class AttentionParams(NamedTuple):
    """How scores are made: see `reference.paged_decode`."""

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None

    @property
    def window_sizes(self) -> tuple[int, int] | None:
        """(left, right) as FlashAttention counts them: the keys beside the query's own."""
        return (self.window - 1, 0) if self.window else None


class PagedBatch(NamedTuple):
    """The paged cache and the batch's place in it: see `reference.paged_prefill`; host_scalars as in ops.HOST_SCALARS."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    host_scalars: Tensor


class PagedDecodeBatch(NamedTuple):
    """The paged cache, each sequence's place in it, and the counters of decode: see `ops.decode_attention`."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    split_counters: Tensor


class RotaryCosSin(NamedTuple):
    """What decode has yet to turn queries and keys by: see `reference.apply_rotary`."""

    cos: Tensor
    sin: Tensor


class VarlenSeqlens(NamedTuple):
    """Where each sequence's queries and keys start; the lengths are the longest of any sequence."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class VarlenResult(NamedTuple):
    out: Tensor  # [tokens, heads, head_dim]
    log_sum_exp: Tensor  # [heads, tokens]


VarlenAttention = Callable[[Tensor, Tensor, Tensor, VarlenSeqlens, AttentionParams], VarlenResult]


def _torch_flash(q: Tensor, k: Tensor, v: Tensor, seqlens: VarlenSeqlens, params: AttentionParams) -> VarlenResult:
    """FlashAttention-2 as torch ships it (aten::_flash_attention_forward); it has no soft-capping."""
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


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor, seqlens: VarlenSeqlens, params: AttentionParams) -> VarlenResult:
    from flash_attn_interface import flash_attn_varlen_func

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
    """The sequences' slots one after another: cache [blocks, block_size, heads, dim] -> [keys, heads, dim]."""
    block_size = cache.shape[1]
    index = torch.arange(keys, device=cache.device)
    row = torch.searchsorted(cu_seqlens_k, index, right=True) - 1
    offset = index - cu_seqlens_k[row]
    slot = block_table[row, offset // block_size].long() * block_size + offset % block_size
    return cache.flatten(0, 1).index_select(0, slot)


def _flash_prefill(
    varlen: VarlenAttention, q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, params: AttentionParams
) -> Tensor:
    """Queries [tokens, heads, head_dim] over k and v at hand, or over the gathered pages where there is a prefix."""
    tokens, keys, max_seqlen_q, max_seqlen_k, has_prefix = batch.host_scalars.tolist()
    if has_prefix:
        cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        k, v = (
            gather_paged_kv(cache, batch.block_table, cu_seqlens_k, keys) for cache in (batch.k_cache, batch.v_cache)
        )
    else:
        cu_seqlens_k, k, v = batch.cu_seqlens_q, k[:tokens], v[:tokens].contiguous()
    seqlens = VarlenSeqlens(batch.cu_seqlens_q, cu_seqlens_k, max(max_seqlen_q, MIN_MAX_SEQLEN_Q), max_seqlen_k)
    found = varlen(q[:tokens], k, v, seqlens, params)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    if params.sinks is None:
        out[:tokens] = found.out
    else:
        share = torch.sigmoid(found.log_sum_exp.T - params.sinks.float())  # [tokens, heads]
        out[:tokens] = (found.out * share[..., None]).to(q.dtype)
    return out


def _triton_prefill(q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, params: AttentionParams) -> Tensor:
    from tcdeploy.attention import prefill

    return prefill.paged_prefill(q, *batch[:5], *params)


def _reference_prefill(q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, params: AttentionParams) -> Tensor:
    return reference.paged_prefill(q, *batch[:5], *params)


def _triton_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PagedDecodeBatch,
    params: AttentionParams,
    splits: int,
    rotary: RotaryCosSin | None,
) -> Tensor:
    from tcdeploy.attention import decode

    return decode.paged_decode(q, k, v, *batch, *params, splits, *(rotary or ()))


def _reference_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PagedDecodeBatch,
    params: AttentionParams,
    splits: int,
    rotary: RotaryCosSin | None,
) -> Tensor:
    if rotary:
        q, k = reference.apply_rotary(q, *rotary), reference.apply_rotary(k, *rotary)
    return reference.paged_decode(q, k, v, *batch[:4], *params)


def _triton_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    from tcdeploy.attention import kv_write

    kv_write.write_kv(k, v, k_cache, v_cache, slot_mapping)


def _reference_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    k_cache.flatten(0, 1)[slot_mapping] = k
    v_cache.flatten(0, 1)[slot_mapping] = v


PREFILL_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, PagedBatch, AttentionParams], Tensor]] = {
    "reference": _reference_prefill,
    "triton": _triton_prefill,
    "torch-flash": functools.partial(_flash_prefill, _torch_flash),
    "flash-attn-2": functools.partial(_flash_prefill, _flash_attn_2),
    "flash-attn-3": functools.partial(_flash_prefill, _flash_attn_3),
    "flash-attn-4": functools.partial(_flash_prefill, _flash_attn_4),
}
DECODE_BACKENDS: dict[
    str, Callable[[Tensor, Tensor, Tensor, PagedDecodeBatch, AttentionParams, int, RotaryCosSin | None], Tensor]
] = {
    "reference": _reference_decode,
    "triton": _triton_decode,
}
KV_WRITE_BACKENDS = {"reference": _reference_write, "triton": _triton_write}
