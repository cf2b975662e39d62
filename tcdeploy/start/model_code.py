"""From a recipe to a running deployment, with the model's code.

A cold start and a warm start take the same path; only a start from packages alone takes another (start/packages.py).
Read `_prepare` from top to bottom: each `with` block is a stage, and its seconds are written to the manifest. In a cold
start, other processes may compile some of the buckets (start/workers/parallel.py); they run `compile_buckets`.
"""

from __future__ import annotations

from tcdeploy.host.stages import ImportStage, StageTimer

# ruff: noqa: E402 - importing is a stage, and its seconds are reported
from tcdeploy.planning.extras import require_compile_extra

_import_stage = ImportStage()
require_compile_extra()

from tcdeploy.models.unused_packages import import_transformers

import_transformers()  # before other modules import it

import dataclasses
import gc
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.folder.access import check_folder
from tcdeploy.cache.folder.layout import GRAPHS_DIR, REFERENCES_DIR, manifest_path
from tcdeploy.cache.folder.leases import acquire_lease
from tcdeploy.cache.record import toolchain
from tcdeploy.cache.record.manifest import Manifest, Origin, diff_sources, make_origin
from tcdeploy.cache.record.provenance import SigningPolicy
from tcdeploy.cache.staging.activate import activate
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.recording import add_used_files_to_journal
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.staging.takeover import copy_finished_buckets, remove_published_folders
from tcdeploy.cache.trust.signing import default_trusted_keys_folder
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.parity_check import FIRST_SEED, ParityChecker, StoredReferenceDiffers
from tcdeploy.engine.check.stored_reference import read_reference, reference_path, stores_references, write_reference
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.generation_defaults import read_model_defaults
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.kernel_precompile import compiling_kernels_of
from tcdeploy.engine.warm.program_setup import install_programs
from tcdeploy.engine.warm.warmup import PreviousRun, warm_buckets, warmup_order
from tcdeploy.errors import UsageError
from tcdeploy.host.progress import NullProgress, Progress
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION, bind_attention, register_attention
from tcdeploy.kernels.attention.kv_cache import allocate_kv_cache
from tcdeploy.kernels.attention.metadata import StepHolder, make_split_counters
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.load import check_checkpoint, config_to_dict, load_config, load_model
from tcdeploy.models.location import local_folder
from tcdeploy.models.probe import ProbedModel, probe_model
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.sources import model_sources as hash_model_sources
from tcdeploy.models.weights.early_weights import EarlyWeights
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.dry_run import PlanFinding, plan_with_findings
from tcdeploy.planning.environment import Environment, detect_environment
from tcdeploy.planning.plan import Bucket, Plan, make_plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.aot import PackageExchange
from tcdeploy.programs.passes.post_grad import op_source_digests
from tcdeploy.programs.stances import naming_refusal, refuse_compilation
from tcdeploy.start.deployment import Deployment, Start, Warmed, count_start, make_deployment, record_start, warm
from tcdeploy.start.eager import (
    ProgramSwaps,
    check_eager_steps,
    eager_check_buckets,
    start_worker,
    switch_to_eager_steps,
)
from tcdeploy.start.planned import PlannedDeployment
from tcdeploy.start.record.factors import start_factors
from tcdeploy.start.record.recorder import StartRecorder
from tcdeploy.start.workers.parallel import CompileWorkers, start_workers
from tcdeploy.text.tokenizer import load_tokenizer
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.inductor.autotune_cache import relocate_autotune_cache
from tcdeploy.torch_compat.inductor.graph_cache_keys import pickle_memory_formats_by_name
from tcdeploy.torch_compat.inductor.installation_hashes import start_hashing
from tcdeploy.torch_compat.inductor.kernel_environment import set_kernel_variable
from tcdeploy.torch_compat.inductor.precompiled_headers import use_precompiled_headers
from tcdeploy.torch_compat.inductor.settings import disabling_settings, settings_digest, torch_settings
from tcdeploy.torch_compat.registry import missing_internals
from tcdeploy.torch_compat.triton.platform_key import patch_platform_key

