"""A start with the model's code: transformers builds the model, and what the cache folder lacks is compiled.

In a cold start, other processes may compile some of the buckets (start/workers/parallel.py). In an eager start, another
process compiles all of them, while the server runs uncompiled steps (start/eager.py).
"""

from __future__ import annotations

from tcdeploy.host.stages import ImportStage, StageTimer

# ruff: noqa: E402 - importing is a stage, and its seconds are reported
from tcdeploy.start.decide import decide, origin_of, require_caches  # before the stage below: it is a stage of its own

_import_stage = ImportStage()

import dataclasses
import gc
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.folder.layout import GRAPHS_DIR, REFERENCES_DIR
from tcdeploy.cache.folder.leases import acquire_lease
from tcdeploy.cache.record.manifest import Manifest, Origin
from tcdeploy.cache.staging.activate import activate
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.recording import add_used_files_to_journal
from tcdeploy.cache.staging.restore import copy_finished_buckets, restore_plan
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.parity_check import FIRST_SEED, ParityChecker, StoredReferenceDiffers
from tcdeploy.engine.check.stored_reference import read_reference, reference_path, stores_references, write_reference
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.early_gpu import compiling_kernels_of, start_initializing_gpu
from tcdeploy.engine.warm.program_setup import install_programs
from tcdeploy.engine.warm.warmup import PreviousRun, warm_buckets, warmup_order
from tcdeploy.host.progress import NullProgress, Progress
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION, register_attention
from tcdeploy.kernels.attention.metadata import StepHolder, make_split_counters
from tcdeploy.kernels.experts.interface import use_experts_function
from tcdeploy.kernels.state.layer_state import allocate_state, slot_tensors
from tcdeploy.kernels.state.mechanisms import bind_state
from tcdeploy.models.convert.kv_scales import add_dummy_kv_scales, find_kv_scales, load_kv_scales
from tcdeploy.models.convert.scheme_linear import quantise_inputs
from tcdeploy.models.load_model import load_model, loading_model
from tcdeploy.models.location import local_folder
from tcdeploy.models.weights.reader import ReadTotal
from tcdeploy.planning.backends import FP8_KV
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.aot import PackageExchange
from tcdeploy.programs.regions import find_layers
from tcdeploy.programs.stances import naming_refusal
from tcdeploy.start.auto_programs import may_use_packages
from tcdeploy.start.blind.first_start import check_first_start, loading_reference_products, report_other_targets
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.eager import ProgramSwaps, check_eager_steps, eager_check_buckets, start_worker
from tcdeploy.start.hashing import hash_in_advance, hashing_sources
from tcdeploy.start.loaded_start import FilesToList, LoadedStart, Warmed, count_start, warm
from tcdeploy.start.planned import PlannedModel, StartRequest
from tcdeploy.start.record.factors import start_factors
from tcdeploy.start.record.recorder import StartRecorder
from tcdeploy.start.sequence import run_start
from tcdeploy.start.workers.parallel import CompileWorkers, start_workers
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.inductor.autotune_cache import relocate_autotune_cache
from tcdeploy.torch_compat.inductor.custom_graph_pass import import_compiler
from tcdeploy.torch_compat.inductor.graph_cache_keys import pickle_memory_formats_by_name
from tcdeploy.torch_compat.inductor.kernel_environment import set_kernel_variable
from tcdeploy.torch_compat.inductor.precompiled_headers import use_precompiled_headers
from tcdeploy.torch_compat.triton.kernel import stop_recording_kernels
from tcdeploy.torch_compat.triton.platform_key import patch_platform_key

_import_stage.end()
log = logging.getLogger("tcdeploy.start")


def start_from_code(request: StartRequest) -> Deployment:
    """A deployment with the model's code. Raises TcdeployError."""
    with ExitStack() as cleanup:
        return run_start(ModelCode(request, cleanup), request)


