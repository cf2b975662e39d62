"""From a recipe to a running deployment: the one path that every command takes.

A cold start and a warm start are this path at two speeds. Read `prepare` from top to bottom; each line is a stage,
and its seconds stand in the manifest.
"""

from __future__ import annotations

# ruff: noqa: E402 - the imports below are a stage of their own: 15 s on a cold disk, so they are measured
import time

_import_started = time.perf_counter()

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.architecture import Architecture
from tcdeploy.attention.interface import ATTENTION_NAME, bind_attention, empty_step, register_attention
from tcdeploy.attention.kvcache import allocate_kv_cache
from tcdeploy.compiler import cachedir
from tcdeploy.compiler.explain import Break, explain_regions
from tcdeploy.compiler.manifest import BucketRecord, make_manifest, manifest_path, read_manifest, write_manifest
from tcdeploy.compiler.programs import compile_regions
from tcdeploy.compiler.regions import find_edges, find_layers, regions_to_compile
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.warmup import Earlier, warm_buckets
from tcdeploy.environment import Environment, detect_environment
from tcdeploy.models.load import load_config, load_model, load_tokenizer
from tcdeploy.models.probe import probe
from tcdeploy.models.siblings import pack_siblings
from tcdeploy.plan import Plan, make_plan
from tcdeploy.progress import Progress, Silent
from tcdeploy.recipe import Recipe

IMPORT_SECONDS = time.perf_counter() - _import_started


@dataclass(frozen=True)
class Decided:
    """What is known before a weight is loaded."""

    recipe: Recipe
    config: PreTrainedConfig
    environment: Environment
    architecture: Architecture
    plan: Plan


@dataclass(frozen=True)
class Deployment:
    """A warmed model: `engine` serves it, `records` prove it."""

    plan: Plan
    architecture: Architecture
    engine: Engine
    records: tuple[BucketRecord, ...]
    stage_seconds: dict[str, float]
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
    progress = progress or Silent()
    stages = _Stages(progress)
    if gc.get_freeze_count():  # an earlier deployment of this process may be garbage by now, and hold memory
        gc.unfreeze()
        gc.collect()
    decided = decide(recipe, progress, stages)
    plan, architecture = decided.plan, decided.architecture
    manifest_file = manifest_path(plan.cache_dir, plan.key)
    with stages.stage("load"):
        cachedir.activate(plan.cache_dir, len(plan.buckets))
        earlier = read_manifest(manifest_file)
        runner = _load(decided)
    with stages.stage("compile"):
        layers = find_layers(runner.model, architecture)
        edges = find_edges(runner.model, layers) if plan.graphs == "step" and plan.region != "model" else []
        compile_regions(regions_to_compile(runner.model, layers, plan.region), edges, plan, runner.step)
        known = Earlier()
        if earlier:
            known = Earlier(earlier.cold_seconds(), earlier.trials(), earlier.plan.get("tune_seconds", 0.0))
        records = warm_buckets(runner, architecture, known, measure, progress)
        _spare_the_collector()
    workspace_bytes = _workspace_bytes(plan)
    manifest = make_manifest(plan, decided.environment, stages.seconds, records, workspace_bytes)
    write_manifest(manifest_file, manifest)
    return Deployment(plan, architecture, Engine(runner), tuple(records), stages.seconds, workspace_bytes)


def _spare_the_collector() -> None:
    """Python's full collection visits what torch made while it compiled, half a million objects: 0.3 s in which no
    token comes. What stands now is to stay, so it is never visited again."""
    gc.collect()
    gc.freeze()


def _workspace_bytes(plan: Plan) -> int | None:
    """What the device has given away beyond weights and KV, to this process and any other; None without a GPU."""
    if plan.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what only warming took
    free, total = torch.cuda.mem_get_info()
    return total - free - plan.weight_bytes - plan.kv_bytes


def decide(recipe: Recipe, progress: Progress | None = None, stages: _Stages | None = None) -> Decided:
    """Everything that can be decided without weights; what `--dry-run` prints."""
    progress = progress or Silent()
    stages = stages or _Stages(progress)
    with stages.stage("decide"):
        environment = detect_environment()
        config = load_config(recipe)
        architecture = probe(config, recipe.trust_remote_code)
        plan = make_plan(recipe, environment, architecture)
    progress.planned(plan)
    return Decided(recipe, config, environment, architecture, plan)


def explain_breaks(recipe: Recipe, progress: Progress | None = None) -> list[Break]:
    """Where and why tracing would break, for each class of region, in prefill and in decode. Compiles nothing."""
    decided = decide(recipe, progress)
    cachedir.activate(decided.plan.cache_dir, len(decided.plan.buckets))
    runner = _load(decided)
    prompt = Sequence(0, [0, 0], 2, SamplingParams(), blocks=[1])
    regions = _regions(runner.model, decided)
    found = explain_regions(regions, lambda: runner.prefill([Chunk(prompt, 0, 2)]))
    runner.seating.place([prompt])
    found += explain_regions(regions, lambda: runner.decode([prompt]))
    return list(dict.fromkeys(found))


def _load(decided: Decided) -> ModelRunner:
    """Weights, KV cache and the bindings between them, with nothing compiled yet."""
    plan, architecture = decided.plan, decided.architecture
    register_attention()
    model = load_model(plan, decided.config, ATTENTION_NAME)
    pack_siblings(model, architecture.siblings)
    step = empty_step(plan, architecture)
    bind_attention(model, architecture, allocate_kv_cache(plan, architecture), plan, step)
    return ModelRunner(model, plan, step, architecture.vocab_size)


def _regions(model: PreTrainedModel, decided: Decided) -> list[torch.nn.Module]:
    return regions_to_compile(model, find_layers(model, decided.architecture), decided.plan.region)


@dataclass
class _Stages:
    """Seconds per stage, in order."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=lambda: {"import": IMPORT_SECONDS})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
