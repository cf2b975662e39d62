"""Run one step of the model for a bucket: replay its graph, or call its programs.

The model is called through its own forward, so whatever a family does around its layers (embedding scale, final
soft-capping, logit scaling) is its own code. Only the rows that are sampled from go through the head. A step ends, on
the device, with the greedy choice and the advance of the decode rows; any other sampling replaces that choice after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as ListLike
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcdeploy.attention.interface import StepInputs
from tcdeploy.candidate import Candidate
from tcdeploy.engine import sampling
from tcdeploy.engine.advance import advance
from tcdeploy.engine.batch import PrefillBuffers, StepBuffers, decode_buffers, make_decode_rows
from tcdeploy.engine.graphs import StepGraph, StepOutput, record
from tcdeploy.engine.rows import RowSeating
from tcdeploy.engine.sequence import Chunk, Sequence
from tcdeploy.plan import Bucket, Plan


class ModelRunner:
    """Owns the decode rows, and the buffers and graphs of all buckets. `no_grad` everywhere: torch guards on it."""

    def __init__(self, model: PreTrainedModel, plan: Plan, step: StepInputs, vocab_size: int) -> None:
        self.model = model
        self.plan = plan
        self.vocab_size = vocab_size
        self.step = step  # the object that every layer's binding holds
        self.state = make_decode_rows(plan, vocab_size)
        self.seating = RowSeating(self.state)
        self._decode = {bucket: decode_buffers(bucket, self.state, step) for bucket in plan.decode_buckets}
        self._prefill: dict[Bucket, PrefillBuffers] = {}
        self._backend: Literal["triton", "reference"] = "triton" if plan.decode_attention == "triton" else "reference"
        self._candidates = {bucket: plan.candidates(bucket)[0] for bucket in plan.buckets}
        self._graphs: dict[Bucket, StepGraph] = {}
        self._pool: Any | None = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(
        self, chunks: ListLike[Chunk], running: ListLike[Sequence] = (), bucket: Bucket | None = None
    ) -> StepOutput:
        """One packed step over the chunks, in the smallest bucket that holds them unless one is named.

        Row i of the output belongs to chunk i. A sequence that ends its prompt here and is the r-th that runs takes its
        first token with it into decode row r.
        """
        tokens = sum(stop - start for _, start, stop in chunks)
        bucket = bucket or smallest(self.plan.prefill_buckets, tokens)
        self.seating.seat(running)
        prefill = self._prefill_for(bucket, tokens)
        prefill.fill(chunks, self.seating.rows_of(chunks))
        return self._run(prefill.buffers)

    def decode(self, running: ListLike[Sequence]) -> StepOutput:
        """One token for each sequence; row i of the output belongs to sequence i."""
        self.seating.seat(running)
        return self._run(self._decode[smallest(self.plan.decode_buckets, len(running))])

    @torch.no_grad()
    def sample(self, output: StepOutput, features: sampling.Features) -> StepOutput:
        """Replace the greedy choice of a step by what the rows' sampling parameters ask; the next step feeds that."""
        state = self.state
        positions = state.positions[output.rows]
        tokens = sampling.sample(output.logits, state.sampling, positions, features, output.rows)
        state.token_ids.index_copy_(0, output.rows, tokens)
        if features.penalties:
            sampling.count_tokens(state.sampling, output.rows, tokens)
        return output._replace(tokens=tokens)

    def choose(self, bucket: Bucket, candidate: Candidate) -> None:
        """How the bucket's step is to be made from now on; a graph made otherwise is dropped."""
        self._graphs.pop(bucket, None)
        self._candidates[bucket] = candidate

    def capture(self, bucket: Bucket) -> None:
        """Record the bucket's step; it must have run before, and its buffers keep what they hold."""
        buffers = self._buffers(bucket)
        self._pool = self._pool or torch.cuda.MemPool()
        self._graphs[bucket] = record(lambda: self._call(buffers), self._pool)

    def is_captured(self, bucket: Bucket) -> bool:
        return bucket in self._graphs

    def rerun(self, bucket: Bucket) -> StepOutput:
        """The bucket's step again, on what its buffers hold."""
        return self._run(self._buffers(bucket))

    def rerun_uncaptured(self, bucket: Bucket) -> StepOutput:
        return self._call(self._buffers(bucket))

    def _buffers(self, bucket: Bucket) -> StepBuffers:
        return self._prefill[bucket].buffers if bucket.is_prefill else self._decode[bucket]

    def _prefill_for(self, bucket: Bucket, tokens: int) -> PrefillBuffers:
        if bucket.min_size:  # a dynamic bucket keeps no buffers
            return PrefillBuffers(self.plan, bucket, max(tokens, bucket.min_size), self.state, self.step)
        if bucket not in self._prefill:
            self._prefill[bucket] = PrefillBuffers(self.plan, bucket, bucket.size, self.state, self.step)
        return self._prefill[bucket]

    def _run(self, buffers: StepBuffers) -> StepOutput:
        graph = self._graphs.get(buffers.bucket)
        return graph.replay() if graph else self._call(buffers)

    @torch.no_grad()
    def _call(self, buffers: StepBuffers) -> StepOutput:
        self.step.show(buffers.step)
        self.step.candidate = candidate = self._candidates[buffers.bucket]
        self.step.prefill_backend = candidate.attention or self.plan.prefill_attention
        if self.plan.graphs == "region":
            torch.compiler.cudagraph_mark_step_begin()
        logits = self._logits(buffers, buffers.logit_rows if candidate.early_rows else None)
        state = self.state
        tokens = advance(
            logits, buffers.rows, buffers.lengths, state.token_ids, state.positions, state.seq_lens, self._backend
        )
        return StepOutput(logits, tokens, buffers.rows)

    def _logits(self, buffers: StepBuffers, early_rows: Tensor | None) -> Tensor:
        """[outputs, vocab]: rows that the last layer has not chosen are chosen before the head, where a model can."""
        late_rows = buffers.logit_rows if early_rows is None else None
        keep: dict[str, Any] = {}
        if self._keeps_rows:  # 0 keeps all: in decode every token is one that is sampled from
            keep["logits_to_keep"] = 0 if late_rows is None else late_rows
        self.step.early_rows = early_rows
        try:
            logits = self.model(
                input_ids=buffers.input_ids, position_ids=buffers.position_ids, use_cache=False, **keep
            ).logits[0]
        finally:
            self.step.early_rows = None  # the reference runs the same layers
        return logits if late_rows is None or keep else logits[late_rows]


def smallest(buckets: tuple[Bucket, ...], size: int) -> Bucket:
    """The smallest bucket that holds `size`."""
    return next(bucket for bucket in buckets if bucket.size >= size)
