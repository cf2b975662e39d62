"""What this machine will do: every "auto" of the Recipe decided, each choice with its reason.

`make_plan` is a pure function of (recipe, environment, architecture). The Plan is frozen; it is printed by
`--dry-run`, it keys the cache's manifest, and nothing after it decides again. Problems that can be known before a
weight is loaded are errors here: buckets out of order or above the context, no room for weights or KV.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass

from tcdeploy.errors import UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.capability import Supported, Unsupported, check_backend
from tcdeploy.planning.environment import DYNAMIC_SIZES, Environment
from tcdeploy.planning.keys import CACHE_EPOCH
from tcdeploy.planning.memory import CacheDemand, KVSize, gib, predict_workspace, size_kv_cache
from tcdeploy.planning.recipe import Attention, Recipe
from tcdeploy.planning.tested_versions import describe_ranges, describe_versions, untested_packages
from tcdeploy.planning.variants import DEFAULT, Variant, attention_variant, variants

DEFAULT_PREFILL_BUCKETS = (128, 512, 2048)
DEFAULT_BATCH_SIZES = {"cuda": (1, 4, 16, 32), "cpu": (1, 4)}
# That one prefill step may pack. Programs hold their number, so it is the same up to a usual size of buckets.
MIN_PREFILL_SEQUENCES, TOKENS_PER_PREFILL_SEQUENCE = 8, 512
DYNAMIC_MIN_TOKENS = 2  # torch specialises sizes 0 and 1, so a dynamic program starts at 2
BLOCK_SIZE = 16
# Where weights come from, which CI need not have (of remote code see _plan_key), and sizes that a program holds as
# symbols.
IGNORED_PLAN_FIELDS = {
    "model", "revision", "load_format", "trust_remote_code",
    "context", "kv_blocks", "kv_bytes", "workspace_bytes", "tune_seconds", "max_consecutive_prefills",
}  # fmt: skip
# Prefill on an H100, 2048 tokens of 32 heads over 8 (scripts/bench-attention): Triton 0.113 ms, FlashAttention-4 0.108,
# torch's FlashAttention-2 0.190. FlashAttention-4 gains beyond that (8192 tokens: 0.94 against 1.47), but its first
# call takes 5 s and each later one 0.1 ms of the host, so it is taken when asked for, or tried by mode auto. Those of
# FlashAttention-2 and -3 could not be run where this was measured: they stand last, or are asked for.
PREFERRED_ATTENTION: dict[Attention, str] = {
    "triton": "reads the pages in place; measured faster than torch's FlashAttention-2",
    "torch-flash": "FlashAttention-2 as torch ships it",
    "flash-attn-3": "installed",
    "flash-attn-2": "installed",
}
# What mode auto tries, and from where on attention is enough of a step for another kernel to matter.
ALTERNATIVE_ATTENTION: tuple[Attention, ...] = ("flash-attn-4",)
ALTERNATIVE_ATTENTION_MIN_TOKENS = 4096


@dataclass(frozen=True)
class Bucket:
    """One shape that is compiled: `prefill:512` counts packed tokens, `decode:16` sequences."""

    phase: str
    size: int
    min_size: int = 0  # a dynamic bucket serves min_size..size, a static one only size

    @property
    def name(self) -> str:
        return f"{self.phase}:{self.min_size}-{self.size}" if self.min_size else f"{self.phase}:{self.size}"

    @property
    def is_prefill(self) -> bool:
        return self.phase == "prefill"


@dataclass(frozen=True)
class Decision:
    """One line of the Plan. `is_fallback`: less than what the user would hope for, so it is shown as a warning."""

    name: str
    value: str
    reason: str
    is_fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that preparing a deployment needs to know. Lengths in tokens, sizes in sequences, memory in bytes."""

    model: str
    revision: str | None
    load_format: str
    trust_remote_code: bool
    device: str
    dtype: str
    prefill_attention: Attention
    decode_attention: Attention
    alternative_attention: tuple[Attention, ...]  # prefill backends that mode auto tries in long buckets
    region: str
    mode: str
    graphs: str
    is_hopper: bool  # compute capability 9.0: what our fastest products were written for
    tune_seconds: float
    max_consecutive_prefills: int  # prefill steps in a row while sequences wait for their next token
    buckets: tuple[Bucket, ...]
    max_prefill_sequences: int
    context: int
    block_size: int
    kv_blocks: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int  # predicted, on a GPU: all that stays taken beside weights and KV
    cache_dir: str
    decisions: tuple[Decision, ...]
    key: str  # names the manifest: equal for plans that compile the same programs on machines of the same kind

    @property
    def prefill_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.is_prefill)

    @property
    def decode_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if not bucket.is_prefill)

    def variants(self, bucket: Bucket) -> tuple[Variant, ...]:
        """Ways to make the bucket's step; where there are several, the fastest is kept.

        Rows are chosen early in whole layers and static shapes alone.
        """
        known = variants(self.mode, self.device, self.is_hopper, bucket.is_prefill, bucket.size)
        if bucket.is_prefill and bucket.size >= ALTERNATIVE_ATTENTION_MIN_TOKENS:
            known += tuple(map(attention_variant, self.alternative_attention))
        can_choose = self.region == "layer" and not bucket.min_size
        return tuple(variant for variant in known if can_choose or not variant.last_token_rows)

    def uses_cuda_graph(self, bucket: Bucket, variant: Variant = DEFAULT) -> bool:
        """Whether the bucket's step becomes a CUDA graph: in prefill only where attention reads nothing on the host."""
        if self.graphs != "step" or bucket.min_size:
            return False
        return not bucket.is_prefill or (variant.attention or self.prefill_attention) == "triton"

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.context // self.block_size)


