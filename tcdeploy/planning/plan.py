"""The Plan: what a deployment does on this machine, with every automatic choice of the Recipe resolved.

`make_plan` is a pure function of recipe, environment and architecture, and gives a reason for each choice. The Plan is
frozen: `--dry-run` prints it, its key names the cache's manifest, and no later stage revises it. Problems that can be
detected before any weight is loaded are errors here, such as buckets above the context or too little memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from tcdeploy.errors import UsageError
from tcdeploy.planning import attention, sizes
from tcdeploy.planning.activations import decide_fp8_min_rows
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import BACKENDS, Phase
from tcdeploy.planning.decision import Decision, Decisions, decide_inputs, warn_about_packages
from tcdeploy.planning.environment import AOT_PACKAGES, DYNAMIC_SIZES, Environment, find_cache_dir
from tcdeploy.planning.keys import CACHE_EPOCH
from tcdeploy.planning.recipe import (
    Attention,
    CompileUnit,
    Device,
    DType,
    Graphs,
    KVDType,
    LoadFormat,
    Mode,
    ProgramKind,
    Recipe,
)
from tcdeploy.planning.schemes import INTERLEAVED_SUFFIX
from tcdeploy.planning.variants import DEFAULT, Variant, attention_variant, candidate_variants

# Fields that no program depends on: where the weights come from, so that CI can fill the cache without them (with
# remote code the model and revision do count, see _plan_key), sizes that programs hold as symbols, and what only the
# host uses. `fuses_large_decode` follows from the architecture, which is part of the key.
IGNORED_PLAN_FIELDS = {
    "model", "revision", "load_format", "trust_remote_code",
    "context", "kv_blocks", "kv_bytes", "slots", "snapshots", "slot_bytes", "workspace_bytes", "tune_seconds",
    "max_consecutive_prefills", "itl_target", "fuses_large_decode",
    "cache_dir", "decisions", "key",
}  # fmt: skip
PARALLEL_FIELDS = {"rank", "world_size"}  # in the key only if there are several ranks


@dataclass(frozen=True)
class Bucket:
    """One compiled shape: `prefill:512` has 512 packed tokens, `decode:16` has 16 rows."""

    phase: Phase
    size: int
    min_size: int = 0  # of a dynamic bucket, which serves min_size..size; 0 for a static one

    @property
    def name(self) -> str:
        return f"{self.phase}:{self.min_size}-{self.size}" if self.min_size else f"{self.phase}:{self.size}"

    @property
    def is_prefill(self) -> bool:
        return self.phase == "prefill"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `prepare` needs to know. Lengths in tokens, batch sizes in sequences, memory in bytes."""

    model: str
    revision: str | None
    load_format: LoadFormat
    trust_remote_code: bool
    device: Device
    weight_dtype: DType
    kv_dtype: KVDType
    compute_dtype: DType
    fp8_min_rows: int  # rows from which products with FP8 weights quantise their inputs; 0: none do
    prefill_attention: Attention
    decode_attention: Attention
    alternative_attention: tuple[Attention, ...]  # prefill backends that `--mode auto` may time in long buckets
    region: CompileUnit
    mode: Mode
    programs: ProgramKind
    graphs: Graphs
    is_hopper: bool  # compute capability 9.0, for which the kernels in kernels/linear/ were written
    fuses_large_decode: bool  # whether decode steps of many rows try our products first: int4 layers without experts
    tune_seconds: float
    mixed_steps: bool
    itl_target: float | None  # ms that a mixed step may take; None: a multiple of a decode step, measured at start-up
    max_consecutive_prefills: int  # while running sequences wait for a token, if steps are not mixed
    buckets: tuple[Bucket, ...]
    max_prefill_sequences: int
    context: int
    block_size: int
    kv_blocks: int
    weight_bytes: int
    kv_bytes: int
    slots: int  # of layers that keep state in slots; slot 0 is for padding. 0: there are no such layers
    snapshots: int  # further slots, after `slots`, with copies of the state at the ends of prefixes
    slot_bytes: int  # of all slots, those of snapshots included
    workspace_bytes: int  # predicted device memory beyond weights and state while serving; 0 on a CPU
    rank: int = 0  # of tensor parallelism; sizes and bytes are those of one rank
    world_size: int = 1
    environment_key: str  # `Environment.cache_key`, which is part of torch's key of each program
    cache_dir: str
    decisions: tuple[Decision, ...]
    key: str = ""  # equal for plans that compile the same programs on equal machines; names the manifest and the lease

    @property
    def prefill_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.is_prefill)

    @property
    def decode_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if not bucket.is_prefill)

    def variants(self, bucket: Bucket) -> tuple[Variant, ...]:
        """The variants to try for a bucket. Last-token rows require `region` layer."""
        variants = candidate_variants(
            self.mode, self.device, self.is_hopper, self.fuses_large_decode, bucket.is_prefill, bucket.size
        )
        if bucket.is_prefill and bucket.size >= attention.TUNED_ATTENTION_MIN_TOKENS:
            variants += tuple(map(attention_variant, self.alternative_attention))
        return tuple(variant for variant in variants if self.region == "layer" or not variant.last_token_rows)

    def quantises_inputs(self, bucket: Bucket) -> bool:
        """Whether products with FP8 weights in the bucket's steps quantise their inputs."""
        return self.fp8_min_rows > 0 and (bucket.is_prefill or bucket.size >= self.fp8_min_rows)

    def uses_cuda_graph(self, bucket: Bucket, variant: Variant = DEFAULT) -> bool:
        """Whether the bucket's step becomes a CUDA graph. Not if its attention backend reads tensors on the host."""
        if self.graphs != "step":
            return False
        backend = (variant.attention or self.prefill_attention) if bucket.is_prefill else self.decode_attention
        return BACKENDS[backend].is_capturable

    def step_sizes(self, bucket: Bucket) -> tuple[int, ...]:
        """The token or row counts that steps of the bucket are padded to, ascending; () if they are not padded."""
        if bucket.min_size and not self.uses_cuda_graph(bucket):
            return ()
        return sizes.capture_sizes(bucket.size, is_dynamic=bool(bucket.min_size))

    def row_slots(self, bucket: Bucket) -> tuple[int, ...]:
        """The numbers of decode rows that steps of the bucket have outputs for, ascending; 0 if none decode in it."""
        if not bucket.is_prefill or not self.mixed_steps:
            return (0,)
        return sizes.mixed_row_slots(tuple(decode_bucket.size for decode_bucket in self.decode_buckets))

    def graph_shapes(self, bucket: Bucket) -> tuple[tuple[int, int], ...]:
        """(tokens or rows, row slots) of all graphs of a captured bucket, ascending."""
        return sizes.graph_shapes(self.step_sizes(bucket), self.row_slots(bucket))

    @property
    def state_bytes(self) -> int:
        """What layers keep between steps: KV blocks and slots."""
        return self.kv_bytes + self.slot_bytes

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers; 0 if no layer keeps state in slots."""
        return self.slot_bytes // max(self.slots + self.snapshots, 1)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether prompts with a common prefix share KV blocks. With state in slots, this needs snapshots of it."""
        return not self.slots or self.snapshots > 0

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.context // self.block_size)


