"""From a recipe to a running deployment: the one path that every command takes.

A cold start and a warm start are this path at two speeds. Read `prepare` from top to bottom; each line is a stage,
and its seconds stand in the manifest.
"""

from __future__ import annotations

# ruff: noqa: E402 - the imports below are a stage of their own: 15 s on a cold disk, so they are measured
import time

_import_started = time.perf_counter()

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.attention.interface import (
    ATTN_IMPLEMENTATION,
    bind_attention,
    empty_attention_metadata,
    register_attention,
)
from tcdeploy.attention.kv_cache import allocate_kv_cache
from tcdeploy.cache import folder as cache_folder
from tcdeploy.cache import toolchain
from tcdeploy.cache.contents import TOOLCHAIN_DIR, FileAccessTracker, FileRecord, hash_files
from tcdeploy.cache.manifest import (
    BucketRecord,
    Manifest,
    Origin,
    make_manifest,
    make_origin,
    manifest_path,
    write_manifest,
)
from tcdeploy.compiler.explain import GraphBreak, explain_regions
from tcdeploy.compiler.programs import compile_regions
from tcdeploy.compiler.regions import find_head_modules, find_layers, regions_to_compile
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.warmup import PreviousRun, warm_buckets
from tcdeploy.gc_policy import freeze_gc_after_startup
from tcdeploy.models.load import config_to_dict, load_config, load_model, load_tokenizer
from tcdeploy.models.packed_linears import pack_linears
from tcdeploy.models.probe import probe
from tcdeploy.passes.post_grad import sources_digest
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.environment import Environment, detect_environment
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.progress import NullProgress, Progress
from tcdeploy.torch_compat.autotune_cache import relocate_autotune_cache
from tcdeploy.torch_compat.graph_cache_keys import pickle_memory_formats_by_name
from tcdeploy.torch_compat.inductor_settings import torch_settings
from tcdeploy.torch_compat.inductor_workers import patch_compile_workers
from tcdeploy.torch_compat.precompiled_headers import use_precompiled_headers
from tcdeploy.torch_compat.registry import missing_internals
from tcdeploy.torch_compat.triton_platform_key import patch_platform_key

IMPORT_SECONDS = time.perf_counter() - _import_started
_prepare_calls = 0  # of this process


@dataclass(frozen=True)
class PlannedDeployment:
    """What is known before a weight is loaded."""

    recipe: Recipe
    config: PreTrainedConfig
    environment: Environment
    architecture: Architecture
    plan: Plan
    toolchain: toolchain.Toolchain | None = None  # that made the cached programs, where this machine has none


@dataclass(frozen=True)
class Deployment:
    """A warmed model: `engine` serves it, `records` prove it."""

    plan: Plan
    architecture: Architecture
    engine: Engine
    records: tuple[BucketRecord, ...]
    stage_seconds: dict[str, float]
    cache_dir: str  # the plan's, or a private copy of it where that cannot be written
    workspace_bytes: int | None = None  # measured on the device; `plan.workspace_bytes` was predicted

    @cached_property
    def tokenizer(self) -> Any:
        """Loaded when it is first asked for: warming needs none. Raises ModelError where the model brings none."""
        return load_tokenizer(self.plan)


def prepare(recipe: Recipe, progress: Progress | None = None, measure: bool = False) -> Deployment:
    """Model id in, warmed deployment out. `measure` also times each bucket, eager and compiled.

    Python's garbage collector spares from then on what this process holds at the end (`gc.freeze`). Whoever drops a
    deployment and wants its memory back calls `gc.unfreeze()` and `gc.collect()`; the next `prepare` does so too.
    """
    global _prepare_calls
    _prepare_calls += 1
    progress = progress or NullProgress()
    stages = _StageTimer(progress)
    if gc.get_freeze_count():  # an earlier deployment of this process may be garbage by now, and hold memory
        gc.unfreeze()
        gc.collect()
    planned = decide(recipe, progress, stages)
    plan, architecture = planned.plan, planned.architecture
    with stages.stage("load"):
        cache_dir = cache_folder.activate(plan.cache_dir, plan.key, len(plan.buckets))
        pickle_memory_formats_by_name()
        if plan.device == "cuda":
            patch_platform_key()
            patch_compile_workers()
            relocate_autotune_cache()
        cache_folder.acquire_lease(cache_dir, plan.key)
        earlier = cache_folder.read_verified_manifest(
            cache_dir, plan.key, recipe.on_bad_cache == "rebuild", plan.cache_dir
        )
        use_precompiled_headers(earlier is None)
        if planned.toolchain:
            toolchain.install_compiler_stub(planned.toolchain)
        runner = _load(planned)
    with stages.stage("compile"):
        layers = find_layers(runner.model, architecture)
        head_modules = (
            find_head_modules(runner.model, layers) if plan.graphs == "step" and plan.region != "model" else []
        )
        compile_regions(regions_to_compile(runner.model, layers, plan.region), head_modules, plan, runner.step)
        known = _earlier_results(planned, earlier)
        with FileAccessTracker(cache_dir).track() as used:
            records = warm_buckets(runner, architecture, known, cache_dir, measure, progress)
        freeze_gc_after_startup()
    with stages.stage("record"):
        files = _hash_used_files(planned, cache_dir, used, earlier)
    workspace_bytes = _workspace_bytes(plan)
    environment, origin = planned.environment, origin_of(planned)
    manifest = make_manifest(
        plan, environment, origin, stages.seconds, records, files, workspace_bytes, _is_first_prepare()
    )
    write_manifest(manifest_path(cache_dir, plan.key), manifest)
    return Deployment(plan, architecture, Engine(runner), tuple(records), stages.seconds, cache_dir, workspace_bytes)


