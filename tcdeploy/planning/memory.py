"""How many KV blocks fit: arithmetic over sizes in bytes, without torch.

Weights first, then the workspace that running them takes, and KV takes what is left, but never more than the largest
batch at full context can use. The workspace is predicted before anything is loaded, part by part (`Workspace`), and
compared with what the device has really given away when everything is warm; the manifest holds both.
"""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.errors import SpaceError, UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.recipe import Recipe

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Fitted on an H100 with torch 2.11 and CUDA 13. Llama 3.1 8B with eight buckets in the default mode took 1.41 GiB, for
# which these constants say 1.40; in mode auto Qwen 2.5 7B with five took 1.26 (1.26), and the 8B shape with an 8,192
# bucket and batches up to 256 took 2.26 (2.18). Three runs of earlier versions took 1.42, 1.25 and 1.17, of which these
# would say 1.58, 1.22 and 1.22.
CUDA_CONTEXT_BYTES = 1090 << 20  # the CUDA context, the code of torch's, cuBLAS's and Triton's kernels, and fragments
CUBLAS_BYTES = 3 * (32 << 20)  # a workspace for each stream that multiplies matrices: eager, and while recording
GRAPH_BYTES_PER_LAYER = 64 << 10  # of one recorded step, in the driver
PARITY_CHECK_FACTOR = 1.5  # of a step's activations: transformers' own attention beside it, while a bucket is checked
SAMPLING_BYTES_PER_LOGIT = 3  # for each row and token of the vocabulary: a count and a mark (engine/sampling.py)
HOST_KV_FRACTION = 0.25


class CacheDemand(NamedTuple):
    """What the buckets ask of memory: lengths in tokens, batches in sequences, slots per block."""

    context: int
    batch_sizes: tuple[int, ...]
    max_prefill_tokens: int
    num_prefill_buckets: int
    block_size: int

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]


class Workspace(NamedTuple):
    """Device memory beyond weights and KV, in bytes, by what takes it; `check` is given back after warm-up."""

    context: int
    activations: int
    decode_rows: int
    logits: int
    graphs: int
    check: int

    @property
    def serving_bytes(self) -> int:
        """What stays taken while serving."""
        return sum(self) - self.check


def predict_workspace(
    architecture: Architecture, dtype: str, demand: CacheDemand, max_prefill_sequences: int
) -> Workspace:
    """For a GPU with step graphs. Every bucket keeps its logits; activations are shared, the largest step's count."""
    item = DTYPE_BYTES[dtype]
    rows = demand.max_batch + 1
    table_width = -(-demand.context // demand.block_size)
    activations = demand.max_prefill_tokens * architecture.peak_activation_elements * item
    outputs = sum(demand.batch_sizes) + max_prefill_sequences * demand.num_prefill_buckets
    return Workspace(
        context=CUDA_CONTEXT_BYTES + CUBLAS_BYTES,
        activations=activations,
        decode_rows=rows * (architecture.vocab_size * SAMPLING_BYTES_PER_LOGIT + table_width * 4),
        logits=outputs * architecture.vocab_size * item,
        graphs=(len(demand.batch_sizes) + demand.num_prefill_buckets)
        * len(architecture.attention_layers)
        * GRAPH_BYTES_PER_LAYER,
        check=int(PARITY_CHECK_FACTOR * activations),
    )


class KVSize(NamedTuple):
    """`context` is smaller than the demand's where memory ends first."""

    blocks: int
    kv_bytes: int
    weight_bytes: int
    context: int
    reason: str


def size_kv_cache(
    recipe: Recipe,
    environment: Environment,
    architecture: Architecture,
    device: str,
    dtype: str,
    demand: CacheDemand,
    workspace: Workspace,
) -> KVSize:
    """One block more than the sequences need, for padding. Raises SpaceError when the buckets cannot be held."""
    weight_bytes = architecture.parameters * DTYPE_BYTES[dtype]
    block_bytes = architecture.kv_elements_per_token * DTYPE_BYTES[dtype] * demand.block_size
    budget = _kv_budget(recipe, environment, device, weight_bytes, sum(workspace))
    if budget < block_bytes:
        raise SpaceError(
            f"{gib(weight_bytes)} of {dtype} weights leave no room for KV: {_describe_memory(recipe, environment, device)}",
            "a smaller model, a smaller --dtype, or more memory",
        )
    blocks, reason = _decide_kv_blocks(recipe.kv_blocks, budget // block_bytes, demand)
    least = max(demand.max_batch, -(-demand.max_prefill_tokens // demand.block_size)) + 1
    if not least <= blocks <= budget // block_bytes:
        raise SpaceError(
            f"{blocks} KV blocks of {gib(block_bytes)}: the buckets need {least}, memory holds {budget // block_bytes}",
            "smaller --buckets and --batch-sizes, or more memory",
        )
    capacity = (blocks - 1) * demand.block_size
    if capacity < demand.context and recipe.context is not None:
        raise SpaceError(
            f"context {recipe.context} is more than the {capacity} tokens that KV holds", f"--context {capacity}"
        )
    return KVSize(blocks, blocks * block_bytes, weight_bytes, min(demand.context, capacity), reason)


def _decide_kv_blocks(requested_blocks: int | None, affordable: int, demand: CacheDemand) -> tuple[int, str]:
    needed_blocks = demand.max_batch * -(-demand.context // demand.block_size) + 1
    if requested_blocks is not None:
        return requested_blocks, "asked for"
    if needed_blocks <= affordable:
        return needed_blocks, f"{demand.max_batch} sequences of {demand.context} tokens, and one block for padding"
    return affordable, f"what is left of memory; {demand.max_batch} full sequences would take {needed_blocks}"


def _kv_budget(recipe: Recipe, environment: Environment, device: str, weight_bytes: int, workspace_bytes: int) -> int:
    if not 0.0 < recipe.memory_fraction <= 1.0:
        raise UsageError(f"memory fraction {recipe.memory_fraction} is not between 0 and 1", "--memory-fraction 0.9")
    if device == "cpu":
        return int((environment.host_memory_bytes - weight_bytes) * HOST_KV_FRACTION)
    return int(environment.gpu_memory_bytes * recipe.memory_fraction) - weight_bytes - workspace_bytes


def _describe_memory(recipe: Recipe, environment: Environment, device: str) -> str:
    if device == "cpu":
        return f"the host has {gib(environment.host_memory_bytes)}"
    total = gib(environment.gpu_memory_bytes)
    return f"{environment.gpu} has {total}, of which {recipe.memory_fraction:.0%} may be filled"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
