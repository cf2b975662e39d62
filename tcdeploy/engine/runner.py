"""Run one step of the model for a bucket: replay its graph, or call its programs.

The model is called through its own forward, so whatever a family does around its layers (embedding scale, final
soft-capping, logit scaling) is its own code. Only the rows that are sampled from go through the head. A step ends, on
the device, with the greedy choice and the advance of the decode rows; any other sampling replaces that choice after it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence as ListLike
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcdeploy.attention.interface import AttentionMetadata
from tcdeploy.engine import sampling
from tcdeploy.engine.advance import advance
from tcdeploy.engine.batch import PrefillBuffers, StepBuffers, decode_buffers, make_decode_rows
from tcdeploy.engine.graphs import StepGraph, StepOutput, capture_graph
from tcdeploy.engine.rows import RowAssignment
from tcdeploy.engine.sequence import Chunk, Sequence
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.torch_compat.body_forward import reuse_body_output

PROMPT_LOGPROBS_CHUNK = 512  # of 128,256 tokens: 130 MB of logits, and twice that in float32


class ModelRunner:
    """Owns the decode rows, and the buffers and graphs of all buckets. `no_grad` everywhere: torch guards on it."""

    def __init__(self, model: PreTrainedModel, plan: Plan, step: AttentionMetadata, vocab_size: int) -> None:
        self.model = model
        self.plan = plan
        self.vocab_size = vocab_size
        self.step = step  # the object that every layer's binding holds
        self.state = make_decode_rows(plan, vocab_size)
        self.row_assignment = RowAssignment(self.state)
        self._decode = {bucket: decode_buffers(bucket, self.state, step) for bucket in plan.decode_buckets}
        self._prefill: dict[Bucket, PrefillBuffers] = {}
        self._advance_backend: Literal["triton", "reference"] = (
            "triton" if plan.decode_attention == "triton" else "reference"
        )
        self._variants = {bucket: plan.variants(bucket)[0] for bucket in plan.buckets}
        self._graphs: dict[Bucket, StepGraph] = {}
        self._pool: Any | None = None
        self.step_counts: Counter[Bucket] = Counter()  # steps of each bucket since the start
        self.padding_tokens: Counter[Bucket] = Counter()  # tokens or rows that they computed for nobody
        self.uncaptured_runs = 0  # of a bucket that has a graph: what scoring prompts takes
        self._supports_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(
        self, chunks: ListLike[Chunk], running: ListLike[Sequence] = (), bucket: Bucket | None = None
    ) -> StepOutput:
        """One packed step over the chunks, in the smallest bucket that holds them unless one is named.

        Row i of the output belongs to chunk i. A sequence that ends its prompt here and is the r-th that runs takes its
        first token with it into decode row r.
        """
        tokens = sum(stop - start for _, start, stop in chunks)
        bucket = bucket or smallest_bucket(self.plan.prefill_buckets, tokens)
        self.row_assignment.assign(running)
        prefill = self._prefill_for(bucket, tokens)
        prefill.fill(chunks, self.row_assignment.rows_for_chunks(chunks))
        self._count_step(bucket, tokens)
        return self._run(prefill.buffers)

    def decode(self, running: ListLike[Sequence]) -> StepOutput:
        """One token for each sequence; row i of the output belongs to sequence i."""
        self.row_assignment.assign(running)
        self.row_assignment.upload_block_table()
        bucket = smallest_bucket(self.plan.decode_buckets, len(running))
        self._count_step(bucket, len(running))
        return self._run(self._decode[bucket])

    def _count_step(self, bucket: Bucket, used: int) -> None:
        self.step_counts[bucket] += 1
        self.padding_tokens[bucket] += bucket.size - used if not bucket.min_size else 0

    @torch.no_grad()
    def sample(self, output: StepOutput, features: sampling.Features, masks: Tensor | None = None) -> StepOutput:
        """Replace the greedy choice of a step by what the rows' sampling parameters ask; the next step feeds that.

        `masks` goes with `features.masks`: one row of it for each output.
        """
        state = self.state
        positions = state.positions[output.rows]
        tokens = sampling.sample(output.logits, state.sampling, positions, features, output.rows, masks)
        state.token_ids.index_copy_(0, output.rows, tokens)
        if features.penalties:
            sampling.count_tokens(state.sampling, output.rows, tokens)
        return output._replace(tokens=tokens)

    def compute_prompt_logprobs(self, chunk: Chunk, wanted: int) -> list[tuple[int, sampling.Logprobs]]:
        """Log-probabilities of the tokens that follow those of a chunk within its prompt, and of `wanted` others each.

        Each piece comes with the position of the first token that its tokens follow.

        Not from a graph, whose steps keep the last row of each prompt alone; by the same programs. The head works in
        pieces of PROMPT_LOGPROBS_CHUNK tokens: the logits of a whole prompt may be larger than the weights.
        """
        sequence, start, stop = chunk
        last = min(stop, sequence.prompt_length - 1)
        prefill = self._prefill_for(smallest_bucket(self.plan.prefill_buckets, stop - start), stop - start)
        prefill.fill([chunk], [None])
        found: list[tuple[int, sampling.Logprobs]] = []
        with reuse_body_output(self.model):
            for begin in range(start, last, PROMPT_LOGPROBS_CHUNK):
                end = min(begin + PROMPT_LOGPROBS_CHUNK, last)
                rows = torch.arange(begin - start, end - start, device=self.plan.device)
                next_ids = torch.tensor(sequence.token_ids[begin + 1 : end + 1], device=self.plan.device)
                found.append((begin, sampling.logprobs(self._logits_at(prefill.buffers, rows), next_ids, wanted)))
        self.uncaptured_runs += self.is_captured(prefill.buffers.bucket)
        return found

    def set_variant(self, bucket: Bucket, variant: Variant) -> None:
        """How the bucket's step is to be made from now on; a graph made otherwise is dropped."""
        self._graphs.pop(bucket, None)
        self._variants[bucket] = variant

    def capture(self, bucket: Bucket) -> None:
        """Record the bucket's step; it must have run before, and its buffers keep what they hold."""
        buffers = self._buffers(bucket)
        self._pool = self._pool or torch.cuda.MemPool()
        self._graphs[bucket] = capture_graph(lambda: self._forward(buffers), self._pool)

    def is_captured(self, bucket: Bucket) -> bool:
        return bucket in self._graphs

    def rerun(self, bucket: Bucket) -> StepOutput:
        """The bucket's step again, on what its buffers hold."""
        return self._run(self._buffers(bucket))

    def rerun_uncaptured(self, bucket: Bucket) -> StepOutput:
        return self._forward(self._buffers(bucket))

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
        return graph.replay() if graph else self._forward(buffers)

    @torch.no_grad()
    def _forward(self, buffers: StepBuffers) -> StepOutput:
        variant = self._set_attn_metadata(buffers)
        last_token_rows = buffers.logits_indices if variant.last_token_rows else None
        logits = self._logits(buffers, last_token_rows, None if variant.last_token_rows else buffers.logits_indices)
        state = self.state
        tokens = advance(
            logits,
            buffers.rows,
            buffers.lengths,
            state.token_ids,
            state.positions,
            state.seq_lens,
            self._advance_backend,
        )
        return StepOutput(logits, tokens, buffers.rows)

    @torch.no_grad()
    def _logits_at(self, buffers: StepBuffers, rows: Tensor) -> Tensor:
        self._set_attn_metadata(buffers)
        return self._logits(buffers, None, rows)

    def _set_attn_metadata(self, buffers: StepBuffers) -> Variant:
        """What the layers are to see from now on; how the bucket's step is made."""
        self.step.show(buffers.step)
        self.step.variant = variant = self._variants[buffers.bucket]
        self.step.prefill_backend = variant.attention or self.plan.prefill_attention
        if self.plan.graphs == "region":
            torch.compiler.cudagraph_mark_step_begin()
        return variant

    def _logits(self, buffers: StepBuffers, last_token_rows: Tensor | None, head_rows: Tensor | None) -> Tensor:
        """[outputs, vocab]: rows that the last layer has not chosen are chosen before the head, where a model can."""
        keep: dict[str, Any] = {}
        if self._supports_logits_to_keep:  # 0 keeps all: in decode every token is one that is sampled from
            keep["logits_to_keep"] = 0 if head_rows is None else head_rows
        self.step.last_token_rows = last_token_rows
        try:
            logits = self.model(
                input_ids=buffers.input_ids, position_ids=buffers.position_ids, use_cache=False, **keep
            ).logits[0]
        finally:
            self.step.last_token_rows = None  # the reference runs the same layers
        return logits if head_rows is None or keep else logits[head_rows]


def smallest_bucket(buckets: tuple[Bucket, ...], size: int) -> Bucket:
    """The smallest bucket that holds `size`."""
    return next(bucket for bucket in buckets if bucket.size >= size)
