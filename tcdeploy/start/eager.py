"""A start that answers with eager steps at once, and replaces them by compiled programs while it serves.

The model is loaded, and all buckets are switched to uncompiled steps without CUDA graphs. While the reference is
computed, threads compile the Triton kernels of the smallest buckets, which are then checked against it. A *compile
worker* (start/workers/process.py) fills the cache folder meanwhile. The engine thread calls `advance` between steps:
each call loads, captures and checks the programs of one bucket that the worker has finished, and they replace its eager
steps. When all buckets have theirs, steps are timed, and the manifest is written as after any other start. A program
that the worker's copy of the model does not have is compiled in the engine thread, with a warning.

Rejected: compiling in a thread of the server. Tracing holds the GIL, which would delay every token.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Literal

from tcdeploy.cache.staging.restore import copy_finished_buckets
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.parity_check import ParityChecker, raise_if_failed
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.warmup import raise_if_entries_are_missing, warm_bucket, warmup_order
from tcdeploy.errors import TcdeployError
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.programs.compile_stats import read_counts
from tcdeploy.start.loaded_start import FilesToList, LoadedStart, Warmed, find_step_costs, publish_manifest
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.workers.parallel import make_short_copy, worker_recipe
from tcdeploy.start.workers.process import CompileProcess

State = Literal["eager", "warm", "failed"]
SMALL_BATCH_BLOCKS = 2  # of make_small_batch, which has up to two sequences
log = logging.getLogger("tcdeploy.start")


def eager_check_buckets(plan: Plan) -> tuple[Bucket, Bucket]:
    """The smallest prefill and decode bucket, which an eager start checks before the server is ready."""
    return plan.prefill_buckets[0], plan.decode_buckets[0]


def check_eager_steps(runner: ModelRunner, checker: ParityChecker) -> None:
    """Compare steps of `eager_check_buckets` with the reference. Raises CompileError if one fails."""
    with runner.uncounted_steps():
        for bucket in eager_check_buckets(runner.plan):
            raise_if_failed(checker.check(bucket).parity, bucket)
        runner.launch_sampling_kernels()
    runner.row_assignment.clear()


class ProgramSwaps:
    """Replaces the eager steps of each bucket by its programs.

    Only the engine thread calls `advance`. Other threads may read the properties, and call `stop`.
    """

    def __init__(
        self, start: LoadedStart, checker: ParityChecker, prompts: CheckPrompts,
        files_to_list: Callable[[LoadedStart, Warmed], FilesToList], start_worker: Callable[[], CompileProcess],
    ) -> None:  # fmt: skip
        """Start a compile worker, unless the programs are in the cache. `files_to_list`: of the source of the start."""
        self._start, self._checker, self._prompts, self._files_to_list = start, checker, prompts, files_to_list
        self._worker: CompileProcess | None = None
        self._worker_failure = ""
        try:
            self._worker = None if start.previous.cached_buckets else start_worker()
        except (TcdeployError, OSError) as error:
            self._worker_failure = str(error)
        self._state: State = "eager"
        self._compiled = set(start.previous.cached_buckets)  # names of the buckets whose programs are in the cache
        self._tracking = contextlib.ExitStack()
        self._tracking.enter_context(start.tracker.track())  # until the end: eager steps load kernels too
        self._left: list[Bucket] = warmup_order(start.plan)
        self._names = frozenset(bucket.name for bucket in start.plan.buckets)
        self._records: dict[Bucket, BucketRecord] = {}
        self._failed: list[Bucket] = []
        # In earlier calls of `advance`, and of the process before the present one. The event loop reads both at once.
        self._compile_counts: tuple[int, int | None] = (0, None)

    @property
    def is_warm(self) -> bool:
        """Whether every bucket runs its programs."""
        return self._state == "warm"

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: every bucket has its programs, or some cannot get them."""
        return self._state in ("warm", "failed")

    @property
    def records(self) -> tuple[BucketRecord, ...]:
        """Of the buckets that run their programs."""
        records = dict(self._records)  # the engine thread may add a bucket meanwhile
        return tuple(records[bucket] for bucket in self._start.plan.buckets if bucket in records)

    @property
    def failed_buckets(self) -> int:
        return len(self._failed)

    @property
    def compiles(self) -> int:
        """Compilations of this process in `advance`."""
        earlier, before = self._compile_counts
        return earlier if before is None else earlier + read_counts().compiles - before

    def describe(self) -> str:
        """What is missing for a warm start; "" if nothing is."""
        done = f"{len(self._records)} of {len(self._start.plan.buckets)} buckets run their programs"
        if self._state == "failed":
            reason = f"{len(self._failed)} failed" if self._failed else "the compile worker failed"
            return f"eager: {done}; {reason}, see the log"
        return f"eager: {done}" if self._state == "eager" else ""

    def stop(self) -> None:
        """Compile nothing any more."""
        if self._worker is not None:
            self._worker.stop()

    def advance(self, engine: Engine) -> bool:
        """Do what is due between two steps. Returns whether requests had to wait for it."""
        try:
            self._collect_programs()
        except (TcdeployError, OSError) as error:
            self._worker_failure = str(error)
        bucket = next((bucket for bucket in self._left if bucket.name in self._compiled), None)
        if bucket is None and self._left:
            if self._worker_failure:
                self._fail(f"the programs could not be compiled: {self._worker_failure}")
            return False
        if bucket is None and self._worker is not None and self._worker.poll() is None:
            return False  # wait until it has ended: `_finish` removes its staging folder
        self._compile_counts = (self.compiles, read_counts().compiles)
        try:
            if bucket is not None:
                self._swap(engine, bucket)
            else:
                self._finish(engine)
        finally:
            self._compile_counts = (self.compiles, None)
        return True

    def _collect_programs(self) -> None:
        """Copy what the worker has compiled since the last call into the staging folder. Raises TcdeployError."""
        if self._worker is None or self._worker_failure or self._compiled.issuperset(self._names):
            return
        code, finished = self._worker.poll(), set(self._worker.finished)
        if not self._compiled.issuperset(finished):
            copy_finished_buckets(self._start.staging)
            self._compiled.update(finished)
        elif code == 0:
            self._compiled.update(self._names)
            log.info("the programs are compiled, after %.1f s", self._worker.seconds)
        elif code is not None:
            self._worker_failure = self._worker.failure

    def _swap(self, engine: Engine, bucket: Bucket) -> None:
        """Warm one bucket. If that fails, it continues to run eagerly."""
        plan, stages = self._start.plan, self._start.stages
        self._left.remove(bucket)
        compiled = dict(self._worker.finished) if self._worker else {}
        previous = self._start.previous.with_programs(compiled)
        stages.progress.step(len(plan.buckets) - len(self._left), len(plan.buckets), bucket.name)
        num_blocks = max(self._prompts.blocks_needed(bucket), SMALL_BATCH_BLOCKS)
        with engine.paused(min(num_blocks, engine.allocator.capacity)):
            engine.runner.eager_buckets.discard(bucket)
            try:
                record = warm_bucket(engine.runner, bucket, previous, self._checker, plan.cache_dir)
            except Exception as error:  # of torch, Triton or CUDA, which share no base class; eager steps still work
                engine.runner.run_eagerly(bucket)
                self._failed.append(bucket)
                log.warning("%s continues to run eagerly: %s", bucket.name, str(error))
                return
        if record.outcome == "miss":
            log.warning(
                "%s: %.1f s of compilation delayed requests, because its programs were not in the cache",
                bucket.name, record.compile_seconds,
            )  # fmt: skip
        if bucket.name in compiled:
            record = record.with_compilation(compiled[bucket.name])
        self._records[bucket] = record
        stages.seconds["compile"] = stages.seconds.get("compile", 0.0) + record.seconds
        stages.progress.bucket_finished(record)

    def _finish(self, engine: Engine) -> None:
        """Time the steps and write the manifest, unless a bucket has failed."""
        if self._failed:
            names = ", ".join(bucket.name for bucket in self._failed)
            self._fail(f"these buckets continue to run eagerly, and the plan is not recorded: {names}")
            return
        records = [self._records[bucket] for bucket in self._start.plan.buckets]
        with engine.paused(engine.allocator.capacity):
            costs = find_step_costs(self._start, engine.runner, records)
        engine.use_costs(costs)
        self._tracking.close()
        try:
            raise_if_entries_are_missing(self._start.staging.path)
            warmed = Warmed(records, costs, self._start.tracker.paths())
            with self._start.stages.stage("record"):
                publish_manifest(self._start, warmed, self._files_to_list(self._start, warmed))
        except (TcdeployError, OSError) as error:
            log.warning("the programs run, but a later start may compile them again: %s", error)
        self._state = "warm"

    def _fail(self, reason: str) -> None:
        self._state = "failed"
        self._tracking.close()
        log.warning("%s; the server continues with eager steps", reason)


def start_worker(planned: PlannedModel, runner: ModelRunner, prompts: CheckPrompts) -> CompileProcess:
    """Start compiling the plan's programs on a short copy of the model. Raises TcdeployError and OSError."""
    config = make_short_copy(runner.model, planned).config
    names = [bucket.name for bucket in warmup_order(planned.plan)]
    return CompileProcess(worker_recipe(planned, prompts), config, planned.plan.key, names)
