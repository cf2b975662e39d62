"""The kernels of a bucket's compiled step and their shares of its time, from torch's profiler.

On a GPU, a row is a kernel, and one more row is the time in which no kernel runs. On a CPU, a row is an operation,
without the operations that it calls, or a kernel that Inductor generated; another row is the time between operations.
In both cases the rows add up to the step. The profiler makes a step slower: use the shares, and take times from the
other tables.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from tcdeploy.bench.breakdown import KernelRun, profile_replays, rank_by_time, trim_overlap
from tcdeploy.bench.breakdown import gap_us as gap_of
from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.schedule.step_batch import prefilled_rows
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.planning.plan import Bucket
from tcdeploy.programs.stances import fail_on_recompile

REPLAYS = 5
WARMUP_REPLAYS = 1  # includes the profiler's own start
STEP = "tcdeploy step"
GENERATED_MODULE_NAME = "AsyncCompile"  # every program that Inductor generates imports this name
GAPS = "(no kernel runs)"
BETWEEN = "(Python between operations)"
PROGRAMS = "(compiled programs, without their kernels)"
PROGRAM_NAME = re.compile(r"## Call CompiledFxGraph")
DISPATCH_NAME = re.compile(r"TorchDynamo Cache Lookup|Torch-Compiled Region|Pregraph bytecode|AOTDispatcher")
DISPATCH = "(torch.compile: guards and calls)"


@dataclass(frozen=True)
class KernelRow:
    """`count`: executions per step. `share`: of the step's time."""

    name: str
    count: float
    us: float
    share: float


@dataclass(frozen=True)
class BucketKernels:
    """All rows of a bucket's step, largest first. `step_us` is their sum."""

    bucket: str
    step_us: float
    kernels: tuple[KernelRow, ...]


def measure_kernels(runner: ModelRunner, bucket: Bucket) -> BucketKernels:
    """Profile the step of a warm bucket as the server runs it: its CUDA graph if it has one, else its programs."""
    with runner.uncounted_steps(), fail_on_recompile():
        restore, step = _step_of(runner, bucket)
        if runner.plan.device == "cuda":
            return summarize_kernels(bucket.name, profile_replays(restore, step))
        with named_cpp_kernels():
            _profile_operations(restore, step, WARMUP_REPLAYS)
            return summarize_operations(bucket.name, _profile_operations(restore, step, REPLAYS), REPLAYS)


def _step_of(runner: ModelRunner, bucket: Bucket) -> tuple[Callable[[], object], Callable[[], object]]:
    batch = make_timing_batch(runner, bucket)
    batch.run()
    if bucket.min_size:  # `rerun` would use the buffers of the bucket's largest size
        return lambda: None, batch.run
    if bucket.is_prefill:
        return lambda: None, lambda: runner.rerun(bucket)
    rows = prefilled_rows(batch.sequences)
    return lambda: runner.row_assignment.apply(rows), lambda: runner.rerun(bucket)


def summarize_kernels(bucket: str, replays: Sequence[Sequence[KernelRun]]) -> BucketKernels:
    """`replays`: the kernels of one step each. Overlapping kernels count once, so that the rows add up to the step."""
    runs: list[Operation] = []
    for replay in replays:
        trimmed = trim_overlap(list(replay))
        runs += [Operation(kernel.name, kernel.stop - kernel.start) for kernel in trimmed]
        runs.append(Operation(GAPS, gap_of(trimmed)))
    return _rank(bucket, runs, len(replays))


@contextlib.contextmanager
def named_cpp_kernels() -> Iterator[None]:
    """Within the block, the profiler records each call of a kernel that Inductor generated for the CPU.

    A program is a Python module that calls its kernels by global names. The kernels of other programs have no rows of
    their own.
    """
    modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    replaced = [
        (names, {name: kernel for name, kernel in names.items() if name.startswith("cpp_") and callable(kernel)})
        for names in modules
        if GENERATED_MODULE_NAME in names
    ]
    for names, kernels in replaced:
        names.update({name: _recorded(name, kernel) for name, kernel in kernels.items()})
    try:
        yield
    finally:
        for names, kernels in replaced:
            names.update(kernels)


def _recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with record_function(name):
            return kernel(*args)

    return call


class Operation(NamedTuple):
    """One run of a row. `us`: without the operations that it calls."""

    name: str
    us: float


def _profile_operations(restore: Callable[[], object], step: Callable[[], object], replays: int) -> list[Operation]:
    """The operations of the steps, without those of `restore`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(replays):
            restore()
            with record_function(STEP):
                step()
    events = profiled.events() or ()
    steps = [event.time_range for event in events if event.name == STEP]
    return [
        Operation(event.name, event.self_cpu_time_total)
        for event in events
        if any(span.start <= event.time_range.start and event.time_range.end <= span.end for span in steps)
    ]


def summarize_operations(bucket: str, operations: Sequence[Operation], replays: int) -> BucketKernels:
    """`operations`: of all replays together."""
    return _rank(bucket, [Operation(_operation_name(name), us) for name, us in operations], replays)


def _operation_name(key: str) -> str:
    if key == STEP:
        return BETWEEN
    if PROGRAM_NAME.match(key):
        return PROGRAMS
    return DISPATCH if DISPATCH_NAME.match(key) else key


def _rank(bucket: str, runs: Sequence[Operation], replays: int) -> BucketKernels:
    ranked = rank_by_time(runs, replays)
    step_us = sum(us for *_, us in ranked)
    rows = (KernelRow(name, count, us, us / step_us) for name, count, us in ranked if us > 0)
    return BucketKernels(bucket, step_us, tuple(rows))
