"""Builds the programs of a plan for a GPU that this machine does not have. Runs in a process of its own (worker.py).

The model has its shapes and no values. torch, Triton and Inductor get the answers of the described GPU
(torch_compat/blind/), and compile the same programs and kernels as there: packages or jit programs, the kernels of our
ops for every shape that is captured, and those of the parity check. Nothing runs, so there is no reference, no parity
and no timing. The manifest has the outcome `blind` for each bucket, and a start on the GPU checks them
(start/blind/first_start.py).

Not built: CUDA graphs, the reference, step costs, start records, kernels of other packages (FlashAttention), and what
`--tune-seconds` would time.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tcdeploy.cache.files.records import hash_files
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.record.manifest import BlindBuild, Manifest
from tcdeploy.cache.staging.recording import publish
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.parity_check import FIRST_SEED
from tcdeploy.engine.step.batch import GraphKey
from tcdeploy.engine.warm.early_gpu import launch_kernels
from tcdeploy.engine.warm.program_setup import install_programs, traced_layers
from tcdeploy.errors import CompileError, UsageError
from tcdeploy.kernels.attention.ops import HOST_SCALARS
from tcdeploy.kernels.custom_op import NAMESPACE, implementations
from tcdeploy.kernels.experts.interface import EXPERTS_IMPLEMENTATION, run_experts
from tcdeploy.planning.bucket_record import BucketRecord, blind_record
from tcdeploy.planning.gpu_description import GPUDescription
from tcdeploy.planning.plan import Bucket
from tcdeploy.planning.recipe import Recipe
from tcdeploy.planning.variants import untimed_variants
from tcdeploy.programs.aot import package_folder
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.errors import translate_compile_errors
from tcdeploy.start.auto_programs import why_not_exported
from tcdeploy.start.blind.package_forward import BlindForward
from tcdeploy.start.blind.winners import measured_winners
from tcdeploy.start.decide import decide, origin_of
from tcdeploy.start.model_code import activate_plan, load_runner
from tcdeploy.start.planned import PlannedModel
from tcdeploy.torch_compat.blind.device import choices
from tcdeploy.torch_compat.blind.fake_cuda import FakeCuda
from tcdeploy.torch_compat.blind.launches import CapturedShapes, launch_while_compiling
from tcdeploy.torch_compat.dynamo.compile_threads import without_compile_workers

log = logging.getLogger("tcdeploy.start")
CompileBucket: TypeAlias = Callable[[Bucket], None]


def build_plan(recipe: Recipe, target: GPUDescription, winners: Path | None) -> tuple[str, str]:
    """Build the plan of a recipe for `target`, and write its manifest. Returns its key and its cache folder.

    `winners`: a folder with autotuner results of Inductor, used instead of its defaults. Raises TcdeployError.
    """
    planned = _decide(recipe, target)
    builder = _Builder(planned, winners)
    with without_compile_workers():  # other processes do not have the answers of the described GPU
        records = builder.build()
    builder.publish(records, BlindBuild(target, tuple(choices)))
    return planned.plan.key, builder.staging.target


def _decide(recipe: Recipe, target: GPUDescription) -> PlannedModel:
    wants_packages = recipe.programs != "jit"
    planned = decide(replace(recipe, programs="aot" if wants_packages else "jit"), needs_weights=False, target=target)
    if wants_packages and (reason := why_not_exported(planned)):
        raise UsageError(reason, "build jit programs: --programs jit")
    return planned


class _Builder:
    """The state of one build: the runner on fake tensors, and the files that its launches use."""

    def __init__(self, planned: PlannedModel, winners: Path | None) -> None:
        self.planned, self.plan, self.origin = planned, planned.plan, origin_of(planned)
        self.staging = activate_plan(planned, planned.plan.key)
        if winners is not None:
            copy_winners(winners, Path(self.staging.path))
        self._tracker = FileAccessTracker(self.staging.path)
        self._fake_cuda = FakeCuda(NAMESPACE, implementations)
        self._package_paths: Callable[[], Iterable[Path]] = tuple
        log.info("model")
        without_values = replace(planned, plan=replace(self.plan, load_format="dummy"), traced_model=None)
        with self._fake_cuda.tensors():
            self._runner = load_runner(without_values)

    def build(self) -> list[BucketRecord]:
        self._compile_kernels_of_checks()
        compile_bucket = self._use_packages() if self.plan.programs == "aot" else self._use_jit_programs()
        records = []
        for number, bucket in enumerate(self.plan.buckets, 1):
            log.info("%s (%d of %d)", bucket.name, number, len(self.plan.buckets))
            records.append(self._build_bucket(bucket, compile_bucket))
        with self._fake_cuda.tensors(runs_ops=True), self._tracker.track():
            self._runner.launch_sampling_kernels()
        return records

    def _compile_kernels_of_checks(self) -> None:
        """Compile the kernels of the parity check's steps, and those that end each step.

        These steps run the model's own code, which may depend on values.
        """
        log.info("kernels of the parity check")
        prompts = CheckPrompts(self.plan, self.planned.architecture, self.planned.config, FIRST_SEED)
        with self._fake_cuda.tensors(runs_ops=True), self._tracker.track(), _experts_without_values():
            try:
                launch_kernels(self._runner, self.plan.buckets, prompts, samples=False)
            except Exception as error:  # of torch, Triton or the model, which share no base class
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                choices[f"kernels of uncompiled steps: the first start on the GPU compiles them ({reason})"] = None
            self._runner.row_assignment.clear()

    def _build_bucket(self, bucket: Bucket, compile_bucket: CompileBucket) -> BucketRecord:
        variant = untimed_variants(self.plan.variants(bucket))[0]
        self._runner.set_variant(bucket, variant)
        with translate_compile_errors(self.plan, self.plan.cache_dir), measure_compiles() as stats:
            compile_bucket(bucket)
        if stats.counts.outcome == "uncached":
            raise CompileError(f"torch does not store the programs of {bucket.name}", "build packages: --programs aot")
        return blind_record(bucket.name, variant.name, stats.seconds, stats.counts.programs)

    def _use_jit_programs(self) -> CompileBucket:
        """Runs each captured shape on fake tensors: the first run compiles, and all launch the kernels of our ops."""
        install_programs(self._runner, self.planned.architecture, self.origin, self.staging.path)

        def compile_bucket(bucket: Bucket) -> None:
            shapes = self.plan.graph_shapes(bucket) or ((bucket.size, 0),)
            with self._fake_cuda.tensors(runs_ops=True), self._tracker.track():
                for tokens, rows in reversed(shapes):
                    self._runner.run_uncaptured(GraphKey(bucket, tokens, rows))

        return compile_bucket

    def _use_packages(self) -> CompileBucket:
        """Exports and compiles each step; the kernels of our ops are compiled with the code that calls them."""
        runner, plan, shapes = self._runner, self.plan, CapturedShapes(HOST_SCALARS.index("rows"))
        launch_while_compiling(self._fake_cuda, NAMESPACE, implementations, shapes, self._tracker.track)
        settings = self.origin.torch_settings
        folder = package_folder(self.staging.path, plan.key, self.origin.sources, settings, runner.model)
        layers = traced_layers(runner.model, self.planned.architecture)
        runner.forward = BlindForward(runner.transformers_forward, layers, plan, folder)
        self._package_paths = folder.iterdir

        def compile_bucket(bucket: Bucket) -> None:
            shapes.size, shapes.rows = bucket.size, plan.row_slots(bucket)
            shapes.sizes = plan.step_sizes(bucket) if bucket.min_size else ()
            with self._fake_cuda.tensors():
                runner.run_uncaptured(GraphKey(bucket, bucket.size, 0))

        return compile_bucket

    def publish(self, records: list[BucketRecord], blind: BlindBuild) -> None:
        """Copy the files to the cache folder, and write the manifest."""
        root = self.staging.path
        packages = (path.relative_to(root).as_posix() for path in self._package_paths())
        files = hash_files(root, sorted({*self._tracker.paths(), *packages}))
        log.info("write %d files to the cache folder", len(files))
        manifest = Manifest(
            plan=asdict(self.plan), environment=asdict(self.planned.environment), origin=self.origin, stage_seconds={},
            buckets=tuple(records), files=files, compiled_at=int(time.time()), blind=blind,
        )  # fmt: skip
        publish(self.staging, manifest)


@contextlib.contextmanager
def _experts_without_values() -> Iterator[None]:
    """In the block, uncompiled experts return an empty result.

    They launch no kernel of tcdeploy, and read the number of tokens of each expert, which fake tensors do not have.
    """

    def run(module: Any, hidden_states: Tensor, *_: Tensor) -> Tensor:
        return torch.empty_like(hidden_states)

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run)
    try:
        yield
    finally:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run_experts)


def copy_winners(source: Path, staging: Path) -> None:
    """Copy the autotuner results that were measured. Raises as `measured_winners`."""
    for path in measured_winners(source):
        target = staging / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