def make_plan(
    recipe: Recipe, environment: Environment, architecture: Architecture, model_decisions: tuple[Decision, ...] = (),
    programs_reason: str = "",
) -> Plan:  # fmt: skip
    """Resolves every choice. Raises UsageError for contradictory requests, SpaceError if memory does not suffice.

    model_decisions: made while the model's files were read; printed last. programs_reason: why start/auto_programs.py
    has chosen the recipe's `programs`, "" if they were requested. `auto` that is not resolved is planned as jit.
    """
    decisions = Decisions()
    warn_about_packages(environment, decisions)
    inputs = decide_inputs(recipe, environment, architecture, decisions)
    prefill_attention = attention.decide_prefill_attention(inputs, decisions)
    decode_attention = attention.decide_decode_attention(inputs, decisions)
    graphs = attention.decide_graphs(inputs, decode_attention, decisions)
    context = sizes.decide_context(recipe, architecture, decisions)
    inputs = sizes.decide_shapes(inputs, graphs, prefill_attention, context, decisions)
    mixed_steps = attention.decide_mixed_steps(inputs, graphs, prefill_attention, decisions)
    lengths = sizes.decide_prefill_lengths(inputs.recipe, context, decisions)
    demand = sizes.decide_demand(inputs, graphs, prefill_attention, lengths, context, mixed_steps, decisions)
    workspace_bytes, memory = sizes.decide_memory(inputs, demand, decisions)
    _explain_region_and_mode(recipe, decisions)
    cache_dir = decisions.add("cache folder", *find_cache_dir(recipe.cache_dir, environment))
    plan = Plan(
        model=recipe.model,
        revision=recipe.revision,
        load_format=recipe.load_format,
        trust_remote_code=recipe.trust_remote_code,
        device=inputs.device,
        weight_dtype=inputs.dtypes.weight,
        kv_dtype=inputs.dtypes.kv,
        compute_dtype=inputs.dtypes.compute,
        fp8_min_rows=decide_fp8_min_rows(inputs, lengths, decisions),
        prefill_attention=prefill_attention,
        decode_attention=decode_attention,
        alternative_attention=attention.decide_alternative_attention(inputs, decisions),
        region=recipe.region,
        mode=recipe.mode,
        programs=_decide_programs(recipe, environment, programs_reason, decisions),
        graphs=graphs,
        is_hopper=inputs.device == "cuda" and environment.gpu_capability == (9, 0),
        fuses_large_decode=_fuses_large_decode(architecture),
        tune_seconds=recipe.tune_seconds,
        mixed_steps=mixed_steps,
        itl_target=attention.decide_itl_target(recipe, mixed_steps, decisions),
        max_consecutive_prefills=recipe.max_consecutive_prefills,
        buckets=_make_buckets(inputs.recipe, lengths, demand.batch_sizes),
        max_prefill_sequences=sizes.max_prefill_sequences(demand.max_prefill_tokens),
        context=memory.context,
        block_size=demand.block_size,
        kv_blocks=memory.blocks,
        weight_bytes=memory.weight_bytes,
        kv_bytes=memory.kv_bytes,
        slots=memory.slots,
        snapshots=memory.snapshots,
        slot_bytes=memory.slot_bytes,
        workspace_bytes=workspace_bytes,
        environment_key=environment.cache_key,
        cache_dir=cache_dir,
        decisions=(*decisions, *model_decisions),
    )
    return dataclasses.replace(plan, key=_plan_key(plan, architecture))


