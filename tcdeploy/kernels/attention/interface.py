"""The bridge to transformers: one attention function, registered with the AttentionInterface.

Modelling code is neither patched nor copied. Each attention module carries a `LayerBinding` with the layer's own K and
V caches and the holder of the running step. To torch.compile the tensors of a binding are inputs of the program, so all
layers share one program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.kernels.attention import ops
from tcdeploy.kernels.state.layer_state import LayerBinding

ATTN_IMPLEMENTATION = "tcdeploy"


def register_attention() -> None:
    """Register `attn_implementation="tcdeploy"` with transformers, which builds no mask for a name it does not know."""
    ALL_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, paged_attention)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: query [1, heads, tokens, head_dim] -> [1, tokens, heads, v_head_dim].

    key and value are [1, kv_heads, tokens, dim]. The probe refuses models that pass other arguments with an effect.
    """
    binding: LayerBinding = module.tcdeploy  # type: ignore[assignment]
    step = binding.step_holder.step
    assert step is not None, "the runner assigns the step before each forward pass"
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [tokens, heads, head_dim]
    caches, config = binding.state, step.attention_config
    kv_scales = module.kv_scales if caches[0].dtype == torch.float8_e4m3fn else None  # convert/kv_scales.py
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    params = (s_aux, scale, sliding_window or 0, softcap or 0.0)
    prefill, decode = step.attention_metadata
    if prefill is None:
        assert decode is not None
        out = ops.decode_attention(
            q, k, v, *caches, decode.block_table, decode.seq_lens, decode.split_counters,
            *params, config.decode_splits, config.decode_backend, kv_scales=kv_scales,
        )  # fmt: skip
        return out.unsqueeze(0), None
    q, k = q.contiguous(), k.contiguous()
    if v.stride(-1) != 1:  # usually a slice of the packed projection, which the rotary embedding has not copied
        v = v.contiguous()
    # The tokens of decode rows map to the padding slot: the decode kernel writes their K and V.
    ops.kv_write(k, v, *caches, prefill.slot_mapping, config.decode_backend, kv_scales)
    prompts = (prefill.block_table, prefill.cu_seqlens_q, prefill.seq_lens, prefill.host_scalars)
    if decode is None:
        out = ops.prefill_attention(q, k, v, *caches, *prompts, *params, config.prefill_backend, kv_scales)
    else:
        out = ops.mixed_attention(
            q, k, v, *caches, *prompts, decode.block_table, decode.seq_lens, decode.split_counters,
            *params, config.prefill_backend, config.decode_backend, kv_scales,
        )  # fmt: skip
    return out.unsqueeze(0), None
