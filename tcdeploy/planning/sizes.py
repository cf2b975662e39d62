"""Decides context, buckets, batch sizes, block size and KV memory. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from tcdeploy.errors import UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.decision import Decisions, PlanInputs
from tcdeploy.planning.environment import DYNAMIC_SIZES
from tcdeploy.planning.memory import (
    MIN_SNAPSHOT_TOKENS,
    TYPICAL_SEQUENCE_TOKENS,
    CacheDemand,
    KVSize,
    Workspace,
    bytes_per_slot,
    count_affordable_blocks,
    gib,
    predict_workspace,
    size_kv_cache,
)
from tcdeploy.planning.recipe import Attention, Graphs, Recipe

DEFAULT_PREFILL_BUCKETS = (128, 512, 2048)
# Decode buckets on a GPU, up to what the KV cache holds. Each adds 4 to 7 s to a cold start of an 8B model on an H100,
# and 0.7 s to a warm one. A step of one row already reads all weights: with 1, 4 and 16 rows it takes 5.4, 5.6 and 5.9
# ms there, so sizes between them would save 6% at most. With 32, 128 and 256 rows it takes 6.4, 9.8 and 13.9 ms; 60%
# of the difference is attention, which unused rows do not have. In simulated traffic, padding takes 1.0 to 3.5% of the
# GPU's time, and no further size saves more than 1.3% (docs/performance-log.md, "Padding").
GPU_BATCH_SIZES = (1, 4, 16, 32, 64, 128, 256)
CPU_BATCH_SIZES = (1, 4)
MIN_GPU_BATCH_SIZES = 2  # of GPU_BATCH_SIZES, however little memory there is
# Tokens of the longest sequence, for models without attention whose config has no limit, such as Mamba-2.
DEFAULT_CONTEXT_WITHOUT_ATTENTION, MAX_CONTEXT_WITHOUT_ATTENTION = 32768, 1 << 20
MIN_PREFILL_SEQUENCES, TOKENS_PER_PREFILL_SEQUENCE = 8, 512
DYNAMIC_MIN_SIZE = 2  # torch specialises sizes 0 and 1, so a dynamic program starts at 2
BLOCK_SIZE = 16

# (up to this number of tokens, distance between two sizes). If all token counts from 160 to 2,048 are equally frequent,
# 2.5% of the computed tokens are padding.
GRAPH_SIZE_STEPS = ((512, 32), (2048, 64), (8192, 256))
LARGEST_GRAPH_SIZE_STEP = 1024
# Without graphs, steps of a dynamic program are not padded. Predictions of their time round up to a multiple of this.
DYNAMIC_STEP_TOKENS = 16
# Mixed steps are captured for a few numbers of row slots only. Unused row slots take little time: a step of 512 tokens
# took 14.0 ms with 32 and with 128 row slots, and 14.3 ms with 256 (8B model, H100). Each number of row slots needs a
# graph at almost every size.
MIN_ROW_SLOTS = 32
ROW_SLOTS_FACTOR = 4  # between one number of row slots and the next


@functools.cache  # called in each prefill step
def graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """The token counts at which a program with a symbolic size is captured, ascending, up to `max_tokens`."""
    sizes: list[int] = []
    size = 0
    while size < max_tokens:
        size += next((step for limit, step in GRAPH_SIZE_STEPS if size < limit), LARGEST_GRAPH_SIZE_STEP)
        sizes.append(min(size, max_tokens))
    return tuple(sizes)


@functools.cache  # called in each prefill step
def mixed_row_slots(batch_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of decode rows that prefill steps have outputs for, ascending.

    The first is 0, for steps without decode rows. The others are decode batch sizes of at least MIN_ROW_SLOTS, each at
    least ROW_SLOTS_FACTOR times the previous one, and the largest batch size.
    """
    row_slots = [0]
    for size in batch_sizes:
        if size >= max(MIN_ROW_SLOTS, ROW_SLOTS_FACTOR * row_slots[-1]) or size == batch_sizes[-1]:
            row_slots.append(size)
    return tuple(row_slots)


