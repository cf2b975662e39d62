"""Run one step of the model for a bucket: fill the static buffers, then replay its graph or call its programs.

The model is called through its own forward, so whatever a family does around its layers (embedding scale, final
soft-capping, logit scaling) is its own code. Only the rows that are sampled from go through the head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from tcdeploy.attention.interface import StepInputs
from tcdeploy.engine.batch import Chunk, StepBuffers, make_buffers
from tcdeploy.engine.graphs import StepGraph, StepOutput, record
from tcdeploy.engine.sequence import Sequence
from tcdeploy.plan import Bucket, Plan


class ModelRunner:
    """Owns the buffers and graphs of all buckets. Everything runs under `torch.no_grad()`: torch guards on it."""

    def __init__(self, model: PreTrainedModel, plan: Plan, step: StepInputs) -> None:
        self.model = model
        self.plan = plan
        self.step = step  # the object that every layer's binding holds
        self._buffers: dict[Bucket, StepBuffers] = {}
        self._graphs: dict[Bucket, StepGraph] = {}
        self._pool: Any | None = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(self, chunks: list[Chunk], bucket: Bucket | None = None) -> StepOutput:
        """One packed step over the chunks, in the smallest bucket that holds them unless one is named.

        Row i of the output belongs to chunk i.
        """
        tokens = sum(stop - start for _, start, stop in chunks)
        bucket = bucket or self._smallest(self.plan.prefill_buckets, tokens)
        buffers = self._buffers_for(bucket, tokens)
        buffers.set_prefill(chunks)
        return self._run(buffers)

    def decode(self, sequences: list[Sequence]) -> StepOutput:
        """One token for each sequence; row i of the output belongs to sequence i."""
        bucket = self._smallest(self.plan.decode_buckets, len(sequences))
        buffers = self._buffers_for(bucket, bucket.size)
        buffers.set_decode(sequences)
        return self._run(buffers)

    def capture(self, bucket: Bucket) -> None:
        """Record the bucket's step; it must have run before, and its buffers keep what they hold."""
        buffers = self._buffers[bucket]
        graph = record(lambda: self._call(buffers), self._pool)
        self._pool = self._pool or graph.graph.pool()
        self._graphs[bucket] = graph

    def is_captured(self, bucket: Bucket) -> bool:
        return bucket in self._graphs

    def rerun(self, bucket: Bucket) -> StepOutput:
        """The bucket's step again, on what its buffers hold."""
        return self._run(self._buffers[bucket])

    def rerun_uncaptured(self, bucket: Bucket) -> StepOutput:
        return self._call(self._buffers[bucket])

    @staticmethod
    def _smallest(buckets: tuple[Bucket, ...], size: int) -> Bucket:
        return next(bucket for bucket in buckets if bucket.size >= size)

    def _buffers_for(self, bucket: Bucket, tokens: int) -> StepBuffers:
        if bucket.min_size:
            return make_buffers(self.plan, bucket, max(tokens, bucket.min_size))
        if bucket not in self._buffers:
            self._buffers[bucket] = make_buffers(self.plan, bucket, bucket.size)
        return self._buffers[bucket]

    def _run(self, buffers: StepBuffers) -> StepOutput:
        graph = self._graphs.get(buffers.bucket)
        return graph.replay() if graph else self._call(buffers)

    @torch.no_grad()
    def _call(self, buffers: StepBuffers) -> StepOutput:
        self.step.show(buffers.step)
        if self.plan.graphs == "region":
            torch.compiler.cudagraph_mark_step_begin()
        keep = {"logits_to_keep": buffers.rows} if self._keeps_rows else {}
        output = self.model(input_ids=buffers.input_ids, position_ids=buffers.position_ids, use_cache=False, **keep)
        logits = output.logits[0] if keep else output.logits[0, buffers.rows]
        return StepOutput(logits, logits.argmax(dim=-1))