class ModelCode:
    """The source of such a start."""

    runner: ModelRunner
    checker: ParityChecker

    def __init__(self, request: StartRequest, cleanup: ExitStack) -> None:
        """`cleanup` ends the threads that initialise the GPU and read the weights, the compile workers, and more."""
        self._request, self._cleanup = request, cleanup
        self._gpu_setup, self._weight_reading = (cleanup.enter_context(ExitStack()) for _ in range(2))
        self._model: PreTrainedModel | None = None  # until the runner has it
        self._weights_read: ReadTotal | None = None
        self._uses_stored_reference = False

    def decide(self) -> PlannedModel:
        if self._request.recipe.device != "cpu":
            self._gpu_setup.callback(start_initializing_gpu())
        request, recipe = self._request, self._request.recipe
        packaged = dataclasses.replace(recipe, programs="aot") if may_use_packages(request) else recipe
        factors = start_factors(packaged, local_folder(recipe.model, recipe.revision))
        self.planned = decide(
            recipe, request.needs_tokenizer, jit_reason=request.jit_reason, policy=request.signing_policy
        )
        self._factors = factors if self.planned.plan.programs == "aot" else None
        if self.planned.plan.programs == "jit":
            import_compiler()  # before `refuse_compilation`, which patches Inductor only if it is imported
        self.prompts = _check_prompts(self.planned)
        return dataclasses.replace(self.planned, traced_model=None)  # the deployment keeps it

    def open_cache(self) -> StagingFolder:
        """Lease the plan, and begin to read the weights, if they are traced."""
        plan, traced = self.planned.plan, self.planned.traced_model
        require_caches(plan)
        if plan.programs == "jit":
            hash_in_advance(is_first_start=False)
        self._staging = activate_plan(self.planned, plan.key)
        self._gpu_setup.close()
        if traced is not None:
            self._model, self._weights_read = self._weight_reading.enter_context(loading_model(traced, plan))
        return self._staging

    def is_deferred(self, file: FileRecord) -> bool:
        return False

    def load(self, earlier: Manifest | None) -> None:
        """Make the runner. `earlier`: the manifest of the plan, whose files are in the staging folder; None if cold."""
        request, planned, staging = self._request, self.planned, self._staging
        self._earlier = earlier
        if earlier is None:
            report_other_targets(planned.plan, planned.environment, request.recipe.compile)
            _refuse_cold_start(planned.plan, staging)
        elif self._is_first_start:
            check_first_start(earlier, planned.environment, staging)
            self._gpu_setup.enter_context(loading_reference_products(planned, self.prompts))
        if planned.plan.programs == "aot":
            hash_in_advance(self._is_first_start)
        compiles_here = self._is_cold and not request.eager
        if compiles_here:
            import_compiler()  # otherwise its seconds would be those of the first bucket
            staging.link_headers()
        use_precompiled_headers(compiles_here, staging.headers_folder)
        self._workers = CompileWorkers(staging)
        if compiles_here and not staging.is_private_copy:
            self._workers = start_workers(planned, self.prompts, staging)
            self._cleanup.callback(self._workers.stop)
        self._recorder = StartRecorder(self._factors if self._may_add_files else None)
        self._cleanup.callback(stop_recording_kernels)
        self.runner, self._model = load_runner(planned, self._model), None
        if request.eager:  # before kernels are precompiled: eager buckets need none for CUDA graphs
            for bucket in planned.plan.buckets:
                self.runner.run_eagerly(bucket)

    def finish_loading(self, stages: StageTimer, tracker: FileAccessTracker) -> None:
        if self.planned.traced_model is not None:
            with stages.stage("weights"):
                self._weight_reading.close()

    def make_checker(self, tracker: FileAccessTracker) -> None:
        """Read the reference, or compute it."""
        self._gpu_setup.close()
        planned, plan = self.planned, self.planned.plan
        hashing = hashing_sources(planned) if self._is_first_start and plan.programs == "aot" else nullcontext()
        with hashing, compiling_kernels_of(self.runner, self._buckets_to_precompile(), self.prompts, tracker):
            self._reference_path = self._find_reference_path()
            stored = None
            # A difference from a stored reference needs the model to be loaded again, which a server cannot do.
            if self._reference_path and not self._request.eager:
                stored = read_reference(Path(self._staging.path, self._reference_path), plan.device)
            with self._recorder.recording_sources():
                self.checker = ParityChecker(
                    self.runner, planned.architecture, planned.config, stored, progress=self._request.progress
                )
        self._uses_stored_reference = stored is not None

    @cached_property
    def origin(self) -> Origin:
        """What programs depend on besides the plan and the machine."""
        return origin_of(self.planned)

    def start_swaps(self, start: LoadedStart) -> ProgramSwaps | None:
        """For an eager start: check the eager steps, and return what warms the buckets while the engine runs."""
        if not self._request.eager:
            return None
        with start.stages.stage("check"):
            self._install_programs(PackageExchange())
            check_eager_steps(self.runner, self.checker)
        worker = partial(start_worker, self.planned, self.runner, self.prompts)
        return ProgramSwaps(start, self.checker, self.prompts, self.files_to_list, worker)

    def warm(self, start: LoadedStart) -> Warmed:
        """If a bucket differs from a stored reference, the model is loaded again. Ends the workers."""
        staging, workers = self._staging, self._workers
        while True:
            try:
                with start.stages.stage("compile"):
                    exchange = _package_exchange(staging, start.plan.key) if workers else PackageExchange()
                    self._install_programs(exchange._replace(report=self._request.progress.detail))
                    wait_for_worker = partial(workers.wait_for, progress=self._request.progress)
                    warmed = warm(start, self.runner, self.checker, wait_for_worker=wait_for_worker)
                break
            except StoredReferenceDiffers as difference:
                # As text: a handler may keep the record, and the exception refers to the model.
                log.warning("the model is loaded again, and its reference computed: %s", str(difference))
            self._load_again(start.stages)
        if not workers:
            return warmed
        workers.stop()
        # A difference of the GPU's free memory, which the workers used too.
        records = [dataclasses.replace(record, graph_memory_bytes=None) for record in warmed.records]
        return warmed._replace(records=records)

    def files_to_list(self, start: LoadedStart, warmed: Warmed) -> FilesToList:
        """Write the reference and the start record, unless the plan has them or cannot get them."""
        path, staging = self._reference_path, self._staging
        is_stored = path is not None and self._uses_stored_reference
        if path is not None and not is_stored and self._may_add_files:
            is_stored = write_reference(Path(staging.path, path), self.checker.reference, start.plan, warmed.records)
        paths = [path] if path is not None and is_stored else []
        paths += self._recorder.write(self.planned, self.runner, self.checker, warmed.records, staging)
        return FilesToList(paths)

    @property
    def tokenizer(self) -> Any:
        return self.planned.tokenizer

    @property
    def weights_read(self) -> ReadTotal | None:
        return self._weights_read

    @property
    def _is_cold(self) -> bool:
        """Whether the plan must be compiled, by this process or another one, and may be."""
        return self._earlier is None and self._request.recipe.compile

    @property
    def _is_first_start(self) -> bool:
        """Whether the plan was built without the GPU, and no start has run its programs."""
        return self._earlier is not None and not self._earlier.has_run

    @property
    def _may_add_files(self) -> bool:
        """Whether to add a file to the plan: not to those of a bundle, nor to a folder that cannot be written.

        A bundle that was packed before its first start lacks the reference and the start record. Starts add them.
        """
        bundle, must_be_signed = self._staging.bundle, self._request.recipe.require_signed
        is_complete = bundle is not None and (must_be_signed or not bundle.lacks_measurements)
        return not is_complete and not self._staging.is_private_copy

    def _buckets_to_precompile(self) -> Collection[Bucket]:
        """Those whose Triton kernels threads compile while the reference is computed."""
        plan = self.planned.plan
        if not self._is_cold:
            return ()
        if self._request.eager:
            return eager_check_buckets(plan)
        return warmup_order(plan)[:1] if self._workers else plan.buckets

    def _install_programs(self, exchange: PackageExchange) -> None:
        install_programs(self.runner, self.planned.architecture, self.origin, self._staging.path, exchange=exchange)

    def _find_reference_path(self) -> str | None:
        """The reference's path in the cache folder; None if it can be neither there nor stored there."""
        listed = self._earlier.files if self._earlier is not None else ()
        lists_reference = any(file.path.startswith(f"{REFERENCES_DIR}/") for file in listed)
        if not stores_references(self.planned.plan) or not (lists_reference or self._may_add_files):
            return None
        return reference_path(self.runner, self.prompts)

    def _load_again(self, stages: StageTimer) -> None:
        """Replace the model by a new one, and its reference by a computed one."""
        del self.runner, self.checker  # free the memory before the model is loaded again
        gc.collect()
        torch.cuda.empty_cache()
        with stages.stage("load"):
            self.runner = load_runner(self.planned)
        with stages.stage("reference"):
            architecture, config = self.planned.architecture, self.planned.config
            self.checker = ParityChecker(self.runner, architecture, config, progress=self._request.progress)
        self._uses_stored_reference = False


