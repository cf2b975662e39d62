"""Record a whole step as one CUDA graph and replay it: one launch instead of hundreds.

Graphs are recorded largest bucket first into one memory pool, so the smaller ones fit into what the largest took.
They cannot be saved: each start pays 0.02 to 0.1 s a bucket. Anything lazy (Triton loading, autotuning) is illegal
while recording, so the step must have run before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepOutput(NamedTuple):
    logits: Tensor  # [rows, vocab]
    tokens: Tensor  # [rows] int64: the greedy choice, unless sampled
    rows: Tensor  # [rows] int64: the decode row that each belongs to


class StepGraph(NamedTuple):
    """A recorded step: `replay` reads the bucket's static buffers and overwrites `output`."""

    graph: Any  # torch.cuda.CUDAGraph
    output: StepOutput

    def replay(self) -> StepOutput:
        self.graph.replay()
        return self.output


def capture_graph(step: Callable[[], StepOutput], pool: Any) -> StepGraph:
    """Record `step` with its tensors in `pool`, a torch.cuda.MemPool: it outlives its graphs, which candidates need."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool.id):
        output = step()
    return StepGraph(graph, output)
