"""Starts a deployment from ahead-of-time packages, without the model's code and without torch's compiler.

It needs a record that an earlier start has written (start/record/record.py, start/record/lookup.py). The weights are
read from the checkpoint to where the programs expect them; on a GPU the programs are loaded and captured meanwhile.
Then every bucket is compared with the stored reference before it serves, as in any other start. If something does not
fit, `start_from_packages` returns None, and start/model_code.py starts with transformers; the reason is logged.

Our Triton kernels are launched from compiled code in the record (torch_compat/triton/stored_kernels.py). Triton is
imported only for launches that are not in it.

The keys and values that a check needs are computed by the prefill packages, because there is no other forward pass.
Wrong ones change the logits of the buckets that read them.
"""

from __future__ import annotations

# ruff: noqa: E402 - importing is a stage, and its seconds are reported
from tcdeploy.host.stages import ImportStage, StageTimer

_import_stage = ImportStage()

import contextlib
import dataclasses
import gc
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.folder.layout import TRITON_DIR
from tcdeploy.cache.folder.leases import acquire_lease
from tcdeploy.cache.record.manifest import Manifest
from tcdeploy.cache.record.provenance import SigningPolicy
from tcdeploy.cache.staging.activate import activate
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.trust.signing import default_trusted_keys_folder
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.parity_check import FIRST_SEED, ParityChecker, StoredReferenceDiffers
from tcdeploy.engine.check.stored_reference import read_reference
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.gpu_initialization import initializing_gpu
from tcdeploy.engine.warm.tuning import CompiledVariant
from tcdeploy.engine.warm.warmup import PreviousRun, prepare_buckets
from tcdeploy.errors import CompileError, MismatchError, SpaceError, TcdeployError, UsageError
from tcdeploy.host.progress import Progress
from tcdeploy.host.regular_file import read_regular
from tcdeploy.kernels.attention import ops  # noqa: F401 - registers the ops that packages call
from tcdeploy.kernels.attention.kv_cache import LayerKV, allocate_kv_cache
from tcdeploy.kernels.attention.metadata import StepHolder, make_split_counters
from tcdeploy.kernels.linear import ops as linear_ops  # noqa: F401 - registers the ops that packages call
from tcdeploy.models.weights.reader import stored_tensors
from tcdeploy.models.weights.sources import DescribedWeights, LoadingWeights, WeightSource, copy_stored, loading_weights
from tcdeploy.planning.extras import is_installed, require_extra
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.packages import MissingPackageError, PackagedForward
from tcdeploy.programs.stances import refuse_compilation
from tcdeploy.start.deployment import Deployment, Start, count_start, record_start, warm
from tcdeploy.start.record.factors import weight_files
from tcdeploy.start.record.lookup import DoesNotFit, FoundRecord, defaults_name, find_record
from tcdeploy.start.record.record import StartRecord
from tcdeploy.text.stored_tokenizer import load_stored_tokenizer
from tcdeploy.torch_compat.inductor import pdl
from tcdeploy.torch_compat.triton.cuda_driver import DriverError
from tcdeploy.torch_compat.triton.kernel import use_stored_kernels
from tcdeploy.torch_compat.triton.stored_kernels import StoredKernels

_import_stage.end()
log = logging.getLogger("tcdeploy.start")


