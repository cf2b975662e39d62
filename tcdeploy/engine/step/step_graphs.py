"""Captures each step as one CUDA graph: when each graph is captured, and which sizes steps are padded to.

Graphs cannot be saved: each start captures them again, in 0.02 to 0.1 s per graph on an H100. A static bucket has one
graph. A program with a symbolic number of tokens is captured at many sizes, and prefill steps with decode rows also for
several numbers of row slots. Capturing all of them takes several seconds, so start-up captures only the early sizes
(`capture`). After warm-up, a step is padded to the smallest captured size that holds it. If a smaller size is planned
but not captured, its graph is counted as wanted. The remaining graphs are captured while the engine is idle
(`capture_next`), and occasionally while requests run (`capture_wanted`), which delays the next step by about 0.05 s.

A capture can be abandoned for a request: before each program is launched, `must_stop()` is called, and if it returns
True, StepAbandoned ends the capture. The graph is not instantiated, and its memory returns to the pool. A later call
captures the size again.

A capture executes no kernels and compiles nothing, but may load kernels, so a step can be captured at a size at which
it has not run. Its program must have run at one size: autotuning times kernels, which is not possible in a capture. If
a capture fails, the step runs once without a graph before the next attempt, which is possible only during start-up and
while the engine is idle. During warm-up, steps are padded to any planned size; most of these have no graph yet, so
their steps run without one, and may run uncompiled.

Some sizes take longer than larger ones, because cuBLAS selects another kernel: 448 tokens took 16.1 ms, and 480 took
12.2 ms (8B shape, H100). The engine times each size after its capture, and pads no step to a slow one (`skip_sizes`).

Rejected: running a step of a new size without a graph, and capturing it at its second use. Under load, almost every
step has a new size for a while, and the 99th percentile of the gaps between tokens was 74 ms (8B model, H100).
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tcdeploy.engine.step.batch import GraphKey, StepBuffers, StepOutput
from tcdeploy.kernels.attention.metadata import do_nothing
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.sizes import DYNAMIC_STEP_TOKENS
from tcdeploy.torch_compat.failed_capture import end_allocation

# In tokens. These sizes and the largest are captured before the first request, with all numbers of row slots.
EARLY_SIZES = (64, 128, 256, 512, 1024)
log = logging.getLogger("tcdeploy.engine")


class StepAbandoned(Exception):
    """Raised between two programs of a step, to end its capture because a request has arrived."""


def never() -> bool:
    """A `must_stop` that lets every capture complete."""
    return False


class StepGraph(NamedTuple):
    """A captured step: `replay` reads the bucket's static buffers and overwrites `output`."""

    graph: Any  # torch.cuda.CUDAGraph
    output: StepOutput

    def replay(self) -> StepOutput:
        self.graph.replay()
        return self.output


def capture_graph(step: Callable[[], StepOutput], pool: Any, is_abandonable: bool = False) -> StepGraph:
    """Capture `step` with its tensors in `pool`, a torch.cuda.MemPool that outlives the graphs of all variants.

    Raises the exceptions of `step`, and RuntimeError if the capture fails. `torch.cuda.graph` is not used, because it
    calls `torch.cuda.empty_cache` first, and in some versions `gc.collect`: requests would wait for these and for the
    next steps' allocations. `is_abandonable`: `step` may raise StepAbandoned; the graph is then not instantiated.
    This is not the default, because it keeps the nodes of the graph in host memory.
    """
    graph, stream = torch.cuda.CUDAGraph(keep_graph=is_abandonable), _capture_stream()
    torch.cuda.synchronize()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool.id, capture_error_mode="relaxed")
        try:
            output = step()
        except BaseException as error:
            try:
                graph.capture_end()
            except RuntimeError:  # the capture is invalid; the step's own error is raised below
                end_allocation(pool, stream.device_index)
                if isinstance(error, StepAbandoned):
                    raise  # the RuntimeError: an invalid capture counts as a failure
            raise
        graph.capture_end()
    if is_abandonable:
        graph.instantiate()
    torch.cuda.current_stream().wait_stream(stream)
    return StepGraph(graph, output)


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One stream for all captures, because a pool's free blocks are reused only on the stream that used them."""
    return torch.cuda.Stream()