_import_stage.end()
NO_COMPILER = PlanFinding(
    "compiler",
    "there is no C++ compiler, so only programs that are in the cache folder can run",
    "install g++, or start from a cache that was warmed with these flags: tcdeploy cache why MODEL",
)
log = logging.getLogger("tcdeploy.start")


def prepare(
    recipe: Recipe,
    progress: Progress | None = None,
    measure: bool = False,
    trusted_keys: Path | None = None,
    needs_tokenizer: bool = False,
    eager: bool = False,
    early_weights: EarlyWeights | None = None,
) -> Deployment:
    """Turn a recipe into a warmed deployment. `measure` also times each bucket, uncompiled and compiled.

    `eager`: return a deployment with eager steps, which `Deployment.swaps` replaces by programs (start/eager.py). Call
    it in the thread that then runs the engine.

    `needs_tokenizer`: load the tokenizer before the weights, so that a model without one fails before it is compiled.
    Warming needs none.

    `early_weights`: the weights of the recipe's model, which threads are reading (models/weights/early_weights.py). The
    caller closes it.

    `trusted_keys`: folder of the public keys whose signatures on bundles are trusted; None: the default folder
    (cache/trust/signing.py).

    What this changes in the process: it sets the variables TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR,
    TRITON_CACHE_MANAGER, TRITON_PTXAS_PATH and CUDA_MODULE_LOADING, and puts a folder in front of PATH if it replays a
    recorded compiler; raises torch._dynamo's recompile limits; registers an attention function with transformers and an
    audit hook with Python; and applies the patches of torch_compat/. A cold start may run compile workers as child
    processes, which have ended when this returns, except with `eager`. The garbage collector is changed only if the
    program has called `relax_gc_for_startup`: imported objects are then frozen. Signals and logging are not touched.
    Raises TcdeployError.
    """
    count_start()
    with ExitStack() as cleanup:
        deployment = _prepare(
            recipe, progress or NullProgress(), measure, trusted_keys, needs_tokenizer, eager, early_weights, cleanup
        )
    weights_read = None if early_weights is None else early_weights.weights_read
    return dataclasses.replace(deployment, weights_read=weights_read)


def _prepare(
    recipe: Recipe,
    progress: Progress,
    measure: bool,
    trusted_keys: Path | None,
    needs_tokenizer: bool,
    eager: bool,
    early_weights: EarlyWeights | None,
    cleanup: ExitStack,
) -> Deployment:
    """`cleanup` ends the compile workers, the recording of kernels and the refusal of compilation."""
    stages = StageTimer(progress)
    factors = start_factors(recipe, local_folder(recipe.model, recipe.revision))
    planned = decide(recipe, progress, stages, needs_tokenizer)
    plan, prompts = planned.plan, _check_prompts(planned)
    _require_caches(plan)
    if not recipe.compile:
        cleanup.enter_context(refuse_compilation(plan))
    with stages.stage("load"):
        start_hashing()
        staging = _activate(planned, plan.key)
        policy = SigningPolicy(trusted_keys or default_trusted_keys_folder(), recipe.require_signed)
        earlier = restore_plan(staging, plan.key, recipe.on_bad_cache == "rebuild", policy)
        if earlier is None:
            _refuse_cold_start(plan, staging)
        compiles_here = earlier is None and recipe.compile and not eager
        _set_up_compiler(planned, staging, compiles_here)
        workers = CompileWorkers(staging)
        if compiles_here and not staging.is_private_copy:
            workers = cleanup.enter_context(_start_workers(planned, staging, early_weights))
        recorder = cleanup.enter_context(StartRecorder(factors if _may_add_files(staging) else None))
        with recorder.recording_sources():
            runner = _load(planned, early_weights)
    if eager:  # before kernels are precompiled: eager buckets need none for CUDA graphs
        switch_to_eager_steps(runner)
    kernel_buckets: Collection[Bucket] = ()  # their Triton kernels are compiled in threads; () in a warm start
    if earlier is None and recipe.compile:
        kernel_buckets = eager_check_buckets(plan) if eager else warmup_order(plan)[:1] if workers else plan.buckets
    tracker = FileAccessTracker(staging.path)
    with stages.stage("reference"), compiling_kernels_of(runner, kernel_buckets, prompts, tracker):
        path = _reference_path(planned, runner, staging, earlier)
        # A difference from a stored reference needs the model to be loaded again, which a server cannot do.
        stored = read_reference(Path(staging.path, path), plan.device) if path and not eager else None
        with recorder.recording_sources():
            checker = ParityChecker(runner, planned.architecture, planned.config, stored)
    start = Start(
        recipe=recipe,
        plan=plan,
        environment=planned.environment,
        architecture=planned.architecture,
        generation_defaults=planned.generation_defaults,
        origin=origin_of(planned),
        staging=staging,
        earlier=earlier,
        previous=_previous_run(planned, earlier),
        tokenizer=planned.tokenizer,
    )
    if eager:
        return _start_eagerly(start, planned, runner, checker, tracker, path, stages)
    model = _CheckedModel(runner, checker, stored is not None)
    del runner, checker  # so that `model` holds the only references
    warmed = _warm(start, planned, model, tracker, workers, measure, progress, stages)
    more_paths = _add_reference(model, plan, staging, path, warmed.records, stages)
    if recorder.is_active:
        with stages.stage("record"):
            more_paths += recorder.write(planned, model.runner, model.checker, warmed.records, staging)
    deployment = record_start(start, model.runner, warmed, more_paths, stages)
    if workers:
        remove_published_folders(staging)
    return deployment


