"""What attention reads in one forward pass, and the object through which the layers find it.

A `Step` is built for each forward pass that is not a replay of a CUDA graph; its tensors are the static buffers of the
bucket. `AttentionMetadata` holds device tensors, which are inputs of the compiled programs, and `AttentionConfig` the
choices that a program is specialised on. The layers find the step in a `StepHolder`, which every attention module
holds. Keyword arguments of the model's forward would be the plainer way, but some layers drop them.

torch.compile reads the holder's attribute like any other, so the tensors of a step become inputs of the program, and
all layers share one program. `Step` is not a frozen dataclass on purpose: Dynamo guards on every field of a frozen
dataclass, and two variants that share a program would then compile it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.kernels.attention.splits import num_prefill_counters
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic

PADDING_SLOT = 0  # in the KV cache: K and V of padding tokens are written there, and no sequence uses its block


class PrefillMetadata(NamedTuple):
    """Tensors of packed prompts. Lengths count tokens; `sequences` is the number of prompts that a step may pack."""

    slot_mapping: Tensor  # [tokens] int64: the KV slot of each token
    block_table: Tensor  # [sequences, width] int32
    seq_lens: Tensor  # [sequences] int32: cached tokens and new tokens; 0 for padding
    cu_seqlens_q: Tensor  # [sequences + 1] int32
    host_scalars: Tensor  # [7] int64 on the CPU, see ops.HOST_SCALARS
    slots: Tensor | None = None  # [sequences] int32: see Plan.slots; None if no layer keeps state in slots


class DecodeMetadata(NamedTuple):
    """Tensors of decode rows. KV slots follow from the lengths, so there is no slot mapping."""

    block_table: Tensor  # [rows, width] int32
    seq_lens: Tensor  # [rows] int32: the new token included; 0 for padding
    split_counters: Tensor  # [max batch + 1 or more, kv_heads] int32: see `make_split_counters`
    slots: Tensor | None = None  # [rows] int32: as in PrefillMetadata


class HeadNorms(NamedTuple):
    """The RMSNorms of query and key heads before RoPE: their weights [head_dim], and eps."""

    q: Tensor
    k: Tensor
    eps: float


class AttentionMetadata(NamedTuple):
    """What a step attends over; both are set in a mixed step.

    Its first tokens are then those of the decode rows, in order, which are a sequence of length 0 in `prefill`, and the
    tokens of the prompts follow. `decode` has all decode rows; the step uses the first `rows` (ops.HOST_SCALARS).
    """

    prefill: PrefillMetadata | None = None
    decode: DecodeMetadata | None = None


class AttentionConfig(NamedTuple):
    """The choices that the attention ops of a step take as constants."""

    prefill_backend: str
    decode_backend: str  # it also writes the K and V of prefill
    decode_splits: int  # programs that share each sequence's keys


def do_nothing() -> None:
    """The default of `Step.before_program`."""


@dataclass(eq=False)
class Step:
    """One forward pass: which bucket and variant run, and what attention reads. Not modified once it is built.

    `last_token_rows` [outputs] int64 are the rows that the last layer returns; None: all rows. `is_compiled`: whether
    modules run the step's programs, or their own code. `before_program` is called before each program of the step is
    launched, and may raise to abandon the step.
    """

    bucket: Bucket
    variant: Variant
    attention_metadata: AttentionMetadata
    attention_config: AttentionConfig
    last_token_rows: Tensor | None = None
    is_compiled: bool = True
    before_program: Callable[[], None] = do_nothing


class StepHolder:
    """Holds the step of the running forward pass; None outside of one, where modules run uncompiled."""

    def __init__(self) -> None:
        self.step: Step | None = None


def make_split_counters(plan: Plan, architecture: Architecture) -> Tensor:
    """Zeroed counters [max batch + 1 or more, kv_heads] int32, shared by all layers and buckets.

    Every launch leaves them at zero. The first max batch + 1 rows are for decode attention. With mixed steps, further
    rows are for the splits of prompts (kernels/attention/prefill.py).
    """
    kv_heads = max((spec.kv_heads for spec in architecture.attention_layers), default=1)
    rows = plan.decode_buckets[-1].size + 1
    if plan.mixed_steps:
        heads = max((spec.heads for spec in architecture.attention_layers), default=1)
        rows += -(-num_prefill_counters(heads, plan.max_prefill_sequences + 1) // kv_heads)
    counters = torch.zeros(rows, kv_heads, dtype=torch.int32, device=plan.device)
    mark_dynamic(counters, 0)  # programs must not depend on the largest batch
    return counters