def max_prefill_sequences(max_prefill_tokens: int) -> int:
    """Prompts that a prefill step may pack, where the largest bucket holds so many tokens."""
    return max(MIN_PREFILL_SEQUENCES, max_prefill_tokens // TOKENS_PER_PREFILL_SEQUENCE)


def make_plan(recipe: Recipe, environment: Environment, architecture: Architecture) -> Plan:
    """Decide everything. Raises UsageError for what cannot be asked, SpaceError for what does not fit."""
    decisions: list[Decision] = []
    if recipe.max_consecutive_prefills < 1:
        raise UsageError(
            f"a prefill burst of {recipe.max_consecutive_prefills} steps would never prefill",
            "--max-consecutive-prefills 4",
        )
    decisions += [*_untested_versions(environment), *_missing_internals(environment)]
    device = _decide_device(recipe, environment, decisions)
    dtype = _decide_dtype(recipe, architecture, device, decisions)
    prefill_attention = _decide_prefill_attention(recipe, environment, architecture, device, dtype, decisions)
    decode_attention = _decide_decode_attention(recipe, environment, architecture, device, dtype, decisions)
    graphs = _decide_graphs(recipe, device, decode_attention, decisions)
    context = _decide_context(recipe, architecture, decisions)
    batch_sizes = _decide_batch_sizes(recipe, device, decisions)
    prefill = _decide_prefill_buckets(recipe, environment, context, decisions)
    block_size = _decide_block_size(recipe, decisions)
    demand = CacheDemand(context, batch_sizes, prefill[-1].size, len(prefill), block_size)
    workspace_bytes, memory = _decide_memory(recipe, environment, architecture, device, dtype, demand, decisions)
    _decide_region_and_mode(recipe, decisions)
    cache_dir = _decide_cache_dir(recipe, environment, decisions)
    decode = tuple(Bucket("decode", size) for size in batch_sizes)
    fields: dict[str, object] = {
        "model": recipe.model,
        "revision": recipe.revision,
        "load_format": recipe.load_format,
        "trust_remote_code": recipe.trust_remote_code,
        "device": device,
        "dtype": dtype,
        "prefill_attention": prefill_attention,
        "decode_attention": decode_attention,
        "alternative_attention": _decide_alternative_attention(
            recipe, environment, architecture, device, dtype, decisions
        ),
        "region": recipe.region,
        "mode": recipe.mode,
        "graphs": graphs,
        "is_hopper": device == "cuda" and environment.gpu_capability == (9, 0),
        "tune_seconds": recipe.tune_seconds,
        "max_consecutive_prefills": recipe.max_consecutive_prefills,
        "buckets": prefill + decode,
        "max_prefill_sequences": max_prefill_sequences(demand.max_prefill_tokens),
        "context": memory.context,
        "block_size": block_size,
        "kv_blocks": memory.blocks,
        "weight_bytes": memory.weight_bytes,
        "kv_bytes": memory.kv_bytes,
        "workspace_bytes": workspace_bytes,
    }
    key = _plan_key(fields, environment, architecture)
    return Plan(**fields, cache_dir=cache_dir, decisions=tuple(decisions), key=key)  # type: ignore[arg-type]


def _plan_key(fields: dict[str, object], environment: Environment, architecture: Architecture) -> str:
    """The same for a model and its fine-tunes, with and without their weights: `architecture` stands for the config."""
    program_fields = {name: value for name, value in fields.items() if name not in IGNORED_PLAN_FIELDS}
    remote_code = (fields["model"], fields["revision"]) if fields["trust_remote_code"] else None
    plain = [CACHE_EPOCH, program_fields, remote_code, environment.cache_factors(), architecture]
    document = json.dumps(plain, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def _untested_versions(environment: Environment) -> list[Decision]:
    """One warning for all packages whose version is outside the tested range."""
    versions = {"torch": environment.torch, "triton": environment.triton, "transformers": environment.transformers}
    untested = untested_packages(versions)
    if not untested:
        return []
    reason = f"tested with {describe_ranges(untested)}"
    return [Decision("versions", describe_versions(untested, versions), reason, is_fallback=True)]


def _missing_internals(environment: Environment) -> list[Decision]:
    """A warning for each private name of torch, Triton, transformers or uvicorn that these versions lack."""
    return [
        Decision(name, "not available", consequence, is_fallback=True)
        for name, consequence in environment.missing_internals
    ]


def _decide_device(recipe: Recipe, environment: Environment, decisions: list[Decision]) -> str:
    if recipe.device == "cuda" and not environment.gpu:
        raise UsageError("device cuda was asked for, and torch sees no GPU", "tcdeploy compile ... --device cpu")
    if recipe.device:
        decisions.append(Decision("device", recipe.device, "asked for"))
        return recipe.device
    if environment.gpu:
        decisions.append(Decision("device", "cuda", f"{environment.gpu} is present"))
        return "cuda"
    decisions.append(Decision("device", "cpu", "torch sees no GPU"))
    return "cpu"


def _decide_dtype(recipe: Recipe, architecture: Architecture, device: str, decisions: list[Decision]) -> str:
    if recipe.dtype:
        decisions.append(Decision("dtype", recipe.dtype, "asked for"))
        return recipe.dtype
    if device == "cpu":
        decisions.append(Decision("dtype", "float32", "the CPU's default: exact, so text equals transformers' own"))
        return "float32"
    if architecture.dtype in ("bfloat16", "float16"):
        decisions.append(Decision("dtype", architecture.dtype, "the checkpoint's own"))
        return architecture.dtype
    decisions.append(Decision("dtype", "bfloat16", f"the checkpoint is {architecture.dtype}: half the bytes per token"))
    return "bfloat16"


def _decide_prefill_attention(
    recipe: Recipe,
    environment: Environment,
    architecture: Architecture,
    device: str,
    dtype: str,
    decisions: list[Decision],
) -> Attention:
    if recipe.attention:
        match check_backend(recipe.attention, environment, architecture, device, dtype):
            case Supported(backend):
                decisions.append(Decision("prefill attention", backend, "asked for"))
                return backend
            case Unsupported(backend, reason):
                raise UsageError(
                    f"attention {backend} cannot be used: {reason}", "leave --attention out to let it choose"
                )
    if device == "cpu":
        decisions.append(Decision("prefill attention", "reference", "FlashAttention needs a GPU"))
        return "reference"
    rejections: list[str] = []
    for variant in PREFERRED_ATTENTION:
        match check_backend(variant, environment, architecture, device, dtype):
            case Supported(backend):
                decisions.append(
                    Decision("prefill attention", backend, "; ".join([PREFERRED_ATTENTION[variant], *rejections]))
                )
                return backend
            case Unsupported(backend, reason):
                rejections.append(f"not {backend}: {reason}")
    decisions.append(Decision("prefill attention", "reference", "; ".join(rejections), is_fallback=True))
    return "reference"


def _decide_alternative_attention(
    recipe: Recipe,
    environment: Environment,
    architecture: Architecture,
    device: str,
    dtype: str,
    decisions: list[Decision],
) -> tuple[Attention, ...]:
    """Installed packages that are worth a trial in long buckets, unless a backend was asked for."""
    if recipe.mode != "auto" or recipe.attention:
        return ()
    verdicts = (check_backend(one, environment, architecture, device, dtype) for one in ALTERNATIVE_ATTENTION)
    found = tuple(verdict.backend for verdict in verdicts if isinstance(verdict, Supported))
    if found:
        reason = f"installed: timed in prefill buckets of {ALTERNATIVE_ATTENTION_MIN_TOKENS} tokens and more"
        decisions.append(Decision("other attention", ",".join(found), reason))
    return found


def _decide_decode_attention(
    recipe: Recipe,
    environment: Environment,
    architecture: Architecture,
    device: str,
    dtype: str,
    decisions: list[Decision],
) -> Attention:
    if device == "cpu":
        decisions.append(Decision("decode attention", "reference", "the Triton kernel needs a GPU"))
        return "reference"
    if recipe.attention == "reference":
        decisions.append(Decision("decode attention", "reference", "asked for"))
        return "reference"
    match check_backend("triton", environment, architecture, device, dtype):
        case Supported(backend):
            reason = "split-KV paged decode; FlashAttention-2 took 3 times as long on an H100"
            decisions.append(Decision("decode attention", backend, reason))
            return backend
        case Unsupported(_, reason):
            decisions.append(Decision("decode attention", "reference", reason, is_fallback=True))
            return "reference"


def _decide_graphs(recipe: Recipe, device: str, decode_attention: Attention, decisions: list[Decision]) -> str:
    requested_graphs = recipe.graphs
    if requested_graphs == "region" and recipe.shapes == "dynamic":
        raise UsageError(
            "graphs region would record a graph for every length of a dynamic range", "--graphs step --shapes dynamic"
        )
    if device == "cuda" and decode_attention == "reference":
        if requested_graphs not in (None, "none"):
            raise UsageError(
                f"graphs {requested_graphs} cannot hold the reference attention: it reads lengths", "--graphs none"
            )
        decisions.append(
            Decision("graphs", "none", "the reference attention reads lengths on the host", is_fallback=True)
        )
        return "none"
    if device == "cpu":
        reason = "there are no CUDA graphs on a CPU"
        decisions.append(Decision("graphs", "none", reason, is_fallback=requested_graphs not in (None, "none")))
        return "none"
    if recipe.mode == "default":
        if requested_graphs not in (None, "none"):
            raise UsageError(
                f"mode default takes no CUDA graphs, and graphs {requested_graphs} was asked for",
                f"--mode reduce-overhead --graphs {requested_graphs}",
            )
        decisions.append(Decision("graphs", "none", "mode default takes no CUDA graphs"))
        return "none"
    if requested_graphs:
        decisions.append(Decision("graphs", requested_graphs, "asked for"))
        return requested_graphs
    decisions.append(
        Decision("graphs", "step", "one launch per step; per-region graphs took 2.4 times as long on an H100")
    )
    return "step"


def _decide_context(recipe: Recipe, architecture: Architecture, decisions: list[Decision]) -> int:
    limit = architecture.longrope_limit or architecture.context
    if recipe.context is None:
        reason = "beyond it the whole batch would change its rotary factors" if architecture.longrope_limit else ""
        decisions.append(Decision("context", str(limit), reason or "the model's own", is_fallback=bool(reason)))
        return limit
    if not 2 <= recipe.context <= limit:
        raise UsageError(
            f"context {recipe.context} is not between 2 and the {limit} tokens that this model can be served with",
            f"--context {limit}",
        )
    decisions.append(Decision("context", str(recipe.context), "asked for"))
    return recipe.context


def _decide_batch_sizes(recipe: Recipe, device: str, decisions: list[Decision]) -> tuple[int, ...]:
    if recipe.batch_sizes is None:
        decisions.append(
            Decision("decode buckets", _comma_separated(DEFAULT_BATCH_SIZES[device]), f"the default on {device}")
        )
        return DEFAULT_BATCH_SIZES[device]
    _check_ascending("batch sizes", recipe.batch_sizes)
    decisions.append(Decision("decode buckets", _comma_separated(recipe.batch_sizes), "asked for"))
    return recipe.batch_sizes


def _decide_prefill_buckets(
    recipe: Recipe, environment: Environment, context: int, decisions: list[Decision]
) -> tuple[Bucket, ...]:
    if recipe.buckets is None:
        lengths = tuple(length for length in DEFAULT_PREFILL_BUCKETS if length <= context) or (context,)
        reason = f"the default, up to the context of {context}"
    else:
        lengths, reason = recipe.buckets, "asked for"
        _check_ascending("buckets", lengths)
        if lengths[-1] > context:
            raise UsageError(
                f"bucket {lengths[-1]} is above the context of {context} tokens",
                "longer prompts are taken in chunks: leave that bucket out",
            )
    if recipe.shapes == "dynamic" and DYNAMIC_SIZES in dict(environment.missing_internals):
        decisions.append(
            Decision("shapes", "static", "torch cannot mark dynamic sizes; see dynamic sizes", is_fallback=True)
        )
    elif recipe.shapes == "dynamic":
        if lengths[-1] <= DYNAMIC_MIN_TOKENS:
            raise UsageError(f"a dynamic range cannot end at {lengths[-1]} tokens", "--buckets 512 --shapes dynamic")
        bucket = Bucket("prefill", lengths[-1], DYNAMIC_MIN_TOKENS)
        decisions.append(
            Decision("prefill buckets", bucket.name.partition(":")[2], "one dynamic program, without graphs")
        )
        return (bucket,)
    decisions.append(Decision("prefill buckets", _comma_separated(lengths), reason))
    return tuple(Bucket("prefill", length) for length in lengths)


def _check_ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or values[0] < 1:
        raise UsageError(
            f"{name} must be 1 or more, and {_comma_separated(values) or 'none'} was given", "such as 1,4,16"
        )
    if any(low >= high for low, high in zip(values, values[1:], strict=False)):
        raise UsageError(
            f"{name} {_comma_separated(values)} are not ascending", _comma_separated(tuple(sorted(set(values))))
        )


def _decide_block_size(recipe: Recipe, decisions: list[Decision]) -> int:
    size = BLOCK_SIZE if recipe.block_size is None else recipe.block_size
    if size < 16 or size & (size - 1):
        raise UsageError(f"block size {size} is not a power of two from 16 on", "--block-size 16")
    reason = "the smallest that the kernels take" if recipe.block_size is None else "asked for"
    decisions.append(Decision("block size", str(size), reason))
    return size


def _decide_memory(
    recipe: Recipe,
    environment: Environment,
    architecture: Architecture,
    device: str,
    dtype: str,
    demand: CacheDemand,
    decisions: list[Decision],
) -> tuple[int, KVSize]:
    workspace = predict_workspace(architecture, dtype, demand, max_prefill_sequences(demand.max_prefill_tokens))
    size = size_kv_cache(recipe, environment, architecture, device, dtype, demand, workspace)
    if size.context < demand.context:
        decisions[:] = [decision for decision in decisions if decision.name != "context"]
        reason = f"KV memory ends before the model's {demand.context}"
        decisions.append(Decision("context", str(size.context), reason, is_fallback=True))
    decisions.append(Decision("KV blocks", f"{size.blocks} ({gib(size.kv_bytes)})", size.reason))
    if device == "cuda":
        parts = ", ".join(f"{name.replace('_', ' ')} {gib(value)}" for name, value in workspace._asdict().items())
        decisions.append(Decision("workspace", gib(workspace.serving_bytes), f"predicted: {parts} (given back)"))
    return workspace.serving_bytes if device == "cuda" else 0, size


def _decide_cache_dir(recipe: Recipe, environment: Environment, decisions: list[Decision]) -> str:
    if recipe.cache_dir:
        folder, reason = os.path.expanduser(recipe.cache_dir), "asked for"
    elif environment.inductor_cache_dir:
        folder, reason = environment.inductor_cache_dir, "TORCHINDUCTOR_CACHE_DIR was set already"
    else:
        folder, reason = f"{environment.user_cache_dir}/tcdeploy", "the default; CI and images want one of their own"
    decisions.append(Decision("cache folder", folder, reason))
    return folder


def _decide_region_and_mode(recipe: Recipe, decisions: list[Decision]) -> None:
    """The choices that have a plain default, so that the printed Plan is complete."""
    region_reasons = {
        "layer": "one program a layer, norms and residuals fused",
        "blocks": "asked for",
        "model": "asked for; compile time grows with the number of layers",
    }
    decisions.append(Decision("region", recipe.region, region_reasons[recipe.region]))
    mode_reasons = {
        "max-autotune": "autotuned kernels",
        "auto": f"each bucket keeps the fastest of several; {recipe.tune_seconds:.0f} s for those beyond the first",
    }
    decisions.append(Decision("mode", recipe.mode, mode_reasons.get(recipe.mode, "Inductor's default kernels")))


def _comma_separated(values: tuple[int, ...]) -> str:
    return ",".join(str(value) for value in values)