class StepGraphs:
    """`forward` runs a step without a graph; its second argument is `Step.before_program`. `make_buffers(key, True)`
    returns the buffers of a step filled with padding.

    All graphs share one memory pool, and are captured from the largest to the smallest, which reuse its memory.
    """

    def __init__(
        self, plan: Plan, forward: Callable[[StepBuffers, Callable[[], None]], StepOutput],
        make_buffers: Callable[[GraphKey, bool], StepBuffers],
    ) -> None:  # fmt: skip
        self.uncaptured_runs = 0  # forward passes of captured buckets that replayed no graph: prompt logprobs
        self.late_captures = 0  # since warm-up
        self.abandoned_captures = 0  # since warm-up
        self.longest_late_capture_seconds = 0.0
        self.wanted: Counter[GraphKey] = Counter()  # since warm-up: steps that would have replayed a missing graph
        self._plan, self._forward, self._make_buffers = plan, forward, make_buffers
        self._graphs: dict[GraphKey, StepGraph] = {}
        self._pools: list[Any] = []  # captures use the last one
        self._sizes: dict[tuple[Bucket, int], tuple[int, ...]] = {}  # cache of `sizes`
        self._step_sizes: dict[int, tuple[int, ...]] = {}  # cache of `step_sizes`
        self._skipped_sizes: frozenset[int] = frozenset()
        self._is_warm = False
        self._needs_first_run = False  # True: a capture after warm-up failed whose step had not run first
        self._captures_late = True  # False: no memory is left, or one failed although its step ran first

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def is_captured(self, bucket: Bucket) -> bool:
        return GraphKey(bucket, bucket.size, 0) in self._graphs

    def early_sizes(self, bucket: Bucket) -> tuple[int, ...]:
        """The sizes that are captured before the first request; () if the bucket's steps are not padded."""
        return tuple(size for size in self._plan.step_sizes(bucket) if size in EARLY_SIZES or size == bucket.size)

    def early_keys(self, bucket: Bucket) -> list[GraphKey]:
        """Keys of the graphs that are captured before the first request, the largest first."""
        early_sizes = self.early_sizes(bucket)
        shapes = reversed(self._plan.graph_shapes(bucket))
        return [GraphKey(bucket, tokens, row_slots) for tokens, row_slots in shapes if tokens in early_sizes]

    def sizes(self, bucket: Bucket, row_slots: int) -> tuple[int, ...]:
        """The sizes that the bucket's steps are currently padded to, ascending; () if they are not padded."""
        if not (self._is_warm and bucket.min_size and self.is_captured(bucket)):
            return self._plan.step_sizes(bucket)
        if (bucket, row_slots) not in self._sizes:
            sizes = {bucket.size, *self.captured_sizes(bucket, row_slots)}
            self._sizes[bucket, row_slots] = tuple(size for size in sorted(sizes) if self._is_used(bucket, size))
        return self._sizes[bucket, row_slots]

    def captured_sizes(self, bucket: Bucket, row_slots: int) -> tuple[int, ...]:
        """The bucket's captured sizes, ascending, those that are skipped included."""
        return tuple(sorted(key.tokens for key in self._graphs if (key.bucket, key.row_slots) == (bucket, row_slots)))

    def _is_used(self, bucket: Bucket, size: int) -> bool:
        return size == bucket.size or size not in self._skipped_sizes

    def step_sizes(self, row_slots: int) -> tuple[int, ...]:
        """The current sizes of all prefill buckets together, ascending.

        A dynamic bucket without graphs, whose steps are not padded, has the multiples of DYNAMIC_STEP_TOKENS.
        """
        if row_slots not in self._step_sizes:
            sizes: set[int] = set()
            for bucket in self._plan.prefill_buckets:
                unpadded = range(DYNAMIC_STEP_TOKENS, bucket.size, DYNAMIC_STEP_TOKENS)
                sizes |= {bucket.size, *(self.sizes(bucket, row_slots) or unpadded)}
            self._step_sizes[row_slots] = tuple(sorted(sizes))
        return self._step_sizes[row_slots]

    def count_wanted(self, bucket: Bucket, tokens: int, row_slots: int) -> None:
        """Count the graph that a step of `tokens` tokens would replay if all were captured, if it is missing."""
        if not (self._is_warm and self._captures_late and self.is_captured(bucket)):
            return
        sizes = (size for size in self._plan.step_sizes(bucket) if size >= tokens and self._is_used(bucket, size))
        key = GraphKey(bucket, next(sizes), row_slots)
        if key not in self._graphs:
            self.wanted[key] += 1

    @property
    def can_capture_wanted(self) -> bool:
        """Whether a graph is wanted and can be captured while requests run."""
        return bool(self.wanted) and not self._needs_first_run

    def run(self, buffers: StepBuffers) -> StepOutput:
        """Replay the step's graph, or run the step without one."""
        graph = self._graphs.get(buffers.key)
        if graph is not None:
            return graph.replay()
        self.uncaptured_runs += self._is_warm and self.is_captured(buffers.bucket)
        return self._forward(buffers, do_nothing)

    def capture(self, bucket: Bucket) -> None:
        """Capture the bucket's step, which must have run before; of a dynamic bucket only the early sizes.

        After a failure, steps run once before they are captured. Raises the RuntimeError of a second failure, and
        torch.OutOfMemoryError at once.
        """
        torch.cuda.empty_cache()  # the allocator cannot free cached memory during a capture
        runs_first = False
        for key in self.early_keys(bucket):
            try:
                self._capture(key, runs_first)
            except RuntimeError as error:
                if runs_first or isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("%s: a capture failed, so steps now run once before their capture: %s", bucket.name, error)
                runs_first = True
                self._capture(key, runs_first)

    def capture_next(self, must_stop: Callable[[], bool] = never) -> bool:
        """Capture one of the graphs that `capture` left out, the most wanted first. False if none can be captured.

        The decode rows must be empty, because the step may run before its capture. The capture and this run are
        abandoned between two programs once `must_stop` returns True.
        """
        key = self._next_key()
        if key is None or not self._captures_late:
            return False
        try:
            is_captured = not self._needs_first_run and self._capture_late(key, must_stop)
            if not is_captured and self._captures_late:
                self._capture_late(key, must_stop, runs_first=True)
        except StepAbandoned:
            self.abandoned_captures += 1
        return self._captures_late

    def capture_wanted(self, must_stop: Callable[[], bool] = never) -> None:
        """Capture the most wanted graph while requests run. Executes no kernels.

        The capture is abandoned between two programs once `must_stop` returns True.
        """
        assert self.can_capture_wanted
        [(key, _)] = self.wanted.most_common(1)
        try:
            self._capture_late(key, must_stop)
        except StepAbandoned:
            self.abandoned_captures += 1

    def drop(self, bucket: Bucket) -> None:
        """Drop the graphs of a bucket, whose variant has changed."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key.bucket != bucket}
        self._keep_wanted(lambda key: key.bucket != bucket)

    def skip_sizes(self, sizes: frozenset[int]) -> None:
        """Do not pad steps of dynamic buckets to these sizes, except the largest size of a bucket."""
        if sizes != self._skipped_sizes:
            self._skipped_sizes = sizes
            self._keep_wanted(lambda key: self._is_used(key.bucket, key.tokens))

    def end_warmup(self) -> None:
        """Warm-up has ended: pad steps to captured sizes, and count late captures."""
        self._is_warm = True
        self._forget_sizes()

    def _next_key(self) -> GraphKey | None:
        """The most wanted graph, or else the first that is not captured, of a skipped size only without decode rows."""
        if self.wanted:
            return self.wanted.most_common(1)[0][0]
        # Largest size first, so that smaller graphs reuse the memory that a larger one allocated in the pool. The graph
        # without decode rows is first, because the size is timed with it.
        keys = (
            GraphKey(bucket, tokens, row_slots)
            for bucket in filter(self.is_captured, self._plan.prefill_buckets)
            for tokens, row_slots in sorted(self._plan.graph_shapes(bucket), key=lambda shape: (-shape[0], shape[1]))
            if row_slots == 0 or self._is_used(bucket, tokens)
        )
        return next((key for key in keys if key not in self._graphs), None)

    def _capture_late(self, key: GraphKey, must_stop: Callable[[], bool], runs_first: bool = False) -> bool:
        """Capture a graph after warm-up. False: it failed, which is logged, and changes how later ones are captured.

        Raises StepAbandoned.
        """
        start = time.perf_counter()
        try:
            self._capture(key, runs_first, must_stop)
        except StepAbandoned:
            raise
        except torch.OutOfMemoryError:
            self._stop("no memory for another CUDA graph")
        except Exception as error:  # from torch, Triton or CUDA; not fatal, since steps can use a larger graph
            if runs_first:
                self._stop(f"a CUDA graph could not be captured ({error})")
            else:
                self._needs_first_run = True
                log.warning("a CUDA graph could not be captured; no more captures while requests are open: %s", error)
        else:
            self.late_captures += 1
            self.longest_late_capture_seconds = max(self.longest_late_capture_seconds, time.perf_counter() - start)
            return True
        return False

    def _capture(self, key: GraphKey, runs_first: bool = False, must_stop: Callable[[], bool] = never) -> None:
        """Capture a graph. Raises StepAbandoned once `must_stop` returns True, and what `capture_graph` raises."""

        def before_program() -> None:
            if must_stop():
                raise StepAbandoned

        before_program()
        buffers = self._make_buffers(key, runs_first)
        if runs_first:
            self._forward(buffers, before_program)
        if not self._pools:
            self._pools.append(torch.cuda.MemPool())
        try:
            step = functools.partial(self._forward, buffers, before_program)
            self._graphs[key] = capture_graph(step, self._pools[-1], is_abandonable=must_stop is not never)
        except (torch.OutOfMemoryError, StepAbandoned):
            raise
        except Exception:  # torch 2.11 may still allocate from the pool of an invalid capture
            self._pools.append(torch.cuda.MemPool())
            raise
        del self.wanted[key]
        self._forget_sizes()

    def _stop(self, reason: str) -> None:
        self._captures_late = False
        self.wanted.clear()
        log.warning("%s; no further CUDA graph is captured, and steps are padded to the captured sizes", reason)

    def _keep_wanted(self, is_kept: Callable[[GraphKey], bool]) -> None:
        self.wanted = Counter({key: count for key, count in self.wanted.items() if is_kept(key)})
        self._forget_sizes()

    def _forget_sizes(self) -> None:
        self._sizes.clear()
        self._step_sizes.clear()
