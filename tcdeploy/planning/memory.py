"""Sizes the KV cache and the state slots: arithmetic over bytes. Does not import torch.

Weights come first, then the workspace that running the model needs, and a state slot for each sequence of the largest
batch. Snapshots of slots get a share of what is left, and KV blocks the rest, but no more than the largest batch can
use at full context.
The workspace is predicted part by part before anything is loaded, and the manifest records the measured value after
warm-up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tcdeploy.errors import MemoryShortage, SpaceError, UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import PlanInputs
from tcdeploy.planning.recipe import DType

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES: dict[str, int] = {**DTYPE_BYTES, "float8_e4m3fn": 1}
# Fitted on an H100: Llama 3.1 8B with eight buckets took 1.41 GiB, and these constants predict 1.40
# (docs/performance-log.md).
CUDA_CONTEXT_BYTES = 1098 << 20  # CUDA context, kernel code of torch, cuBLAS and Triton, and fragmentation
CUBLAS_BYTES = 3 * (32 << 20)  # one workspace for each stream that runs GEMMs: eager, warm-up and graph capture
# Of one captured step, in the driver. On an H100, 14 graphs of 32 layers took 37 KiB per layer, and 89 graphs of 8
# layers 59 KiB.
GRAPH_BYTES_PER_LAYER = 44 << 10
PREFILL_INPUT_BYTES_PER_TOKEN = 4 * 8  # id, position, slot and source of a token, all int64 (engine/step/batch.py)
MAX_PROMPT_TOKENS = 2048  # of the prompts on which buckets are checked (engine/check/check_prompts.py)
MAX_CHECKED_ROWS = 16  # of a decode bucket, whose prompts are computed in one batch
CHECKED_BLOCKS = 3  # KV blocks of such a row
MAX_CHECKED_WINDOW = 8192  # tokens; no check sequence reaches beyond a larger sliding window
# Peak memory of the parity check's float32 reference pass, as a multiple of a step's activations for as many tokens.
PARITY_CHECK_FACTOR = 3.0
FLOAT32_COPIES = 2  # of a weight in a scheme, while the reference dequantises it: converted, and scaled
SAMPLING_BYTES_PER_LOGIT = 3  # per row and vocabulary entry: a count and a flag (engine/step/sampling.py)
TYPICAL_SEQUENCE_TOKENS = 1024  # prompt and answer, to decide how many sequences the KV cache holds
# A prompt is split where a snapshot is taken, so an additional step of few tokens reads all weights. With an 8B model
# on an H100, that takes as long as 220 tokens of a prompt: snapshots of 512 tokens pay off if half of them are reused.
MIN_SNAPSHOT_TOKENS = 512
MIN_LONE_SNAPSHOT_TOKENS = 4096  # if a prompt shares no prefix: the time to first token grows by about 5%
SNAPSHOT_FRACTION = 0.25  # of the memory for KV blocks and snapshots, at most
MAX_SNAPSHOTS_PER_SEQUENCE = 4  # of the largest batch
HOST_KV_FRACTION = 0.25  # of host memory beyond the weights, on a CPU


class CacheDemand(NamedTuple):
    """What the buckets require of memory: context and prefill in tokens, batch sizes in sequences, blocks in slots."""

    context: int
    batch_sizes: tuple[int, ...]
    max_prefill_tokens: int
    captured_sizes: tuple[tuple[int, ...], ...]  # for each captured prefill bucket, the token counts of its CUDA graphs
    captures_decode: bool  # as CUDA graphs
    mixed_steps: bool
    block_size: int

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.context // self.block_size)


class Workspace(NamedTuple):
    """Device memory beyond weights and KV, by use. `parity_check_bytes` is released after warm-up."""

    cuda_context_bytes: int
    activations_bytes: int
    decode_rows_bytes: int
    prefill_inputs_bytes: int
    logits_bytes: int
    graphs_bytes: int
    parity_check_bytes: int

    @property
    def serving_bytes(self) -> int:
        """What stays allocated while serving."""
        return sum(self) - self.parity_check_bytes


def predict_workspace(
    architecture: Architecture, compute_dtype: DType, demand: CacheDemand, max_prefill_sequences: int, num_graphs: int
) -> Workspace:
    """Predict the memory on a GPU beside weights and KV cache.

    Each decode bucket has its own logits; all prefill steps share one logits buffer. All steps share the memory for
    activations, which the largest step determines, and for the dense copy of a quantised weight. Each captured size of
    a prefill bucket has its own input buffers.
    num_graphs: CUDA graphs of all buckets once every size is captured.
    """
    token_bytes = architecture.peak_activation_elements * DTYPE_BYTES[compute_dtype]
    output_rows = sum(demand.batch_sizes) + max_prefill_sequences + demand.max_batch * demand.mixed_steps
    input_sizes = [size for sizes in demand.captured_sizes for size in sizes]
    table_bytes = demand.blocks_per_sequence * 4
    row_bytes = architecture.vocab_size * SAMPLING_BYTES_PER_LOGIT + table_bytes
    num_tables = len(input_sizes) * (max_prefill_sequences + demand.mixed_steps)
    return Workspace(
        cuda_context_bytes=CUDA_CONTEXT_BYTES + CUBLAS_BYTES,
        activations_bytes=demand.max_prefill_tokens * token_bytes
        + architecture.largest_scheme_elements * DTYPE_BYTES[compute_dtype],
        decode_rows_bytes=(demand.max_batch + 1) * row_bytes,
        prefill_inputs_bytes=sum(input_sizes) * PREFILL_INPUT_BYTES_PER_TOKEN + num_tables * table_bytes,
        logits_bytes=output_rows * architecture.vocab_size * DTYPE_BYTES[compute_dtype],
        graphs_bytes=num_graphs * architecture.num_layers * GRAPH_BYTES_PER_LAYER,
        parity_check_bytes=int(PARITY_CHECK_FACTOR * _reference_tokens(architecture, demand) * token_bytes)
        + FLOAT32_COPIES * architecture.largest_scheme_elements * DTYPE_BYTES["float32"],
    )


def checked_window(architecture: Architecture, context: int) -> int:
    """The largest sliding window that check sequences reach beyond, or 0."""
    windows = [spec.window for spec in architecture.attention_layers]
    return max((window for window in windows if window < min(context, MAX_CHECKED_WINDOW + 1)), default=0)


def _reference_tokens(architecture: Architecture, demand: CacheDemand) -> int:
    """Tokens of the largest pass over prompts on which buckets are checked."""
    num_forms = 2 if architecture.fp8_inputs else 1  # decode rows are checked with 16-bit and with FP8 inputs
    batched_tokens = num_forms * MAX_CHECKED_ROWS * CHECKED_BLOCKS * demand.block_size
    longest_prompt = min(demand.max_prefill_tokens, MAX_PROMPT_TOKENS)
    return max(longest_prompt, batched_tokens, checked_window(architecture, demand.context))


class KVSize(NamedTuple):
    """`context` is smaller than the demand's if the KV blocks hold fewer tokens."""

    blocks: int
    kv_bytes: int
    weight_bytes: int
    context: int
    reason: str
    slots: int
    snapshots: int
    slot_bytes: int  # of all slots, those of snapshots included