def _refuse_cold_start(plan: Plan, staging: StagingFolder) -> None:
    """With `--no-compile`, raise before anything else is done if the cache folder has no program of any plan."""
    if plan.programs == "aot" or not Path(staging.path, GRAPHS_DIR).is_dir():
        with naming_refusal(plan, warmup_order(plan)[0].name):
            compile_refusal.check("a program")


def activate_plan(planned: PlannedModel, plan_key: str) -> StagingFolder:
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


def _check_prompts(planned: PlannedModel) -> CheckPrompts:
    return CheckPrompts(planned.plan, planned.architecture, planned.config, FIRST_SEED)


def _package_exchange(staging: StagingFolder, plan_key: str) -> PackageExchange:
    """Exchanges packages through the journals of the staging folders."""

    def publish(path: Path) -> None:
        staging.add_to_journal(plan_key, [path.relative_to(staging.path).as_posix()])

    return PackageExchange(partial(copy_finished_buckets, staging), publish)


def load_runner(planned: PlannedModel, model: PreTrainedModel | None = None) -> ModelRunner:
    """Bind the model to its state. None: load its weights first. Nothing is compiled yet."""
    plan, architecture = planned.plan, planned.architecture
    register_attention()
    if model is None:
        model = load_model(plan, planned.config, ATTN_IMPLEMENTATION, architecture.packed_linears, planned.traced_model)
        if plan.kv_dtype == FP8_KV and planned.traced_model is None:
            _add_kv_scales(model, planned)
    if plan.fp8_min_rows:
        quantise_inputs((layer.module for layer in find_layers(model, architecture)), plan.fp8_min_rows)
    use_experts_function(model)
    step_holder, state = StepHolder(), allocate_state(plan, architecture)
    bind_state(model, architecture, state, step_holder)
    return ModelRunner(
        model, plan, step_holder, make_split_counters(plan, architecture), architecture.vocab_size,
        slot_tensors=slot_tensors(architecture, state),
    )  # fmt: skip


