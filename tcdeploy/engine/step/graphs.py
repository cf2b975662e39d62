"""Captures a whole step as one CUDA graph and replays it: one launch instead of hundreds.

Graphs are captured from the largest bucket to the smallest into one memory pool, so that smaller graphs reuse the
memory of the largest. They cannot be saved: each start captures them again, which takes 0.02 to 0.1 s per graph on an
H100. A capture executes no kernels. It may load kernels, since its error mode is "relaxed", so a step can be captured
at a size at which it has not run. Autotuning times kernels, which is not possible during a capture, so a program must
have run at one size before.

`torch.cuda.graph` is not used, because it calls `torch.cuda.empty_cache` before each capture, and in some versions
`gc.collect`. The next steps would allocate the memory again. Requests wait during all of this.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcdeploy.planning.plan import Bucket


class StepOutput(NamedTuple):
    logits: Tensor  # [outputs, vocab]
    tokens: Tensor  # [outputs] int64: greedy tokens, unless sampled
    rows: Tensor  # [outputs] int64: the decode row of each output


class StepGraph(NamedTuple):
    """A captured step: `replay` reads the bucket's static buffers and overwrites `output`."""

    graph: Any  # torch.cuda.CUDAGraph
    output: StepOutput

    def replay(self) -> StepOutput:
        self.graph.replay()
        return self.output


def capture_graph(step: Callable[[], StepOutput], pool: Any) -> StepGraph:
    """Capture `step` with its tensors in `pool`, a torch.cuda.MemPool that outlives the graphs of all variants.

    Raises the exceptions of `step`, and RuntimeError if the capture fails.
    """
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream()
    torch.cuda.synchronize()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool.id, capture_error_mode="relaxed")
        try:
            output = step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is invalid; the step's own error is raised below
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return StepGraph(graph, output)


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One stream for all captures, because a pool's free blocks are reused only on the stream that used them."""
    return torch.cuda.Stream()


class GraphKey(NamedTuple):
    """What identifies a graph. `tokens`: rows in decode. `row_slots`: decode rows of a mixed step, else 0."""

    bucket: Bucket
    tokens: int
    row_slots: int