def _earlier_results(planned: PlannedDeployment, earlier: Manifest | None) -> PreviousRun:
    if earlier is None:
        return PreviousRun()
    here, there = origin_of(planned), earlier.origin
    is_same = (here.sources, here.torch_settings) == (there.sources, there.torch_settings)
    names = frozenset(record.bucket for record in earlier.buckets) if is_same else frozenset()
    return PreviousRun(names, earlier.cold_seconds(), earlier.trials(), earlier.plan.get("tune_seconds", 0.0))


def origin_of(planned: PlannedDeployment) -> Origin:
    """What programs are made from here, beside plan and machine."""
    return make_origin(planned.recipe, config_to_dict(planned.config), sources_digest(), torch_settings())


def _hash_used_files(
    planned: PlannedDeployment, cache_dir: str, used: FileAccessTracker, earlier: Manifest | None
) -> tuple[FileRecord, ...]:
    """What this start used of the cache folder, hashed; the compiler's answers among it, if it made any of that.

    With what an earlier one used, where this process may have held programs already.
    """
    known = [file.path for file in earlier.files if file.path.startswith(TOOLCHAIN_DIR)] if earlier else []
    compiler = known[0] if known else toolchain.save_toolchain(cache_dir)
    before = [file.path for file in earlier.files] if earlier and not _is_first_prepare() else []
    return hash_files(cache_dir, {*used.paths(), *before, *([compiler] if compiler else [])})


def _is_first_prepare() -> bool:
    return _prepare_calls == 1


def release_memory() -> None:
    """Give back what dropped deployments held: device memory, programs, and what the collector was told to spare."""
    torch.compiler.reset()
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _workspace_bytes(plan: Plan) -> int | None:
    """What the device has given away beyond weights and KV, to this process and any other; None without a GPU."""
    if plan.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what only warming took
    free, total = torch.cuda.mem_get_info()
    return total - free - plan.weight_bytes - plan.kv_bytes


def decide(recipe: Recipe, progress: Progress | None = None, stages: _StageTimer | None = None) -> PlannedDeployment:
    """Everything that can be decided without weights; what `--dry-run` prints."""
    progress = progress or NullProgress()
    stages = stages or _StageTimer(progress)
    with stages.stage("decide"):
        environment = dataclasses.replace(detect_environment(), missing_internals=missing_internals())
        config = load_config(recipe)
        architecture = probe(config, recipe.trust_remote_code)
        planned = PlannedDeployment(
            recipe, config, environment, architecture, make_plan(recipe, environment, architecture)
        )
        if not environment.compiler and toolchain.is_compiler_missing():
            planned = _with_cached_toolchain(planned)
    progress.planned(planned.plan)
    return planned


def _with_cached_toolchain(planned: PlannedDeployment) -> PlannedDeployment:
    """Without a C++ compiler: as if there were the one that made the plan's programs in the cache, if one did."""
    for recorded in toolchain.load_toolchains(planned.plan.cache_dir):
        found = with_cxx_compiler(planned, recorded.version)
        if manifest_path(found.plan.cache_dir, found.plan.key).is_file():
            return dataclasses.replace(found, toolchain=recorded)
    return planned


def with_cxx_compiler(planned: PlannedDeployment, version: str) -> PlannedDeployment:
    """What would be decided if the C++ compiler were this one."""
    environment = dataclasses.replace(planned.environment, compiler=version)
    plan = make_plan(planned.recipe, environment, planned.architecture)
    return dataclasses.replace(planned, environment=environment, plan=plan)


def explain_breaks(recipe: Recipe, progress: Progress | None = None) -> list[GraphBreak]:
    """Where and why tracing would break, for each class of region, in prefill and in decode. Compiles nothing."""
    planned = decide(recipe, progress)
    cache_folder.activate(planned.plan.cache_dir, planned.plan.key, len(planned.plan.buckets))
    runner = _load(planned)
    prompt = Sequence(0, [0, 0], 2, SamplingParams(), blocks=[1])
    regions = _regions(runner.model, planned)
    found = explain_regions(regions, lambda: runner.prefill([Chunk(prompt, 0, 2)]))
    runner.row_assignment.assign_prefilled([prompt])
    found += explain_regions(regions, lambda: runner.decode([prompt]))
    return list(dict.fromkeys(found))


def _load(planned: PlannedDeployment) -> ModelRunner:
    """Weights, KV cache and the bindings between them, with nothing compiled yet."""
    plan, architecture = planned.plan, planned.architecture
    register_attention()
    model = load_model(plan, planned.config, ATTN_IMPLEMENTATION)
    pack_linears(model, architecture.packed_linears)
    step = empty_attention_metadata(plan, architecture)
    bind_attention(model, architecture, allocate_kv_cache(plan, architecture), plan, step)
    return ModelRunner(model, plan, step, architecture.vocab_size)


def _regions(model: PreTrainedModel, planned: PlannedDeployment) -> list[torch.nn.Module]:
    return regions_to_compile(model, find_layers(model, planned.architecture), planned.plan.region)


@dataclass
class _StageTimer:
    """Seconds per stage, in order."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=lambda: {"import": IMPORT_SECONDS})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