def _add_kv_scales(model: PreTrainedModel, planned: PlannedModel) -> None:
    """To a model with random weights, or whose weights transformers has loaded; a traced model has them."""
    plan, architecture = planned.plan, planned.architecture
    if plan.load_format == "dummy":
        add_dummy_kv_scales(model, architecture)
    else:
        load_kv_scales(model, architecture, find_kv_scales(plan.model, architecture, planned.checkpoint))


def load_uncompiled(recipe: Recipe, progress: Progress | None = None) -> tuple[PlannedModel, ModelRunner]:
    """The plan, and the loaded model with its state. Compiles nothing, and writes no manifest."""
    progress = progress or NullProgress()
    stages = StageTimer(progress)
    with stages.stage("decide"):
        planned = decide(recipe)
    plan = planned.plan
    count_start()
    progress.planned(plan)
    with stages.stage("load"):
        activate(plan.cache_dir, plan.key, len(plan.buckets), recipe.trust_cache_dir)
        return planned, load_runner(planned)


def compile_buckets(
    recipe: Recipe, plan_key: str, names: Collection[str], report: Callable[[BucketRecord], None]
) -> None:
    """Compile the buckets with these names for another process (start/workers/worker.py), and write no manifest.

    The files of each finished bucket are added to the journal of this process's staging folder, as files of the plan
    `plan_key`, before `report` is called. `recipe`: of a copy of that plan's model. Raises TcdeployError.
    """
    planned = decide(recipe)
    count_start()
    import_compiler()
    hash_in_advance(is_first_start=False)
    staging = activate_plan(planned, plan_key)
    restore_plan(staging, plan_key, rebuild=False)
    copy_finished_buckets(staging)  # buckets of a killed start that the first process has taken over
    staging.link_headers()
    use_precompiled_headers(True, staging.headers_folder)
    runner = load_runner(planned)
    buckets = [bucket for bucket in planned.plan.buckets if bucket.name in names]
    tracker = FileAccessTracker(staging.path)
    with compiling_kernels_of(runner, buckets, _check_prompts(planned), tracker, samples=False):
        checker = ParityChecker(runner, planned.architecture, planned.config)
    exchange = _package_exchange(staging, plan_key)
    install_programs(runner, planned.architecture, origin_of(planned), staging.path, plan_key, exchange)

    def on_finished(record: BucketRecord) -> None:
        add_used_files_to_journal(staging, plan_key, tracker)
        report(record)  # afterwards: the other process copies what the journal lists

    with tracker.track():
        cache_dir = planned.plan.cache_dir
        warm_buckets(runner, checker, PreviousRun(), cache_dir, False, NullProgress(), on_finished, names=names)
