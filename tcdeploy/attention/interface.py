"""The bridge to transformers: one attention function, registered with the AttentionInterface.

No modelling code is touched. Each attention module is given a `LayerBinding`, from which the function takes the
layer's own K and V and the batch's facts. They hang on the module because that reaches every model; keyword arguments
passed through the model's forward are dropped by some layers on the way. To torch.compile the tensors of a binding
are inputs of the program, so all layers share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.attention import ops
from tcdeploy.attention.kv_cache import LayerKV
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.variants import DEFAULT, Variant
from tcdeploy.torch_compat.mark_dynamic import mark_dynamic

ATTN_IMPLEMENTATION = "tcdeploy"
UNBOUNDED_CONTEXT_TOKENS = 1 << 20  # tokens: programs do not depend on how long sequences may get


@dataclass
class AttentionMetadata:
    """The batch facts of the running step; one object, shared by all layers, refilled for each step.

    Both kinds of step read block_table [sequences, width] and seq_lens [sequences], int32. Prefill also reads
    slot_mapping [tokens] int64, cu_seqlens_q [sequences + 1] int32 and host_scalars [5] int64 on the CPU (see
    ops.HOST_SCALARS); decode, whose slots follow from the lengths, arrivals [sequences, kv_heads] int32, all zeros,
    and decode_splits. All layers may share one arrivals, of the most kv heads that a layer has.
    """

    is_prefill: bool
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    host_scalars: Tensor
    split_counters: Tensor
    decode_splits: int
    variant: Variant = DEFAULT  # how the running bucket's programs are made (compiler/programs.py)
    prefill_backend: str = ""  # none: whoever runs a prefill step names it (engine/runner.py)
    last_token_rows: Tensor | None = None  # [outputs] int64: the only rows of the last layer that this step wants

    def show(self, other: AttentionMetadata) -> None:
        """Take over the tensors of `other`: the object stays the one that all layers hold."""
        vars(self).update(vars(other))


@dataclass
class LayerBinding:
    """What an attention module carries for us, as its attribute `tcdeploy`."""

    k_cache: Tensor  # [blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor
    decode_backend: str
    step: AttentionMetadata


def empty_attention_metadata(plan: Plan, architecture: Architecture) -> AttentionMetadata:
    """A step of nothing, for the layers to hold until the first one is shown to them; its arrivals serve all steps."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32, device: str = plan.device) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    kv_heads = max(spec.kv_heads for spec in architecture.attention_layers)
    split_counters = zeros(plan.decode_buckets[-1].size + 1, kv_heads)
    mark_dynamic(split_counters, 0)  # programs do not depend on the largest batch
    return AttentionMetadata(
        is_prefill=True,
        slot_mapping=zeros(1, dtype=torch.int64),
        block_table=zeros(1, 2),
        seq_lens=zeros(1),
        cu_seqlens_q=zeros(2),
        host_scalars=zeros(5, dtype=torch.int64, device="cpu"),
        decode_splits=1,
        split_counters=split_counters,
    )


def default_splits(batch: int, split_counters: Tensor) -> int:
    """Parts that decode cuts each of `batch` sequences into, for this GPU; it does not follow the context."""
    if not split_counters.is_cuda:
        return 1
    num_sms = torch.cuda.get_device_properties(split_counters.device).multi_processor_count
    return ops.decode_splits(batch, split_counters.shape[1], UNBOUNDED_CONTEXT_TOKENS, num_sms)


def register_attention() -> None:
    """Make `attn_implementation="tcdeploy"` known to transformers. Masks stay off: an unknown name builds none."""
    ALL_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, paged_attention)


def bind_attention(
    model: nn.Module, architecture: Architecture, cache: list[LayerKV], plan: Plan, step: AttentionMetadata
) -> None:
    """Give each attention module its K, V and decode backend, and the `step` that is refilled before each pass."""
    for spec, layer_kv in zip(architecture.attention_layers, cache, strict=True):
        binding = LayerBinding(layer_kv.k, layer_kv.v, plan.decode_attention, step)
        model.get_submodule(spec.path).tcdeploy = binding  # type: ignore[assignment]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, tokens, head_dim] and so on -> [1, tokens, heads, v_head_dim].

    The probe has refused every model that passes more than this.
    """
    binding: LayerBinding = module.tcdeploy  # type: ignore[assignment]
    step = binding.step
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [tokens, heads, head_dim]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    window, cap = sliding_window or 0, softcap or 0.0
    if step.is_prefill:
        q, k = q.contiguous(), k.contiguous()
        if v.stride(-1) != 1:  # usually a slice of its product, which no rotation has copied
            v = v.contiguous()
        ops.kv_write(k, v, binding.k_cache, binding.v_cache, step.slot_mapping, binding.decode_backend)
        out = ops.prefill_attention(
            q, k, v, binding.k_cache, binding.v_cache, step.block_table, step.cu_seqlens_q, step.seq_lens,
            step.host_scalars, s_aux, scale, window, cap, step.prefill_backend,
        )  # fmt: skip
    else:
        out = ops.decode_attention(
            q, k, v, binding.k_cache, binding.v_cache, step.block_table, step.seq_lens, step.split_counters, s_aux,
            scale, window, cap, step.decode_splits, binding.decode_backend,
        )  # fmt: skip
    return out.unsqueeze(0), None