def _require_caches(plan: Plan) -> None:
    """Raise UsageError if torch would neither find programs in the cache folder nor store them there.

    Ahead-of-time packages are stored by tcdeploy.
    """
    settings = disabling_settings() if plan.programs == "jit" else []
    if settings:
        raise UsageError(
            f"{settings[0]} switches torch's compile caches off, so each start would compile every program, and the "
            f"cache folder {plan.cache_dir} would stay empty",
            f"unset {settings[0].partition('=')[0]}; to compile everything once more, use an empty --cache-dir",
        )


@dataclass
class _CheckedModel:
    """The loaded model, and the reference that its programs are compared with."""

    runner: ModelRunner
    checker: ParityChecker
    uses_stored_reference: bool


def _refuse_cold_start(plan: Plan, staging: StagingFolder) -> None:
    """With `--no-compile`, raise before the weights are loaded if the cache folder has no program of any plan."""
    if plan.programs == "aot" or not Path(staging.path, GRAPHS_DIR).is_dir():
        with naming_refusal(plan, warmup_order(plan)[0].name):
            compile_refusal.check("a program")


def _set_up_compiler(planned: PlannedDeployment, staging: StagingFolder, compiles: bool) -> None:
    """Make the compiler's headers available if this process compiles a cold start, and replay a recorded compiler."""
    if compiles:
        staging.link_headers()
    use_precompiled_headers(compiles, staging.headers_folder)
    if planned.cached_toolchain:
        toolchain.install_compiler_stub(planned.cached_toolchain)


def _warm(
    start: Start,
    planned: PlannedDeployment,
    model: _CheckedModel,
    tracker: FileAccessTracker,
    workers: CompileWorkers,
    measure: bool,
    progress: Progress,
    stages: StageTimer,
) -> Warmed:
    """Warm all buckets, and end the workers.

    If a bucket differs from a stored reference, the model is loaded again, and `model` changed.
    """
    staging = start.staging
    while True:
        try:
            with stages.stage("compile"):
                exchange = _package_exchange(staging, start.plan.key) if workers else PackageExchange()
                install_programs(model.runner, start.architecture, start.origin, staging.path, exchange=exchange)
                warmed = warm(
                    start, model.runner, model.checker, tracker, measure, progress, wait_for_worker=workers.wait_for
                )
            break
        except StoredReferenceDiffers as difference:
            # As text: a handler may keep the record, and the exception refers to the model.
            log.warning("the model is loaded again, and its reference computed: %s", str(difference))
        _load_again(planned, model, stages)
    if workers:
        workers.stop()
        warmed = warmed._replace(records=[_without_graph_memory(record) for record in warmed.records])
    return warmed


def _load_again(planned: PlannedDeployment, model: _CheckedModel, stages: StageTimer) -> None:
    """Replace the model by a new one, and its reference by a computed one."""
    del model.runner, model.checker  # free the memory before the model is loaded again
    gc.collect()
    torch.cuda.empty_cache()
    with stages.stage("load"):
        model.runner = _load(planned)
    with stages.stage("reference"):
        model.checker = ParityChecker(model.runner, planned.architecture, planned.config)
    model.uses_stored_reference = False