def graph_shapes(sizes: tuple[int, ...], row_slots: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(tokens, row slots) of the graphs of a prefill bucket, ascending, without those that no step can use.

    A mixed step uses the smallest number of row slots that holds its decode rows, and has at least one prompt token. So
    if 128 and 256 are consecutive numbers of row slots, a graph with 256 has at least 130 tokens.
    """
    min_tokens = (1, *(fewer_slots + 2 for fewer_slots in row_slots))
    shapes = itertools.product(sizes, zip(row_slots, min_tokens, strict=False))
    return tuple((size, slots) for size, (slots, least) in shapes if size >= least)


def capture_sizes(bucket_size: int, is_dynamic: bool) -> tuple[int, ...]:
    """The token counts of the graphs of a captured prefill bucket, ascending."""
    return graph_sizes(bucket_size) if is_dynamic else (bucket_size,)


def count_graphs(demand: CacheDemand) -> int:
    """The number of CUDA graphs of all buckets once every size is captured."""
    row_slots = mixed_row_slots(demand.batch_sizes) if demand.mixed_steps else (0,)
    prefill = sum(len(graph_shapes(sizes, row_slots)) for sizes in demand.captured_sizes)
    return prefill + len(demand.batch_sizes) * demand.captures_decode


def max_prefill_sequences(max_prefill_tokens: int) -> int:
    """The number of prompts that a prefill step may pack if the largest bucket has `max_prefill_tokens` tokens.

    Programs contain this number, so it is the same for all common bucket sizes: 8 up to 4,096 tokens.
    """
    return max(MIN_PREFILL_SEQUENCES, max_prefill_tokens // TOKENS_PER_PREFILL_SEQUENCE)


def decide_context(recipe: Recipe, architecture: Architecture, decisions: Decisions) -> int:
    limit = architecture.rope_limit or architecture.context or MAX_CONTEXT_WITHOUT_ATTENTION
    if recipe.context is not None and not 2 <= recipe.context <= limit:
        message = f"context {recipe.context} is not between 2 and {limit}, the longest that this model supports"
        raise UsageError(message, f"--context {limit}")
    if recipe.context is not None:
        return decisions.add("context", recipe.context, "requested")
    if architecture.rope_limit:
        reason = "longer sequences would change the rotary factors of the whole batch (longrope, dynamic rope)"
        return decisions.add("context", limit, reason, is_fallback=limit < architecture.context)
    if not architecture.context:
        reason = f"the config has no maximum, and no layer attends: --context may be up to {limit}"
        return decisions.add("context", DEFAULT_CONTEXT_WITHOUT_ATTENTION, reason)
    return decisions.add("context", limit, "the model's maximum")


def decide_demand(
    inputs: PlanInputs,
    graphs: Graphs,
    attention: Attention,
    lengths: tuple[int, ...],
    context: int,
    mixed_steps: bool,
    decisions: Decisions,
) -> CacheDemand:
    """Decide block size and batch sizes. `attention`: of prefill. `lengths`: of the prefill buckets."""
    is_captured = graphs != "none" and BACKENDS[attention].is_capturable
    is_dynamic = inputs.recipe.shapes == "dynamic"
    demand = CacheDemand(
        context=context,
        batch_sizes=(),
        max_prefill_tokens=lengths[-1],
        captured_sizes=tuple(capture_sizes(length, is_dynamic) for length in lengths) if is_captured else (),
        captures_decode=graphs != "none",
        mixed_steps=mixed_steps,
        block_size=_decide_block_size(inputs.recipe, decisions),
    )
    return demand._replace(batch_sizes=decide_batch_sizes(inputs, demand, decisions))


def decide_batch_sizes(inputs: PlanInputs, demand: CacheDemand, decisions: Decisions) -> tuple[int, ...]:
    """The requested sizes, or the default, which on a GPU depends on the memory for KV, and not on `demand`'s."""
    requested = inputs.recipe.batch_sizes
    if requested is not None:
        _check_ascending("batch sizes", requested)
        sizes, reason = requested, "requested"
    elif inputs.device == "cpu":
        sizes, reason = CPU_BATCH_SIZES, "default on a CPU"
    else:
        sizes, reason = _batch_sizes_that_fit(inputs, demand)
    decisions.add("decode buckets", _comma_separated(sizes), reason)
    return sizes


def _batch_sizes_that_fit(inputs: PlanInputs, demand: CacheDemand) -> tuple[tuple[int, ...], str]:
    """The longest beginning of GPU_BATCH_SIZES whose largest batch the KV cache holds, and why.

    More sizes need more workspace and leave fewer KV blocks, so each beginning is compared with its own blocks.
    """
    typical_tokens = min(TYPICAL_SEQUENCE_TOKENS, demand.context)
    blocks_per_sequence = -(-typical_tokens // demand.block_size)
    for count in range(len(GPU_BATCH_SIZES), MIN_GPU_BATCH_SIZES - 1, -1):
        sizes = GPU_BATCH_SIZES[:count]
        sized = demand._replace(batch_sizes=sizes)
        blocks = count_affordable_blocks(inputs, sized, _predict_workspace(inputs, sized))
        blocks = blocks if inputs.recipe.kv_blocks is None else min(blocks, inputs.recipe.kv_blocks)
        held = (blocks - 1) // blocks_per_sequence  # one block is for padding
        if held >= sizes[-1]:
            break
    if held < sizes[-1]:
        return sizes, f"the smallest default; the KV cache holds {max(held, 0)} sequences of {typical_tokens} tokens"
    few_sizes = "few sizes below 16, where more rows add little time to a step"
    return sizes, f"the KV cache holds {held} sequences of {typical_tokens} tokens; {few_sizes}"


def decide_shapes(
    inputs: PlanInputs, graphs: Graphs, attention: Attention, context: int, decisions: Decisions
) -> PlanInputs:
    """The inputs with the requested or default `shapes`; "bucket" if torch cannot mark dynamic sizes.

    `attention`: of prefill.
    """
    recipe = inputs.recipe
    captures_prefill = graphs == "step" and BACKENDS[attention].is_capturable
    is_dynamic_by_default = captures_prefill and recipe.buckets is None and context > DYNAMIC_MIN_SIZE
    shapes = recipe.shapes or ("dynamic" if is_dynamic_by_default else "bucket")
    if shapes == "dynamic" and DYNAMIC_SIZES in dict(inputs.environment.missing_internals):
        reason = f"this torch cannot mark dynamic sizes (see the warning '{DYNAMIC_SIZES}')"
        shapes = decisions.add("shapes", "bucket", reason, is_fallback=True)
    return dataclasses.replace(inputs, recipe=dataclasses.replace(recipe, shapes=shapes))


def decide_prefill_lengths(recipe: Recipe, context: int, decisions: Decisions) -> tuple[int, ...]:
    """Ascending lengths in tokens; with dynamic shapes only the last, whose program serves all lengths up to it."""
    if recipe.buckets is None:
        lengths = tuple(length for length in DEFAULT_PREFILL_BUCKETS if length <= context) or (context,)
        reason = f"default, up to the context of {context}"
    else:
        lengths, reason = recipe.buckets, "requested"
        _check_ascending("buckets", lengths)
        if lengths[-1] > context:
            message = f"bucket {lengths[-1]} exceeds the context of {context} tokens"
            raise UsageError(message, "remove that bucket: longer prompts are prefilled in chunks")
    if recipe.shapes != "dynamic":
        decisions.add("prefill buckets", _comma_separated(lengths), reason)
        return lengths
    if lengths[-1] <= DYNAMIC_MIN_SIZE:
        message = f"a dynamic range cannot end at {lengths[-1]} tokens: it starts at {DYNAMIC_MIN_SIZE}"
        raise UsageError(message, "--buckets 512 --shapes dynamic")
    reason = "one program with a symbolic size, captured at many sizes on a GPU"
    decisions.add("prefill buckets", f"{DYNAMIC_MIN_SIZE}-{lengths[-1]}", reason)
    return lengths[-1:]


def _check_ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or values[0] < 1:
        raise UsageError(f"{name} must be 1 or more, not {_comma_separated(values) or 'none'}", "such as 1,4,16")
    if any(low >= high for low, high in zip(values, values[1:], strict=False)):
        message = f"{name} {_comma_separated(values)} are not in ascending order"
        raise UsageError(message, _comma_separated(tuple(sorted(set(values)))))


def _decide_block_size(recipe: Recipe, decisions: Decisions) -> int:
    size = BLOCK_SIZE if recipe.block_size is None else recipe.block_size
    if size < 16 or size & (size - 1):
        raise UsageError(f"block size {size} is not a power of two of at least 16", "--block-size 16")
    reason = "the smallest that the kernels support" if recipe.block_size is None else "requested"
    return decisions.add("block size", size, reason)


def decide_memory(inputs: PlanInputs, demand: CacheDemand, decisions: Decisions) -> tuple[int, KVSize]:
    """(workspace bytes while serving, 0 on a CPU; KV size). Replaces the context decision if memory shortens it."""
    workspace = _predict_workspace(inputs, demand)
    kv = size_kv_cache(inputs, demand, workspace)
    if kv.context < demand.context:
        decisions[:] = [decision for decision in decisions if decision.name != "context"]
        reason = f"as many tokens as the KV cache holds; the model's maximum is {demand.context}"
        decisions.add("context", kv.context, reason, is_fallback=True)
    decisions.add("KV blocks", f"{kv.blocks} ({gib(kv.kv_bytes)})", kv.reason)
    if kv.slots:
        _explain_slots(inputs, demand, kv, decisions)
    if inputs.device == "cpu":
        return 0, kv
    sizes = {name.removesuffix("_bytes").replace("_", " "): gib(value) for name, value in workspace._asdict().items()}
    parts = ", ".join(f"{name} {value}" for name, value in sizes.items())
    decisions.add("workspace", gib(workspace.serving_bytes), f"predicted: {parts} (released after warm-up)")
    return workspace.serving_bytes, kv


def _explain_slots(inputs: PlanInputs, demand: CacheDemand, kv: KVSize, decisions: Decisions) -> None:
    bytes_each = bytes_per_slot(inputs)
    reason = "one for each sequence of the largest batch, and one for padding"
    decisions.add("state slots", f"{kv.slots} ({gib(kv.slots * bytes_each)})", reason)
    state = f"a snapshot of the state at the end of a prefix takes {gib(bytes_each)}"
    if kv.snapshots:
        value = f"{kv.snapshots} snapshots ({gib(kv.snapshots * bytes_each)})"
        decisions.add("prefix reuse", value, f"{state}; for prefixes of {MIN_SNAPSHOT_TOKENS} tokens or more")
    elif demand.context <= MIN_SNAPSHOT_TOKENS:
        reason = f"{state}, which does not pay off with a context of {MIN_SNAPSHOT_TOKENS} tokens or less"
        decisions.add("prefix reuse", "off", reason)
    else:
        reason = f"{state}; the KV blocks leave no memory for one, or are too few to reuse a prefix"
        decisions.add("prefix reuse", "off", reason)


def _predict_workspace(inputs: PlanInputs, demand: CacheDemand) -> Workspace:
    prefill_sequences, dtype = max_prefill_sequences(demand.max_prefill_tokens), inputs.dtypes.compute
    return predict_workspace(inputs.architecture, dtype, demand, prefill_sequences, count_graphs(demand))


def _comma_separated(values: tuple[int, ...]) -> str:
    return ",".join(str(value) for value in values)