class _StoredConfig(NamedTuple):
    """Stands in for a config of transformers: CheckPrompts only calls `to_dict`."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.values


RECORD_HINT = (
    "use the cache folder, the versions, the model files and the flags that the packages were made with, or "
    "pip install 'tcdeploy[compile]'"
)
MAX_KERNELS_BYTES = 1 << 30  # some hundred kernels in base64
# After these, the model is loaded with transformers.
_FALL_BACK = (DoesNotFit, MissingPackageError, CompileError, MismatchError, StoredReferenceDiffers, DriverError)


def start_from_packages(
    recipe: Recipe, progress: Progress, trusted_keys: Path | None = None, needs_tokenizer: bool = False
) -> Deployment | None:
    """A warmed deployment as `model_code.prepare` returns it; None if there is no record, or if it does not fit.

    Raises TcdeployError, for example for a damaged cache. Where transformers is not installed, raises UsageError or
    MismatchError instead of returning None.
    """
    stages = StageTimer(progress)
    kind: type[TcdeployError] = UsageError
    hint = RECORD_HINT
    try:
        with contextlib.ExitStack() as gpu:
            if recipe.device != "cpu":
                gpu.enter_context(initializing_gpu())
            with stages.stage("decide"):
                found = find_record(recipe, needs_tokenizer, trusted_keys or default_trusted_keys_folder())
            if found is not None:
                with contextlib.nullcontext() if recipe.compile else refuse_compilation(found.plan):
                    return _start(found, recipe, progress, stages, trusted_keys, needs_tokenizer, gpu)
        reason = "the cache folder has no start record of this model"
    except _FALL_BACK as error:  # do not store `error`: its traceback would keep the weights in memory
        reason = str(error)
        if isinstance(error, MismatchError):
            kind, hint = MismatchError, error.hint
        if is_installed("transformers"):
            log.warning("the model is loaded with transformers, because its packages cannot be used: %s", reason)
    if not is_installed("transformers"):
        raise kind(
            f"the packages of {recipe.model} cannot be used: {reason}; and transformers, which could load the model "
            "instead, is not installed",
            hint,
        )
    use_stored_kernels(None)
    pdl.use_recorded_support(None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _start(
    found: FoundRecord,
    recipe: Recipe,
    progress: Progress,
    stages: StageTimer,
    trusted_keys: Path | None,
    needs_tokenizer: bool,
    gpu: contextlib.ExitStack,
) -> Deployment:
    """`gpu`: is closed before steps are captured, so that no thread synchronises the GPU during a capture."""
    count_start()
    record, plan = found.record, found.plan
    progress.planned(plan)
    with contextlib.ExitStack() as reading:  # the weights are read while this block runs
        with stages.stage("load"):
            needs_triton = plan.device == "cuda" and not record.kernels
            staging = activate(
                plan.cache_dir, plan.key, len(plan.buckets), recipe.trust_cache_dir, uses_triton=needs_triton
            )
            if needs_triton:
                from tcdeploy.torch_compat.triton.platform_key import patch_platform_key  # imports Triton

                patch_platform_key()
            acquire_lease(staging.target, plan.key)
            # The plan's files are verified while the weights are read, which takes about 0.1 s.
            weights = _start_reading(found, reading)
            policy = SigningPolicy(trusted_keys or default_trusted_keys_folder(), recipe.require_signed)
            # Stored kernels replace Triton's files, of which a plan has hundreds. With `require_signed` a damaged one
            # must end the start, so all are compared now.
            defers_triton = bool(record.kernels) and not recipe.require_signed
            earlier = restore_plan(
                staging, plan.key, recipe.on_bad_cache == "rebuild", policy,
                is_deferred=lambda file: defers_triton and _is_of_triton(file.path),
            )  # fmt: skip
            _check_files(found, staging, earlier)
            assert earlier is not None
            if record.kernels:
                _use_kernels(record, staging)
            with _checkpoint_errors(plan):
                described = DescribedWeights(_weight_sources(record), load_file(Path(staging.path, record.buffers)))
                copy_stored(described, weights.tensors)
            kv_cache = allocate_kv_cache(plan, record.architecture)
            runner = _make_runner(record, plan, staging, earlier, weights.tensors, kv_cache)
            tracker = FileAccessTracker(staging.path)
            tokenizer = _load_tokenizer(recipe, found, Path(staging.path)) if needs_tokenizer else None
        prepared: dict[Bucket, CompiledVariant] = {}
        if _prepares_early(plan):
            with stages.stage("programs"), tracker.track():
                prepared = prepare_buckets(runner, plan.cache_dir, before_captures=gpu.close)
                for cache in itertools.chain(*kv_cache):
                    cache.zero_()  # steps with half the weights may have written infinities
        with stages.stage("load"), _checkpoint_errors(plan):
            reading.close()
    with stages.stage("reference"):
        stored, config = read_reference(Path(staging.path, record.reference), plan.device), _StoredConfig(record.config)
        prompts = CheckPrompts(plan, record.architecture, config, FIRST_SEED)
        if stored is None or not stored.rows.keys() >= set(prompts.all_prefixes()):
            raise DoesNotFit(f"{record.reference} does not hold the reference of this plan")
        checker = ParityChecker(runner, record.architecture, config, stored)
    start = Start(
        recipe=recipe,
        plan=plan,
        environment=found.environment,
        architecture=record.architecture,
        generation_defaults=record.defaults[defaults_name(needs_tokenizer)],
        origin=dataclasses.replace(earlier.origin, recipe=dataclasses.asdict(recipe)),
        staging=staging,
        earlier=earlier,
        previous=PreviousRun(
            frozenset(bucket.bucket for bucket in earlier.buckets),
            earlier.cold_seconds(),
            earlier.trials(),
            earlier.plan.get("tune_seconds", 0.0),
        ),
        tokenizer=tokenizer,
    )
    with stages.stage("compile"):
        warmed = warm(start, runner, checker, tracker, False, progress, prepared)
    # List the files of Triton's cache in the manifest, although this start may not have read them: a launch that no
    # stored kernel fits needs them.
    triton_paths = [
        file.path
        for file in earlier.files
        if _is_of_triton(file.path) and (file in staging.deferred or Path(staging.path, file.path).is_file())
    ]
    paths = [found.path, *record.files(), *triton_paths]
    # Launches through Triton may have changed its files. A private copy has no manifest yet.
    keeps_manifest = (not record.kernels or staging.deferred != ()) and not staging.is_private_copy
    deployment = record_start(start, runner, warmed, paths, stages, keeps_manifest)
    return dataclasses.replace(deployment, weights_read=weights.total)


def _start_reading(found: FoundRecord, reading: contextlib.ExitStack) -> LoadingWeights:
    """Read the weights until `reading` is closed."""
    with _checkpoint_errors(found.plan):
        checkpoint = stored_tensors(weight_files(found.folder))
        return reading.enter_context(loading_weights(_weight_sources(found.record), checkpoint, found.plan.device))


def _check_files(found: FoundRecord, staging: StagingFolder, earlier: Manifest | None) -> None:
    """Raise DoesNotFit unless the files of the record are among the checked files of the plan."""
    paths = {file.path for file in earlier.files} if earlier is not None else set[str]()
    record = found.record
    for path in (found.path, *record.files()):
        if path not in paths:
            raise DoesNotFit(f"{path} is not listed in the plan's manifest")
    if read_regular(Path(staging.path, found.path)) != found.content:
        raise DoesNotFit(f"{found.path} has changed while it was read")


def _is_of_triton(path: str) -> bool:
    return path.startswith(f"{TRITON_DIR}/")


def _use_kernels(record: StartRecord, staging: StagingFolder) -> None:
    """Launch our Triton kernels without Triton. Raises DoesNotFit if their file cannot be read."""
    try:
        kernels = StoredKernels(read_regular(Path(staging.path, record.kernels), MAX_KERNELS_BYTES).decode())
        use_stored_kernels(kernels, prepare_triton=lambda: _restore_triton_files(staging))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DoesNotFit(f"{record.kernels} cannot be read: {error}") from error
    pdl.use_recorded_support(pdl.INTERNAL.name not in dict(record.missing_internals))


def _restore_triton_files(staging: StagingFolder) -> None:
    """Copy the deferred files before Triton runs, for a launch that no stored kernel fits.

    Triton compiles what is missing, so an error is only logged.
    """
    try:
        damage = staging.fill_deferred()
    except TcdeployError as error:
        log.warning("Triton compiles its kernels again, because its files cannot be used: %s", error.message)
    else:
        if damage:
            log.warning("Triton compiles kernels again: %s %s", damage[0].path, damage[0].reason)


def _prepares_early(plan: Plan) -> bool:
    """Whether steps run while the weights are read. On a CPU they would slow each other down."""
    return plan.device == "cuda"


def _weight_sources(record: StartRecord) -> dict[str, WeightSource]:
    return {name: WeightSource(dtype, tuple(shape), source) for name, (dtype, shape, source) in record.weights.items()}


@contextlib.contextmanager
def _checkpoint_errors(plan: Plan) -> Iterator[None]:
    """Translates the errors of `loading_weights` and `copy_stored`."""
    try:
        yield
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise DoesNotFit(f"the checkpoint does not fit: {error}") from error
    except torch.OutOfMemoryError as error:
        raise SpaceError(
            f"the weights of {plan.model} do not fit into the GPU's free memory",
            "free GPU memory (nvidia-smi lists the processes), or use a smaller model",
        ) from error
    except RuntimeError as error:  # of CUDA, such as too little memory for page-locked buffers
        raise DoesNotFit(f"the weights cannot be read: {str(error).splitlines()[0]}") from error


def _make_runner(
    record: StartRecord,
    plan: Plan,
    staging: StagingFolder,
    earlier: Manifest,
    weights: dict[str, Tensor],
    kv_cache: list[LayerKV],
) -> ModelRunner:
    constants = {f"weight/{name}": tensor for name, tensor in weights.items()}
    for index, (k_cache, v_cache) in enumerate(kv_cache):
        constants |= {f"kv/{index}/k": k_cache, f"kv/{index}/v": v_cache}
    forward = PackagedForward(
        constants, record.supports_logits_to_keep, plan, Path(staging.path, record.package_folder)
    )
    counters = make_split_counters(plan, record.architecture)
    runner = ModelRunner(None, plan, StepHolder(), counters, record.architecture.vocab_size, forward)
    variants = {bucket.bucket: bucket.variant for bucket in earlier.buckets}
    for bucket in plan.buckets:
        for variant in plan.variants(bucket):
            if variant.name == variants.get(bucket.name):
                runner.set_variant(bucket, variant)
    return runner


def _load_tokenizer(recipe: Recipe, found: FoundRecord, cache_dir: Path) -> Any:
    """The stored tokenizer; that of transformers if it could not be stored."""
    if found.record.tokenizer is not None:
        return load_stored_tokenizer(found.record.tokenizer, cache_dir, found.folder)
    require_extra("compile", f"load the tokenizer of this model, because {found.record.tokenizer_problem}")
    from tcdeploy.text.tokenizer import load_tokenizer  # imports transformers

    # From the folder of the weights, because a model of the Hub may have changed.
    is_on_hub = not recipe.model.startswith("builtin:") and not Path(recipe.model).is_dir()
    return load_tokenizer(dataclasses.replace(recipe, model=str(found.folder), revision=None) if is_on_hub else recipe)