def _add_reference(
    model: _CheckedModel,
    plan: Plan,
    staging: StagingFolder,
    path: str | None,
    records: list[BucketRecord],
    stages: StageTimer,
) -> list[str]:
    """The reference's path in the cache folder, in a list, after storing it there. [] if it is not stored.

    `path`: as `_reference_path` returns it.
    """
    if path and model.uses_stored_reference:
        return [path]
    if not path or not _may_add_files(staging):
        return []
    with stages.stage("record"):
        is_written = write_reference(Path(staging.path, path), model.checker.reference, plan, records)
    return [path] if is_written else []


def _without_graph_memory(record: BucketRecord) -> BucketRecord:
    """Without `graph_memory_bytes`: it is a difference of the GPU's free memory, and other processes used that too."""
    return dataclasses.replace(record, graph_memory_bytes=None)


def compile_buckets(
    recipe: Recipe, plan_key: str, names: Collection[str], report: Callable[[BucketRecord], None]
) -> None:
    """Compile the buckets with these names for another process (start/workers/parallel.py), and write no manifest.

    The files of each finished bucket are added to the journal of this process's staging folder, as files of the plan
    `plan_key`, before `report` is called. `recipe`: of a copy of that plan's model. Raises TcdeployError.
    """
    count_start()
    planned = decide(recipe)
    start_hashing()
    staging = _activate(planned, plan_key)
    restore_plan(staging, plan_key, rebuild=False)
    copy_finished_buckets(staging)  # buckets of a killed start that the first process has taken over
    staging.link_headers()
    use_precompiled_headers(True, staging.headers_folder)
    runner = _load(planned)
    buckets = [bucket for bucket in planned.plan.buckets if bucket.name in names]
    tracker = FileAccessTracker(staging.path)
    with compiling_kernels_of(runner, buckets, _check_prompts(planned), tracker):
        checker = ParityChecker(runner, planned.architecture, planned.config)
    exchange = _package_exchange(staging, plan_key)
    install_programs(runner, planned.architecture, origin_of(planned), staging.path, plan_key, exchange)

    def on_finished(record: BucketRecord) -> None:
        add_used_files_to_journal(staging, plan_key, tracker)
        report(record)  # afterwards: the other process copies what the journal lists

    with tracker.track():
        cache_dir = planned.plan.cache_dir
        warm_buckets(runner, checker, PreviousRun(), cache_dir, False, NullProgress(), on_finished, names=names)


def _activate(planned: PlannedDeployment, plan_key: str) -> StagingFolder:
    """Make torch use a staging folder in the plan's cache folder, and lease the plan `plan_key`."""
    plan = planned.plan
    staging = activate(plan.cache_dir, plan_key, len(plan.buckets), planned.recipe.trust_cache_dir)
    set_kernel_variable()
    pickle_memory_formats_by_name()
    if plan.device == "cuda":
        patch_platform_key()
        relocate_autotune_cache()
    acquire_lease(staging.target, plan_key)
    return staging


def _start_workers(
    planned: PlannedDeployment, staging: StagingFolder, early_weights: EarlyWeights | None
) -> CompileWorkers:
    early_bytes = early_weights.num_bytes if early_weights is not None else 0
    return start_workers(
        planned.recipe, planned.plan, planned.environment, planned.fake_model, planned.config, planned.architecture,
        _check_prompts(planned), staging, early_bytes,
    )  # fmt: skip


def _check_prompts(planned: PlannedDeployment) -> CheckPrompts:
    return CheckPrompts(planned.plan, planned.architecture, planned.config, FIRST_SEED)


