"""A start from ahead-of-time packages, without the model's code and without torch's compiler.

It needs a record that an earlier start has written (start/record/record.py). The weights are read from the checkpoint
to where the programs expect them; on a GPU the programs are loaded and captured meanwhile. Then every bucket is
compared with the stored reference, as in any other start. If something does not fit, `start_from_packages` returns
None, and start/model_code.py starts with transformers; the reason is logged.

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

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.folder.layout import TRITON_DIR
from tcdeploy.cache.folder.leases import acquire_lease
from tcdeploy.cache.record.manifest import Manifest, Origin
from tcdeploy.cache.staging.activate import activate
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.parity_check import FIRST_SEED, ParityChecker, StoredReferenceDiffers
from tcdeploy.engine.check.stored_reference import read_reference
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.early_gpu import do_nothing, start_initializing_gpu
from tcdeploy.engine.warm.tuning import CompiledVariant
from tcdeploy.engine.warm.warmup import prepare_buckets
from tcdeploy.errors import CompileError, MismatchError, SpaceError, TcdeployError, TrustError, UsageError
from tcdeploy.host.regular_file import read_regular
from tcdeploy.kernels.attention import ops  # noqa: F401 - registers the ops that packages call
from tcdeploy.kernels.attention.metadata import StepHolder, make_split_counters
from tcdeploy.kernels.experts import ops as expert_ops  # noqa: F401 - registers the ops that packages call
from tcdeploy.kernels.linear import ops as linear_ops  # noqa: F401 - registers the ops that packages call
from tcdeploy.kernels.state import mechanisms  # noqa: F401 - registers the ops that packages call
from tcdeploy.kernels.state.layer_state import allocate_state, named_state, slot_tensors
from tcdeploy.models.weights.reader import ReadTotal, stored_tensors
from tcdeploy.models.weights.sources import DescribedWeights, WeightSource, copy_stored, loading_weights
from tcdeploy.models.weights.weight_paths import weight_files
from tcdeploy.planning.extras import is_installed, require_extra
from tcdeploy.planning.installation import install_command
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.programs.packages import MissingPackageError, PackagedForward
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.loaded_start import FilesToList, LoadedStart, Warmed, warm
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.record.lookup import DoesNotFit, FoundRecord, NoRecord, find_record
from tcdeploy.start.record.record import StartRecord
from tcdeploy.start.sequence import run_start
from tcdeploy.text.stored_tokenizer import load_stored_tokenizer
from tcdeploy.torch_compat.inductor import pdl
from tcdeploy.torch_compat.triton import gluon
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


RECORD_HINT = "use the cache folder, the versions, the model files and the flags that the packages were made with, or "
MAX_KERNELS_BYTES = 1 << 30  # some hundred kernels in base64
# After these, the model is loaded with transformers.
_FALL_BACK = (DoesNotFit, MissingPackageError, CompileError, MismatchError, StoredReferenceDiffers, DriverError)


def start_from_packages(request: StartRequest) -> Deployment | None:
    """A deployment without transformers; None if there is no record, or if it does not fit.

    Raises TcdeployError, for example for a damaged cache. Where transformers is not installed, raises UsageError or
    MismatchError instead of returning None. With `--programs auto`, None also if the packages are not trusted.
    """
    kind: type[TcdeployError] = UsageError
    hint = RECORD_HINT + install_command("compile")
    try:
        with contextlib.ExitStack() as cleanup:
            return run_start(Packages(request, cleanup), request)
    except NoRecord as error:
        reason = str(error)
    except _FALL_BACK as error:  # do not store `error`: its traceback would keep the weights in memory
        reason = str(error)
        if isinstance(error, MismatchError):
            kind, hint = MismatchError, error.hint
        if is_installed("transformers"):
            log.warning("the model is loaded with transformers, because its packages cannot be used: %s", reason)
    except TrustError as error:
        if request.recipe.programs != "auto" or not is_installed("transformers"):
            raise
        log.debug("jit programs may be trusted: %s", error.message)  # resolve_planned says why packages are not used
    if not is_installed("transformers"):
        raise kind(
            f"the packages of {request.recipe.model} cannot be used: {reason}; and transformers, which could load the "
            "model instead, is not installed",
            hint,
        )
    use_stored_kernels(None)
    pdl.use_recorded_support(None)
    gluon.use_recorded_support(None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


class Packages:
    """The source of such a start."""

    runner: ModelRunner
    checker: ParityChecker

    def __init__(self, request: StartRequest, cleanup: contextlib.ExitStack) -> None:
        """`cleanup` ends the threads that initialise the GPU and read the weights."""
        self._request = request
        self._gpu_setup = cleanup.enter_context(contextlib.ExitStack())
        self._weight_reading = cleanup.enter_context(contextlib.ExitStack())
        self._prepared: dict[Bucket, CompiledVariant] = {}
        self.tokenizer: Any = None

    def decide(self) -> FoundRecord:
        wait_for_gpu = do_nothing if self._request.recipe.device == "cpu" else start_initializing_gpu()
        self._found = find_record(self._request)  # without a record, start/model_code.py waits instead
        self._gpu_setup.callback(wait_for_gpu)
        return self._found

    def open_cache(self) -> StagingFolder:
        """Lease the plan. The weights are read from here on, while its files are checked, which takes about 0.1 s."""
        found = self._found
        plan, recipe, record = found.plan, found.recipe, found.record
        needs_triton = plan.device == "cuda" and not record.kernels
        num_buckets = len(plan.buckets)
        self._staging = activate(plan.cache_dir, plan.key, num_buckets, recipe.trust_cache_dir, needs_triton)
        if needs_triton:
            from tcdeploy.torch_compat.triton.platform_key import patch_platform_key  # imports Triton

            patch_platform_key()
        acquire_lease(self._staging.target, plan.key)
        with _checkpoint_errors(plan):
            checkpoint = stored_tensors(weight_files(found.recipe.model, found.folder))
            loading = loading_weights(_weight_sources(record), checkpoint, plan.device)
            self._weights = self._weight_reading.enter_context(loading)
        return self._staging

    def is_deferred(self, file: FileRecord) -> bool:
        """Whether a file stays in the cache folder until it is needed: Triton's hundreds, which stored kernels replace.

        With `require_signed` a damaged one must end the start, so all are compared before it.
        """
        defers_triton = bool(self._found.record.kernels) and not self._found.recipe.require_signed
        return defers_triton and _is_of_triton(file.path)

    def load(self, earlier: Manifest | None) -> None:
        found, staging, weights = self._found, self._staging, self._weights.tensors
        plan, record = found.plan, found.record
        _check_files(found, staging, earlier)
        assert earlier is not None
        self._earlier = earlier
        if record.kernels:
            _use_kernels(found, staging)
        with _checkpoint_errors(plan):
            buffers = load_file(Path(staging.path, record.buffers))
            copy_stored(DescribedWeights(_weight_sources(record), buffers), weights)
        self._state = allocate_state(plan, record.architecture)
        self.runner = self._make_runner()
        if self._request.needs_tokenizer:
            self.tokenizer = _load_tokenizer(found, Path(staging.path))

    def finish_loading(self, stages: StageTimer, tracker: FileAccessTracker) -> None:
        """Load and capture the programs while the weights are read."""
        plan = self._found.plan
        if _prepares_early(plan):
            with stages.stage("programs"), tracker.track():
                # No thread may synchronise the GPU during a capture.
                self._prepared = prepare_buckets(
                    self.runner, plan.cache_dir, self._request.progress, before_captures=self._gpu_setup.close
                )
                for tensor in itertools.chain(*self._state):
                    tensor.zero_()  # steps with half the weights may have written infinities
        with stages.stage("weights"), _checkpoint_errors(plan):
            self._weight_reading.close()

    def make_checker(self, tracker: FileAccessTracker) -> None:
        record, plan = self._found.record, self._found.plan
        stored = read_reference(Path(self._staging.path, record.reference), plan.device)
        config = _StoredConfig(record.config)
        prompts = CheckPrompts(plan, record.architecture, config, FIRST_SEED)
        if stored is None or not stored.rows.keys() >= set(prompts.all_prefixes()):
            raise DoesNotFit(f"{record.reference} does not hold the reference of this plan")
        self.checker = ParityChecker(self.runner, record.architecture, config, stored)

    @property
    def origin(self) -> Origin:
        return dataclasses.replace(self._earlier.origin, recipe=dataclasses.asdict(self._found.recipe))

    def start_swaps(self, start: LoadedStart) -> None:
        """No start from packages is eager."""

    def warm(self, start: LoadedStart) -> Warmed:
        with start.stages.stage("compile"):
            return warm(start, self.runner, self.checker, self._prepared)

    def files_to_list(self, start: LoadedStart, warmed: Warmed) -> FilesToList:
        """The record's files, and those of Triton's cache: a launch that no stored kernel fits needs them."""
        found, staging = self._found, self._staging
        triton = [file for file in self._earlier.files if _is_of_triton(file.path)]
        kept = [file.path for file in triton if file in staging.deferred or Path(staging.path, file.path).is_file()]
        # Launches through Triton may have changed its files. A private copy has no manifest yet.
        keeps_manifest = (not found.record.kernels or staging.deferred != ()) and not staging.is_private_copy
        return FilesToList([found.path, *found.record.files(), *kept], keeps_manifest)

    def _make_runner(self) -> ModelRunner:
        plan, record = self._found.plan, self._found.record
        constants = {f"weight/{name}": tensor for name, tensor in self._weights.tensors.items()}
        constants |= named_state(record.architecture, self._state)
        folder = Path(self._staging.path, record.package_folder)
        forward = PackagedForward(constants, record.supports_logits_to_keep, plan, folder)
        counters = make_split_counters(plan, record.architecture)
        runner = ModelRunner(
            None, plan, StepHolder(), counters, record.architecture.vocab_size, forward,
            slot_tensors(record.architecture, self._state),
        )  # fmt: skip
        variants = {bucket.bucket: bucket.variant for bucket in self._earlier.buckets}
        for bucket in plan.buckets:
            for variant in plan.variants(bucket):
                if variant.name == variants.get(bucket.name):
                    runner.set_variant(bucket, variant)
        return runner

    @property
    def weights_read(self) -> ReadTotal:
        return self._weights.total


def _check_files(found: FoundRecord, staging: StagingFolder, earlier: Manifest | None) -> None:
    """Raise DoesNotFit unless the files of the record are among the checked files of the plan."""
    paths = {file.path for file in earlier.files} if earlier is not None else set[str]()
    for path in (found.path, *found.record.files()):
        if path not in paths:
            raise DoesNotFit(f"{path} is not listed in the plan's manifest")
    if read_regular(Path(staging.path, found.path)) != found.content:
        raise DoesNotFit(f"{found.path} has changed while it was read")


def _is_of_triton(path: str) -> bool:
    return path.startswith(f"{TRITON_DIR}/")


def _use_kernels(found: FoundRecord, staging: StagingFolder) -> None:
    """Launch our Triton kernels without Triton. Raises DoesNotFit if their file cannot be read."""
    try:
        content = read_regular(Path(staging.path, found.record.kernels), MAX_KERNELS_BYTES)
        kernels = StoredKernels(content.decode())
        use_stored_kernels(kernels, prepare_triton=lambda: _restore_triton_files(staging))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DoesNotFit(f"{found.record.kernels} cannot be read: {error}") from error
    missing = dict(found.environment.missing_internals)
    pdl.use_recorded_support(pdl.supported.name not in missing)
    gluon.use_recorded_support(gluon.supported.name not in missing)


def _restore_triton_files(staging: StagingFolder) -> None:
    """Copy the deferred files, for a launch that no stored kernel fits. Triton compiles what is missing."""
    try:
        if damage := staging.fill_deferred():
            log.warning("Triton compiles kernels again: %s %s", damage[0].path, damage[0].reason)
    except TcdeployError as error:
        log.warning("Triton compiles its kernels again, because its files cannot be used: %s", error.message)


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


def _load_tokenizer(found: FoundRecord, staging_folder: Path) -> Any:
    """The stored tokenizer; that of transformers if it could not be stored."""
    if found.record.tokenizer is not None:
        return load_stored_tokenizer(found.record.tokenizer, staging_folder, found.folder)
    require_extra("compile", f"load the tokenizer of this model, because {found.record.tokenizer_problem}")
    from tcdeploy.text.tokenizer import load_tokenizer  # imports transformers

    recipe = found.recipe
    # From the folder of the weights, because a model of the Hub may have changed.
    is_on_hub = not recipe.model.startswith("builtin:") and not Path(recipe.model).is_dir()
    return load_tokenizer(dataclasses.replace(recipe, model=str(found.folder), revision=None) if is_on_hub else recipe)
