"""Captures a whole step as one CUDA graph and replays it: one launch instead of hundreds.

Graphs are captured from the largest bucket to the smallest into one memory pool, so that smaller graphs reuse the
memory of the largest. They cannot be saved: each start captures them again, which takes 0.02 to 0.1 s per graph on an
H100. Lazy work (loading Triton kernels, autotuning) is illegal during capture, so the step must have run before.
"""

from __future__ import annotations

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
    """Capture `step` with its tensors in `pool`, a torch.cuda.MemPool that outlives the graphs of all variants."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool.id):
        output = step()
    return StepGraph(graph, output)


class StepKey(NamedTuple):
    """What identifies a graph. `tokens`: rows in decode. `row_slots`: decode rows of a mixed step, else 0."""

    bucket: Bucket
    tokens: int
    row_slots: int