def _start_eagerly(
    start: Start,
    planned: PlannedDeployment,
    runner: ModelRunner,
    checker: ParityChecker,
    tracker: FileAccessTracker,
    reference: str | None,
    stages: StageTimer,
) -> Deployment:
    """A deployment with eager steps, and a compile worker unless the programs are cached. `reference`: its path."""
    plan, staging, prompts = start.plan, start.staging, _check_prompts(planned)
    with stages.stage("check"):
        install_programs(runner, start.architecture, start.origin, staging.path)
        check_eager_steps(runner, checker)

    def write_files(records: list[BucketRecord]) -> list[str]:
        if reference is None or not _may_add_files(staging):
            return []
        is_written = write_reference(Path(staging.path, reference), checker.reference, plan, records)
        return [reference] if is_written else []

    worker = None if start.previous.buckets else start_worker(start, runner, planned.config, prompts)
    swaps = ProgramSwaps(start, checker, prompts, tracker, stages, worker, write_files)
    startup = dataclasses.replace(stages, seconds=dict(stages.seconds))  # metrics show what was spent before `ready`
    return make_deployment(start, Engine(runner), startup, records=(), swaps=swaps)


def _reference_path(
    planned: PlannedDeployment, runner: ModelRunner, staging: StagingFolder, earlier: Manifest | None
) -> str | None:
    """The path of this start's reference in the cache folder; None if it can be neither there nor stored there."""
    lists_one = earlier is not None and any(file.path.startswith(f"{REFERENCES_DIR}/") for file in earlier.files)
    if not stores_references(planned.plan) or not (lists_one or _may_add_files(staging)):
        return None
    return reference_path(runner, _check_prompts(planned))


def _may_add_files(staging: StagingFolder) -> bool:
    """Whether to add a file to the plan: not to those of a bundle, nor to a folder that cannot be written."""
    return staging.bundle is None and not staging.is_private_copy


def _previous_run(planned: PlannedDeployment, earlier: Manifest | None) -> PreviousRun:
    if earlier is None:
        return PreviousRun()
    origin, earlier_origin = origin_of(planned), earlier.origin
    is_same = not diff_sources(origin, earlier_origin) and origin.torch_settings == earlier_origin.torch_settings
    names = frozenset(record.bucket for record in earlier.buckets) if is_same else frozenset()
    return PreviousRun(names, earlier.cold_seconds(), earlier.trials(), earlier.plan.get("tune_seconds", 0.0))


def origin_of(planned: PlannedDeployment) -> Origin:
    """What programs depend on besides the plan and the machine."""
    sources, model_sources = op_source_digests(), hash_model_sources(planned.fake_model)
    return make_origin(planned.recipe, config_to_dict(planned.config), sources, torch_settings(), model_sources)


def release_memory() -> None:
    """Free the memory of deployments that are no longer referenced: device memory, programs and frozen objects."""
    torch.compiler.reset()
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decide(
    recipe: Recipe,
    progress: Progress | None = None,
    stages: StageTimer | None = None,
    needs_tokenizer: bool = False,
    is_dry_run: bool = False,
) -> PlannedDeployment:
    """Decide everything before the weights are loaded.

    Of weights on disk, only the headers of safetensors files are read. `needs_tokenizer`: load the tokenizer too, and
    add its end-of-sequence token to the stop tokens. `is_dry_run`: report what this machine lacks in `findings` instead
    of raising an error. Raises ModelError with all reasons if the model cannot be served.
    """
    progress = progress or NullProgress()
    stages = stages or StageTimer(progress)
    with stages.stage("decide"):
        environment = dataclasses.replace(
            detect_environment(recipe.device),
            missing_internals=missing_internals(),
            torch_settings=settings_digest(torch_settings()),
        )
        model = _read_model(recipe, environment, needs_tokenizer, is_dry_run)
        config, architecture, tokenizer = model.config, model.probed.architecture, model.tokenizer
        defaults, decisions = read_model_defaults(recipe, config, architecture, tokenizer)
        if model.stored_dtype and not architecture.dtype:
            architecture = dataclasses.replace(architecture, dtype=model.stored_dtype)
            reason = "dtype of the first floating-point tensor; config.json states none"
            decisions += (Decision("checkpoint dtype", model.stored_dtype, reason),)
        findings: tuple[PlanFinding, ...] = ()
        if is_dry_run:
            plan, recipe, environment, findings = plan_with_findings(recipe, environment, architecture, decisions)
        else:
            plan = make_plan(recipe, environment, architecture, decisions)
        planned = PlannedDeployment(
            recipe, config, environment, architecture, model.probed.model, plan, defaults, decisions,
            tokenizer=tokenizer, findings=findings,
        )  # fmt: skip
        if not environment.compiler and toolchain.is_compiler_missing():
            planned = _with_cached_toolchain(planned)
            if is_dry_run and plan.device == "cpu" and planned.cached_toolchain is None:
                planned = dataclasses.replace(planned, findings=(*findings, NO_COMPILER))
    progress.planned(planned.plan)
    return planned