def _fuses_large_decode(architecture: Architecture) -> bool:
    """Whether linear layers have int4 weights in the order of the tensor cores, and no experts are quantised.

    Only whole steps of such models were timed.
    """
    has_interleaved = any(scheme.endswith(INTERLEAVED_SUFFIX) for scheme in architecture.schemes)
    return has_interleaved and not architecture.expert_schemes


def _make_buckets(recipe: Recipe, lengths: tuple[int, ...], batch_sizes: tuple[int, ...]) -> tuple[Bucket, ...]:
    min_size = sizes.DYNAMIC_MIN_SIZE if recipe.shapes == "dynamic" else 0
    prefill = (Bucket("prefill", length, min_size) for length in lengths)
    return (*prefill, *(Bucket("decode", size) for size in batch_sizes))


def _plan_key(plan: Plan, architecture: Architecture) -> str:
    """16 hex digits. Equal for a model and its fine-tunes, with weights or without: `architecture` covers the config.

    The checkpoint's dtype does not enter: programs depend on the plan's dtypes only.
    Remote code can change programs, so model and revision enter the key if it is trusted.
    """
    ignored = IGNORED_PLAN_FIELDS | (PARALLEL_FIELDS if plan.world_size == 1 else set())
    if plan.programs == "jit":  # so keys of caches that were filled before the field existed stay valid
        ignored |= {"programs"}
    program_fields = {item.name: getattr(plan, item.name) for item in dataclasses.fields(plan)}
    program_fields = {name: value for name, value in program_fields.items() if name not in ignored}
    remote_code = (plan.model, plan.revision) if plan.trust_remote_code else None
    architecture = dataclasses.replace(architecture, dtype="")
    plain = [CACHE_EPOCH, program_fields, remote_code, architecture]
    document = json.dumps(plain, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def _decide_programs(recipe: Recipe, environment: Environment, reason: str, decisions: Decisions) -> ProgramKind:
    """The recipe's `programs`, or "jit" if this torch has no packages. Raises UsageError where "aot" cannot be used."""
    if recipe.programs != "aot":
        return decisions.add("programs", "jit", reason) if reason else "jit"
    if recipe.region != "layer":
        message = f"--programs aot requires --region layer, not {recipe.region}"
        raise UsageError(message, "omit --region, or use --programs jit")
    if missing := missing_for_packages(environment):
        reason = f"--programs aot needs a private interface that this torch lacks: see the warning '{missing}'"
        return decisions.add("programs", "jit", reason, is_fallback=True)
    reason = reason or "requested; later starts load packages without tracing the model"
    return decisions.add("programs", "aot", reason)


def missing_for_packages(environment: Environment) -> str:
    """The name of a private interface of torch that packages need and that is missing; "" if none is."""
    missing = dict(environment.missing_internals)
    return next((name for name in (AOT_PACKAGES, DYNAMIC_SIZES) if name in missing), "")


def _explain_region_and_mode(recipe: Recipe, decisions: Decisions) -> None:
    """Adds the recipe's region and mode, so that the printed Plan is complete."""
    fused = "one program for all layers of a kind, with norms and residuals fused"
    decisions.add("region", recipe.region, fused if recipe.region == "layer" else "requested")
    reason = "autotuned kernels" if recipe.mode == "max-autotune" else "Inductor's default kernels"
    if recipe.mode == "auto" and recipe.tune_seconds > 0:
        reason = f"the fastest variant per bucket; at most {recipe.tune_seconds:g} s for those beyond the first"
    elif recipe.mode == "auto":
        reason = "for each bucket the variant known to be fastest; not timed here without --tune-seconds"
    decisions.add("mode", recipe.mode, reason)
