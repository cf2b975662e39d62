"""Steps between launch and collection: the sequences that they serve, and their results in host memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine.schedule.sequence import Chunk, Sequence, TokenLogprobs
from tcdeploy.engine.schedule.step_batch import StepBatch
from tcdeploy.engine.schedule.step_costs import StepEstimate
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.kernels.sampling.reference import Logprobs


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens from position start + 1 on, in host memory."""

    sequence: Sequence
    start: int
    logprobs: Logprobs


class ForwardPass(NamedTuple):
    """A launched forward pass, whose tokens are the greedy ones until sampling is launched."""

    batch: StepBatch
    output: StepOutput
    sequences: tuple[Sequence | None, ...]  # of each output; None: a chunk that does not end its prompt, or padding
    chunks: tuple[Chunk, ...]
    estimate: StepEstimate | None = None

    @property
    def masks_need_unread_tokens(self) -> bool:
        """Whether a constrained sequence has a token of an earlier step that the host has not read."""
        return any(sequence and sequence.matcher and sequence.num_in_flight > 1 for sequence in self.sequences)


class InFlightStep(NamedTuple):
    """A launched step, and the host memory that its results are copied to."""

    sequences: tuple[Sequence | None, ...]  # of each output
    tokens: Tensor  # [outputs] int64, in host memory
    logprobs: Logprobs | None  # in host memory
    copy_done: torch.cuda.Event | None  # None on a CPU
    logprob_chunks: tuple[PromptLogprobs, ...] = ()
    estimate: StepEstimate | None = None  # None if the step is not measured
    launch_seconds: float = 0.0  # from its scheduling to the end of its launch


def record_event(tensor: Tensor) -> torch.cuda.Event | None:
    """An event that completes with all work launched so far; None on a CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, valid once an event recorded after it completes."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def row_logprobs(rows: Logprobs | None, row: int, k: int | None) -> TokenLogprobs | None:
    """One row as Python numbers, with the `k` most likely tokens; None if the request has no `logprobs`."""
    if rows is None or k is None:
        return None
    ids, values = rows.top_ids[row, :k].tolist(), rows.top_logprobs[row, :k].tolist()
    return TokenLogprobs(float(rows.chosen[row]), tuple(zip(ids, values, strict=True)))