class _ModelOnFakeTensors(NamedTuple):
    """What `decide` reads of a model. stored_dtype: of the checkpoint, "" if it is not known."""

    config: PreTrainedConfig
    probed: ProbedModel
    stored_dtype: str
    tokenizer: Any


def _read_model(
    recipe: Recipe, environment: Environment, needs_tokenizer: bool, is_dry_run: bool
) -> _ModelOnFakeTensors:
    """Raises ModelError with all reasons why the model cannot be served.

    Too little memory is one of them, unless in a dry run: the model may be planned for another machine.
    """
    refusals, probed, stored_dtype, tokenizer = Refusals(recipe.model), None, "", None
    config = load_config(recipe, refusals)
    with refusals.collecting():
        probed = probe_model(config, recipe.trust_remote_code)
        if not refusals.reasons:  # a quantised checkpoint, for example, has other tensors than the probed model
            stored_dtype = check_checkpoint(recipe, config, probed.tensors)
    with refusals.collecting():
        tokenizer = load_tokenizer(recipe) if needs_tokenizer else None
    if refusals.reasons and probed is not None and not is_dry_run:
        with refusals.collecting():
            make_plan(recipe, environment, probed.architecture)
    refusals.raise_all()
    assert probed is not None
    return _ModelOnFakeTensors(config, probed, stored_dtype, tokenizer)


def _with_cached_toolchain(planned: PlannedDeployment) -> PlannedDeployment:
    """Replan for a recorded C++ compiler whose programs are in the cache; without one, returns `planned` unchanged."""
    check_folder(planned.plan.cache_dir, planned.recipe.trust_cache_dir)
    for recorded in toolchain.load_toolchains(planned.plan.cache_dir):
        replanned = with_cxx_compiler(planned, recorded.version)
        if manifest_path(replanned.plan.cache_dir, replanned.plan.key).is_file():
            return dataclasses.replace(replanned, cached_toolchain=recorded)
    return planned


def with_cxx_compiler(planned: PlannedDeployment, version: str) -> PlannedDeployment:
    """The deployment as planned for another version of the C++ compiler."""
    environment = dataclasses.replace(planned.environment, compiler=version)
    plan = make_plan(planned.recipe, environment, planned.architecture, planned.model_decisions)
    return dataclasses.replace(planned, environment=environment, plan=plan)


def load_uncompiled(recipe: Recipe, progress: Progress | None = None) -> tuple[PlannedDeployment, ModelRunner]:
    """The plan, and the loaded model with a KV cache. Compiles nothing, and writes no manifest."""
    count_start()
    stages = StageTimer(progress or NullProgress())
    planned = decide(recipe, progress, stages)
    plan = planned.plan
    with stages.stage("load"):
        activate(plan.cache_dir, plan.key, len(plan.buckets), recipe.trust_cache_dir)
        return planned, _load(planned)


def _load(planned: PlannedDeployment, early_weights: EarlyWeights | None = None) -> ModelRunner:
    """Load the weights and bind them to a KV cache. Nothing is compiled yet."""
    plan, architecture = planned.plan, planned.architecture
    register_attention()
    model = load_model(plan, planned.config, ATTN_IMPLEMENTATION, early_weights)
    pack_linears(model, architecture.packed_linears)
    step_holder = StepHolder()
    bind_attention(model, architecture, allocate_kv_cache(plan, architecture), step_holder)
    return ModelRunner(model, plan, step_holder, make_split_counters(plan, architecture), architecture.vocab_size)


def _package_exchange(staging: StagingFolder, plan_key: str) -> PackageExchange:
    """Exchanges packages through the journals of the staging folders."""
    return PackageExchange(partial(copy_finished_buckets, staging), partial(staging.add_file_to_journal, plan_key))