def size_kv_cache(inputs: PlanInputs, demand: CacheDemand, workspace: Workspace) -> KVSize:
    """Divide the memory that weights, workspace and slots leave into snapshots and KV blocks, one of them for padding.

    Raises MemoryShortage if the buckets or a requested context do not fit, SpaceError if more memory would not help,
    and UsageError for a `memory_fraction` outside of 0 to 1.
    """
    recipe, dtypes = inputs.recipe, inputs.dtypes
    weight_bytes = inputs.architecture.weight_bytes[dtypes.weight]
    block_bytes = _block_bytes(inputs, demand.block_size)
    min_blocks = max(demand.max_batch, -(-demand.max_prefill_tokens // demand.block_size)) + 1
    snapshots = _count_snapshots(inputs, demand, workspace, min_blocks)
    affordable_blocks = count_affordable_blocks(inputs, demand, workspace, snapshots)
    slot_bytes = _slot_bytes(inputs, demand)
    needed_bytes = max(min_blocks, recipe.kv_blocks or 0) * block_bytes + slot_bytes
    if affordable_blocks < 1:
        weights = f"{gib(weight_bytes)} of {dtypes.weight} weights"
        occupied = f"{weights} and {gib(slot_bytes)} of state slots" if slot_bytes else weights
        problem = f"{occupied} leave no memory for KV: {_describe_memory(inputs)}"
        hint = "use a smaller model, a smaller --dtype, or more memory"
        raise _shortage(inputs, workspace, needed_bytes, problem, hint)
    blocks, reason = _decide_kv_blocks(recipe.kv_blocks, affordable_blocks, demand)
    if not min_blocks <= blocks <= affordable_blocks:
        described = f"{blocks} KV blocks of {gib(block_bytes)}"
        problem = f"{described}: the buckets need {min_blocks}, memory holds {affordable_blocks}"
        hint = "use smaller --buckets and --batch-sizes, or more memory"
        if recipe.kv_blocks is not None and min_blocks <= affordable_blocks:
            hint = f"--kv-blocks N with {min_blocks} <= N <= {affordable_blocks}, or omit --kv-blocks"
        if recipe.kv_blocks is not None and recipe.kv_blocks < min_blocks:
            raise SpaceError(problem, hint)  # more memory would not help
        raise _shortage(inputs, workspace, needed_bytes, problem, hint)
    capacity = (blocks - 1) * demand.block_size
    if capacity < demand.context and recipe.context is not None:
        problem = f"context {recipe.context} exceeds the {capacity} tokens that the KV cache holds"
        if recipe.kv_blocks is not None:
            raise SpaceError(problem, f"--context {capacity}")
        context_bytes = (demand.blocks_per_sequence + 1) * block_bytes + slot_bytes
        raise _shortage(inputs, workspace, context_bytes, problem, f"--context {capacity}")
    if not block_bytes:
        reason += "; no layer keeps K and V, so blocks only count tokens"
    context, slots = min(demand.context, capacity), _count_slots(inputs, demand)
    slot_bytes += snapshots * bytes_per_slot(inputs)
    return KVSize(blocks, blocks * block_bytes, weight_bytes, context, reason, slots, snapshots, slot_bytes)


def _shortage(inputs: PlanInputs, workspace: Workspace, kv_bytes: int, problem: str, hint: str) -> MemoryShortage:
    """The error for a machine without memory for `kv_bytes`, slots included, beside weights and workspace."""
    weight_bytes, environment = inputs.architecture.weight_bytes[inputs.dtypes.weight], inputs.environment
    if inputs.device == "cpu":
        needed_bytes = weight_bytes + math.ceil(kv_bytes / HOST_KV_FRACTION)
        return MemoryShortage(problem, hint, needed_bytes, environment.host_memory_bytes)
    needed_bytes = math.ceil((weight_bytes + sum(workspace) + kv_bytes) / inputs.recipe.memory_fraction) + 1
    return MemoryShortage(problem, hint, needed_bytes, environment.gpu_memory_bytes)


def count_affordable_blocks(inputs: PlanInputs, demand: CacheDemand, workspace: Workspace, snapshots: int = 0) -> int:
    """KV blocks that fit into the memory beside weights, workspace and slots; 0 or less if these fill it.

    Blocks without bytes, of a model that keeps no K and V, fit in any number; then as many as can be used.

    Raises UsageError for a `memory_fraction` outside of 0 to 1.
    """
    kv_bytes = _kv_bytes(inputs, demand, workspace) - snapshots * bytes_per_slot(inputs)
    if block_bytes := _block_bytes(inputs, demand.block_size):
        return kv_bytes // block_bytes
    return max(_usable_blocks(demand), inputs.recipe.kv_blocks or 0) if kv_bytes >= 0 else 0


def _kv_bytes(inputs: PlanInputs, demand: CacheDemand, workspace: Workspace) -> int:
    """The memory for KV blocks and snapshots, which weights, workspace and slots leave; negative if they exceed it."""
    fraction, environment = inputs.recipe.memory_fraction, inputs.environment
    if not 0.0 < fraction <= 1.0:
        raise UsageError(f"memory fraction {fraction} is not between 0 and 1", "--memory-fraction 0.9")
    weight_bytes = inputs.architecture.weight_bytes[inputs.dtypes.weight]
    kv_bytes = int(environment.gpu_memory_bytes * fraction) - weight_bytes - sum(workspace)
    if inputs.device == "cpu":
        kv_bytes = int((environment.host_memory_bytes - weight_bytes) * HOST_KV_FRACTION)
    return kv_bytes - _slot_bytes(inputs, demand)


def _count_snapshots(inputs: PlanInputs, demand: CacheDemand, workspace: Workspace, min_blocks: int) -> int:
    """The number of snapshots. Each belongs to a prefix of MIN_SNAPSHOT_TOKENS or more tokens in cached blocks.

    Snapshots leave the KV blocks that the buckets, one sequence of full context or a largest batch of typical sequences
    need. If the recipe requests a number of KV blocks, they leave these, and take at most SNAPSHOT_FRACTION of the sum.
    """
    bytes_each, block_bytes = bytes_per_slot(inputs), _block_bytes(inputs, demand.block_size)
    if not bytes_each or demand.context <= MIN_SNAPSHOT_TOKENS:
        return 0
    available = _kv_bytes(inputs, demand, workspace)
    limit = int(available * SNAPSHOT_FRACTION)
    typical_blocks = -(-min(TYPICAL_SEQUENCE_TOKENS, demand.context) // demand.block_size)
    needed_blocks = max(min_blocks, demand.max_batch * typical_blocks + 1, demand.blocks_per_sequence + 1)
    if inputs.recipe.kv_blocks is not None:
        needed_blocks = max(min_blocks, inputs.recipe.kv_blocks)
        if block_bytes:
            limit = min(limit, int(needed_blocks * block_bytes * SNAPSHOT_FRACTION / (1 - SNAPSHOT_FRACTION)))
    max_blocks = inputs.recipe.kv_blocks or _usable_blocks(demand)
    by_tokens = max_blocks * demand.block_size // MIN_SNAPSHOT_TOKENS
    by_bytes = min(available - needed_blocks * block_bytes, limit) // bytes_each
    return max(0, min(by_bytes, by_tokens, MAX_SNAPSHOTS_PER_SEQUENCE * demand.max_batch))


def _count_slots(inputs: PlanInputs, demand: CacheDemand) -> int:
    """One for each sequence of the largest batch, and the scratch slot; 0 if no layer keeps state in slots."""
    return demand.max_batch + 1 if inputs.architecture.slot_tensors else 0


def _slot_bytes(inputs: PlanInputs, demand: CacheDemand) -> int:
    return _count_slots(inputs, demand) * bytes_per_slot(inputs)


def bytes_per_slot(inputs: PlanInputs) -> int:
    """The bytes of one slot in all layers; 0 if none keeps state in slots."""
    tensors, compute = inputs.architecture.slot_tensors, inputs.dtypes.compute
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype or compute] for tensor in tensors)


def _block_bytes(inputs: PlanInputs, block_size: int) -> int:
    return inputs.architecture.kv_elements_per_token * KV_DTYPE_BYTES[inputs.dtypes.kv] * block_size


def _usable_blocks(demand: CacheDemand) -> int:
    """Those of the largest batch at full context, and one for padding."""
    return demand.max_batch * demand.blocks_per_sequence + 1


def _decide_kv_blocks(requested_blocks: int | None, affordable_blocks: int, demand: CacheDemand) -> tuple[int, str]:
    needed_blocks = _usable_blocks(demand)
    sequences = f"{demand.max_batch} sequences of {demand.context} tokens"
    if requested_blocks is not None:
        return requested_blocks, "requested"
    if needed_blocks <= affordable_blocks:
        return needed_blocks, f"{sequences}, and one block for padding"
    held = f"all remaining memory, for {(affordable_blocks - 1) * demand.block_size} tokens"
    return affordable_blocks, f"{held}; {sequences} would need {needed_blocks} blocks"


def _describe_memory(inputs: PlanInputs) -> str:
    environment = inputs.environment
    if inputs.device == "cpu":
        return f"the host has {gib(environment.host_memory_bytes)}"
    total = gib(environment.gpu_memory_bytes)
    return f"{environment.gpu} has {total}, and --memory-fraction allows {inputs.recipe.memory_fraction:.0%} of it"


def gib(size_bytes: int) -> str:
    """`1.50 GiB`, MiB below one GiB, KiB below one MiB, or bytes below one KiB."""
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.2f} GiB"
    if size_bytes >= 2**20:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**10:.1f} KiB" if size_bytes >= 2**10 else f"{size_bytes} bytes"
