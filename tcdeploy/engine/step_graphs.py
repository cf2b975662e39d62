"""The CUDA graphs of all steps: which are captured when, and whether a step replays one.

A static bucket has one graph. A program with a symbolic number of tokens is captured at many sizes, and a prefill step
with decode rows also by its number of row slots. Capturing all of them takes several seconds, so a start captures only
a few (`capture`). The others follow when the engine is idle (`capture_next`), or when a step needs one for the second
time (`run`). Kernels cannot be loaded during capture; the first run, without a graph, loads them. No capture compiles
anything. While a start warms its buckets, other sizes run without a graph: such steps may run uncompiled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tcdeploy.engine.batch import StepBuffers
from tcdeploy.engine.graphs import StepGraph, StepKey, StepOutput, capture_graph
from tcdeploy.planning.plan import Bucket, Plan

EARLY_SIZES = (64, 128, 256, 512, 1024)  # tokens; captured before the first request, as is the largest size
log = logging.getLogger("tcdeploy.engine")


class StepGraphs:
    """The graphs by bucket, size and row slots, in one memory pool.

    `forward` runs a step without a graph. `make_buffers` returns the buffers of a step, filled with padding only if its
    second argument is true.
    """

    def __init__(
        self,
        plan: Plan,
        forward: Callable[[StepBuffers], StepOutput],
        make_buffers: Callable[[StepKey, bool], StepBuffers],
    ) -> None:
        self.uncaptured_runs = 0  # of buckets that are captured: prompt logprobs, and new sizes
        self.late_captures = 0  # since warm-up
        self.longest_late_capture_seconds = 0.0
        self._plan, self._forward, self._make_buffers = plan, forward, make_buffers
        self._graphs: dict[StepKey, StepGraph] = {}
        self._pool: Any | None = None
        self._ran_uncaptured: dict[StepKey, StepBuffers] = {}  # since warm-up
        self._is_warm = False
        self._out_of_memory = False  # at the last capture

    def __contains__(self, key: StepKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def is_captured(self, bucket: Bucket) -> bool:
        return StepKey(bucket, bucket.size, 0) in self._graphs

    def run(self, buffers: StepBuffers) -> StepOutput:
        """Replay the step's graph, or run the step without one."""
        key = buffers.key
        graph = self._graphs.get(key)
        if graph is None and key in self._ran_uncaptured:
            graph = self._capture_late(key, buffers)
        if graph is not None:
            return graph.replay()
        if self._is_warm and self.is_captured(buffers.bucket):
            self.uncaptured_runs += 1
            if not self._out_of_memory:
                self._ran_uncaptured[key] = buffers
        return self._forward(buffers)

    def capture(self, bucket: Bucket) -> None:
        """Capture the bucket's step, which must have run before; of a dynamic bucket only the early sizes."""
        sizes = {size for size in self._plan.step_sizes(bucket) if size in EARLY_SIZES} | {bucket.size}
        for size in sorted(sizes, reverse=True):
            for row_slots in reversed(self._plan.row_slots(bucket)):
                key = StepKey(bucket, size, row_slots)
                buffers = self._make_buffers(key, False)
                if size != bucket.size or row_slots:  # loads the kernels of this size and number of rows
                    self._forward(buffers)
                self._capture(key, buffers)

    def capture_next(self) -> bool:
        """Capture one of the graphs that `capture` left out. False if none is left.

        Steps that have run without a graph go first. The decode rows must be empty, since the step runs before its
        capture.
        """
        if self._out_of_memory:
            return False
        if self._ran_uncaptured:
            key, buffers = next(iter(self._ran_uncaptured.items()))
            return self._capture_late(key, buffers) is not None
        uncaptured_keys = (key for bucket in self._plan.prefill_buckets for key in self._all_keys(bucket))
        next_key = next((key for key in uncaptured_keys if key not in self._graphs), None)
        if next_key is None:
            return False
        return self._capture_late(next_key, None) is not None

    def drop(self, bucket: Bucket) -> None:
        """Drop the graphs of a bucket, whose variant has changed."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key.bucket != bucket}
        self._ran_uncaptured = {key: buffers for key, buffers in self._ran_uncaptured.items() if key.bucket != bucket}

    def warmed(self) -> None:
        """Warm-up has ended: capture sizes that are used, and count these captures."""
        self._is_warm = True

    def _all_keys(self, bucket: Bucket) -> list[StepKey]:
        """All graphs of a prefill bucket, those without decode rows first. Empty if it is not captured."""
        if not self.is_captured(bucket):
            return []
        sizes = self._plan.step_sizes(bucket)
        return [StepKey(bucket, size, row_slots) for row_slots in self._plan.row_slots(bucket) for size in sizes]

    def _capture_late(self, key: StepKey, buffers: StepBuffers | None) -> StepGraph | None:
        """Capture a step after warm-up. `buffers`: None if it has not run yet; then it runs first, on padding only.

        None if the device has no memory for another graph; then no further one is captured.
        """
        self._ran_uncaptured.pop(key, None)
        try:
            if buffers is None:
                buffers = self._make_buffers(key, True)
                self._forward(buffers)
            return self._capture(key, buffers)
        except torch.OutOfMemoryError:
            self._out_of_memory = True
            self._ran_uncaptured.clear()
            log.warning("no memory for another CUDA graph: steps of other sizes run without one, which is slower")
            return None

    def _capture(self, key: StepKey, buffers: StepBuffers) -> StepGraph:
        start = time.perf_counter()
        self._pool = self._pool or torch.cuda.MemPool()
        graph = self._graphs[key] = capture_graph(partial(self._forward, buffers), self._pool)
        if self._is_warm:
            self.late_captures += 1
            self.longest_late_capture_seconds = max(self.longest_late_capture_seconds, time.perf_counter() - start)
        return graph
