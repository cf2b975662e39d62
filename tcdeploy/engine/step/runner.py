"""Runs one step of the model for a bucket: replays its CUDA graph, or calls its programs.

A step is given as a `StepBatch` (engine/schedule/step_batch.py). The runner has no access to the scheduler's sequences.
Only the rows that are sampled from pass through the head. A step ends on the device with the greedy tokens and the
advance of the decode rows; other sampling replaces these tokens afterwards.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.step_batch import PromptChunk, StepBatch
from tcdeploy.engine.step import sampling
from tcdeploy.engine.step.advance import advance
from tcdeploy.engine.step.batch import (
    GraphKey,
    PrefillBuffers,
    StepBuffers,
    StepOutput,
    decode_buffers,
    make_decode_rows,
)
from tcdeploy.engine.step.filled_state import FilledState
from tcdeploy.engine.step.rows import RowAssignment, combined_features
from tcdeploy.engine.step.slot_states import SlotStates
from tcdeploy.engine.step.step_graphs import StepGraphs
from tcdeploy.kernels.attention.metadata import AttentionConfig, Step, StepHolder, do_nothing
from tcdeploy.kernels.attention.ops import HOST_SCALARS, choose_decode_splits
from tcdeploy.kernels.sampling.reference import Logprobs
from tcdeploy.kernels.sampling.rows import Features
from tcdeploy.models.convert.scheme_linear import rounding_inputs
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import DEFAULT, Variant
from tcdeploy.programs.model_forward import ModelForward, StepInputs, TransformersForward
from tcdeploy.torch_compat.dynamo.body_forward import reuse_body_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_LOGPROBS_CHUNK = 512  # rows: 130 MB of bfloat16 logits at a vocabulary of 128,256


class SampledTokens(NamedTuple):
    tokens: Tensor  # [outputs] int64
    logprobs: Logprobs | None  # of these tokens; None if no row requests them


class PromptLogits(NamedTuple):
    """Logits of consecutive positions of a prompt, and the tokens that follow these positions."""

    start: int  # position of the first row
    logits: Tensor  # [rows, vocab]
    next_ids: Tensor  # [rows] int64


class ModelRunner:
    """Owns the decode rows, and the buffers and CUDA graphs of all buckets.

    Every pass runs under `no_grad`, because torch guards on the grad mode. `step_holder` is the one that the attention
    modules of `model` hold. Without a model, steps are run by `forward` (programs/packages.py), and no reference can be
    computed.
    """

    def __init__(
        self, model: PreTrainedModel | None, plan: Plan, step_holder: StepHolder, split_counters: Tensor,
        vocab_size: int, forward: ModelForward | None = None, slot_tensors: ListLike[Tensor] = (),
    ) -> None:  # fmt: skip
        """`slot_tensors`: as in `SlotStates`."""
        self._model = model
        self.step_holder = step_holder
        self.forward: ModelForward = forward or self.transformers_forward  # ahead-of-time programs replace it
        self.plan = plan
        self.split_counters = split_counters
        self.vocab_size = vocab_size
        self.slot_states = SlotStates(slot_tensors)
        self._earlier_states: dict[int, list[Tensor]] = {}  # by slot, before the last step
        self.decode_rows = make_decode_rows(plan, vocab_size)
        self.row_assignment = RowAssignment(self.decode_rows)
        self._decode_buffers = {b: decode_buffers(b, self.decode_rows, split_counters) for b in plan.decode_buckets}
        self._prefill_buffers: dict[tuple[Bucket, int], PrefillBuffers] = {}  # by bucket and tokens
        uses_triton = BACKENDS[plan.decode_attention].uses_triton
        self._backend: Literal["triton", "reference"] = "triton" if uses_triton else "reference"  # of kernels/sampling
        self.variants = dict.fromkeys(plan.buckets, DEFAULT)  # works for every model; warm-up sets the others
        self.eager_buckets: set[Bucket] = set()  # run without programs, graphs and padding of prompts
        self.reserved_blocks: tuple[int, ...] | None = None  # for batches of the warm-up; None: all blocks
        self.filled_state: FilledState | None = None  # by a check; None after a step, which may change it
        self.graphs = StepGraphs(plan, self._forward, self._buffers_of)
        self._row_slots = plan.row_slots(plan.prefill_buckets[-1])  # the same in all prefill buckets
        self._prefill_logits: Tensor | None = None  # [outputs, vocab], which all captured prefill steps write
        self._logits_dtype: torch.dtype | None = None  # of the last step that ran without a graph
        self.step_counts: Counter[Bucket] = Counter()  # steps of each bucket since the start
        self.computed_tokens: Counter[Bucket] = Counter()  # tokens or rows of these steps, padding included
        self.padding_tokens: Counter[Bucket] = Counter()  # those of them that were padding
        self._counts_steps = True

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers, whose weights the programs share. A start from packages has none."""
        assert self._model is not None
        return self._model

    @cached_property
    def transformers_forward(self) -> TransformersForward:
        return TransformersForward(self.model, self.step_holder)

    def run(self, batch: StepBatch) -> StepOutput:
        """Launch a step, whose outputs are those of `StepBatch.output_rows`. Their tokens are the greedy ones."""
        assert batch.num_tokens, "`apply` takes a batch without a step"
        self.apply(batch)
        self.slot_states.copy(batch.restores)
        self.filled_state = None
        # A chunk at position 0 starts from the initial value. At most two scored chunks of a step continue a prompt.
        self._earlier_states = {c.slot: self.slot_states.save(c.slot) for c in batch.chunks if c.scored_ids and c.start}
        output = self._run_prefill(batch) if batch.chunks else self._run_decode(batch.num_decoding)
        self.slot_states.copy(batch.snapshots)
        return output

    def apply(self, batch: StepBatch) -> None:
        """Change the decode rows as the batch says."""
        self.row_assignment.apply(batch)

    def _run_prefill(self, batch: StepBatch) -> StepOutput:
        """One packed step over the chunks, and in a mixed step over one token of each decoding row."""
        tokens = batch.num_tokens
        bucket = batch.bucket or smallest_bucket(self.plan.prefill_buckets, tokens)
        row_slots = self._row_slots_for(batch.num_decoding)
        sizes = self._sizes(bucket, row_slots)
        if batch.early_size_from is not None:
            sizes = tuple(size for size in self.graphs.early_sizes(bucket) if size >= batch.early_size_from)
        prefill = self._prefill_for(bucket, tokens, sizes)
        prefill.fill(batch)
        self._count_step(bucket, tokens, prefill.tokens)
        if self._counts_steps:
            self.graphs.count_wanted(bucket, tokens, row_slots)
        return self.graphs.run(prefill.buffers(row_slots))

    def _run_decode(self, num_decoding: int) -> StepOutput:
        bucket = smallest_bucket(self.plan.decode_buckets, num_decoding)
        self._count_step(bucket, num_decoding, bucket.size)
        return self.graphs.run(self._decode_buffers[bucket])

    def step_sizes(self, num_decoding: int) -> tuple[int, ...]:
        """The sizes that steps with prompts and `num_decoding` decode rows are padded to now, ascending.

        The last one is the size of the largest prefill bucket. Sizes below `num_decoding` may be included.
        """
        return self.graphs.step_sizes(self._row_slots_for(num_decoding))

    def _row_slots_for(self, num_decoding: int) -> int:
        return next(row_slots for row_slots in self._row_slots if row_slots >= num_decoding)

    @contextlib.contextmanager
    def uncounted_steps(self) -> Iterator[None]:
        """Exclude steps from the counters of steps, tokens and wanted graphs, which describe requests only."""
        self._counts_steps = False
        try:
            yield
        finally:
            self._counts_steps = True

    def _count_step(self, bucket: Bucket, used: int, size: int) -> None:
        if not self._counts_steps:
            return
        self.step_counts[bucket] += 1
        self.computed_tokens[bucket] += size
        self.padding_tokens[bucket] += size - used

    @torch.no_grad()
    def sample(self, batch: StepBatch, output: StepOutput, masks: Tensor | None = None) -> SampledTokens:
        """Sample a step's tokens with the settings of its rows. They replace the greedy ones as the next step's input.

        Rows of sequences that have ended since the launch are sampled too. The outputs after the last chunk or row are
        padding, for which nothing is sampled. `masks` [constrained outputs, words] int32, from `make_masks`, contain
        the masks in the order of these outputs.
        """
        rows = batch.output_rows(self.plan.max_prefill_sequences)
        output = StepOutput(*(tensor[: len(rows)] for tensor in output))
        uses = self.row_assignment.uses(rows)
        tokens, features = output.tokens, combined_features(uses)
        if features:
            on_device = self.row_assignment.masks_on_device(rows, masks) if masks is not None else None
            tokens = self._sample(output, features, on_device)
        num_logprobs = [use.logprobs for use in uses if use.logprobs is not None]
        return SampledTokens(tokens, self.logprobs(output.logits, tokens, max(num_logprobs)) if num_logprobs else None)

    def _sample(self, output: StepOutput, features: Features, masks: Tensor | None) -> Tensor:
        decode_rows = self.decode_rows
        positions = decode_rows.positions[output.rows]
        tokens = sampling.sample(
            output.logits, decode_rows.sampling, positions, features, output.rows, masks, output.tokens, self._backend
        )
        decode_rows.token_ids.index_copy_(0, output.rows, tokens)
        if features.penalties:
            sampling.count_tokens(decode_rows.sampling, output.rows, tokens)
        return tokens

    def make_masks(self, count: int) -> Tensor:
        """Host memory for `count` bit masks, [count, words] int32, pinned for a GPU, without values.

        Allocated by torch, which cannot pin a tensor that is made from an array. Fill it with numpy: torch fills a
        large tensor with one thread per core, which then spin for a while.
        """
        words = -(-self.vocab_size // 32)
        return torch.empty(count, words, dtype=torch.int32, pin_memory=self.plan.device == "cuda")

    def launch_sampling_kernels(self) -> None:
        """Launch every kernel of sampling on the padding row, so that none is compiled or loaded during a request.

        A step must have run without a graph before, because the kernels are compiled for the dtype of its logits. Does
        nothing with the reference backend.
        """
        if self._backend == "reference":
            return
        assert self._logits_dtype is not None
        device = self.plan.device
        logits = torch.zeros(1, self.vocab_size, dtype=self._logits_dtype, device=device)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        rows = torch.full((1,), self.decode_rows.padding_row, device=device)
        masks = torch.full((1, -(-self.vocab_size // 32)), -1, dtype=torch.int32, device=device)
        features = Features(penalties=True, filters=True, biases=True, masks=True)
        sampling.sample(logits, self.decode_rows.sampling, token, features, rows, masks, token, self._backend)
        self.logprobs(logits, token, 1)

    @torch.no_grad()
    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
        """As `sampling.logprobs`."""
        return sampling.logprobs(logits, tokens, k, self._backend)

    def compute_prompt_logprobs(self, chunk: PromptChunk) -> list[tuple[int, Logprobs]]:
        """Log-probabilities of a chunk's `scored_ids`, by the position of the first row of each piece of logits."""
        return [
            (start, self.logprobs(logits, next_ids, chunk.num_logprobs))
            for start, logits, next_ids in self.compute_prompt_logits(chunk)
        ]

    @torch.no_grad()
    def compute_prompt_logits(self, chunk: PromptChunk) -> Iterator[PromptLogits]:
        """Logits of the positions before the `scored_ids` of a chunk of the last step. Iterate to the end.

        Yields pieces of at most PROMPT_LOGPROBS_CHUNK rows: the logits of a whole prompt may be larger than the
        weights. Graphs are not used, since they keep only the last row of a prompt. Each piece computes the chunk again
        from the state before the step; afterwards the state is as the step left it.
        """
        tokens = len(chunk.token_ids)
        bucket = smallest_bucket(self.plan.prefill_buckets, tokens)
        prefill = self._prefill_for(bucket, tokens, self._sizes(bucket, 0))
        prefill.fill(StepBatch(chunks=[replace(chunk, row=None)]))  # it changes no decode row
        state = self.slot_states.save(chunk.slot)
        with reuse_body_output(self.model) if self.has_model else contextlib.nullcontext():
            for begin in range(0, len(chunk.scored_ids), PROMPT_LOGPROBS_CHUNK):
                scored_ids = chunk.scored_ids[begin : begin + PROMPT_LOGPROBS_CHUNK]
                next_ids = torch.tensor(scored_ids, device=self.plan.device)
                if chunk.start:
                    self.slot_states.restore(chunk.slot, self._earlier_states[chunk.slot])
                rows = torch.arange(begin, begin + len(next_ids), device=self.plan.device)
                yield PromptLogits(chunk.start + begin, self._logits(prefill.buffers(), rows, False), next_ids)
        self.slot_states.restore(chunk.slot, state)
        self.graphs.uncaptured_runs += self.graphs.is_captured(bucket)

    def set_variant(self, bucket: Bucket, variant: Variant) -> None:
        """Run the bucket with this variant from now on. Its graphs are dropped."""
        self.graphs.drop(bucket)
        self.variants[bucket] = variant

    def run_eagerly(self, bucket: Bucket) -> None:
        """Run the bucket uncompiled from now on, with the variant that works for every model."""
        self.set_variant(bucket, DEFAULT)
        self.eager_buckets.add(bucket)

    def batch_allocator(self) -> BlockAllocator:
        """A new allocator for a batch of the warm-up, which does not go through the scheduler."""
        return BlockAllocator(self.plan.kv_blocks, self.plan.block_size, self.reserved_blocks)

    def rerun(self, bucket: Bucket) -> StepOutput:
        """Run the bucket's step again on the current contents of its buffers."""
        return self.graphs.run(self._buffers_of(GraphKey(bucket, bucket.size, 0)))

    def run_uncaptured(self, key: GraphKey) -> StepOutput:
        """Run a step of this shape without its CUDA graph: a prefill step on padding, which writes to no KV block."""
        return self._forward(self._buffers_of(key, clear=True))

    def rerun_uncaptured(self, bucket: Bucket) -> StepOutput:
        return self._forward(self._buffers_of(GraphKey(bucket, bucket.size, 0)))

    def _buffers_of(self, key: GraphKey, clear: bool = False) -> StepBuffers:
        """The buffers of a step. `clear`: fill prefill buffers with padding, so that the step writes to no KV block."""
        if not key.bucket.is_prefill:
            return self._decode_buffers[key.bucket]
        prefill = self._prefill_of_size(key.bucket, key.tokens)
        if clear:
            prefill.fill(StepBatch())
        return prefill.buffers(key.row_slots)

    def _sizes(self, bucket: Bucket, row_slots: int) -> tuple[int, ...]:
        """The sizes that the bucket's steps are padded to; () if they are not padded."""
        return () if bucket in self.eager_buckets else self.graphs.sizes(bucket, row_slots)

    def _prefill_for(self, bucket: Bucket, tokens: int, sizes: ListLike[int]) -> PrefillBuffers:
        """The buffers for `tokens` tokens, padded to the next of `sizes`."""
        if (size := next((size for size in sizes if size >= tokens), None)) is not None:
            return self._prefill_of_size(bucket, size)
        size = max(tokens, bucket.min_size)  # of a dynamic bucket without graphs, or an eager one: no static buffers
        return PrefillBuffers(self.plan, bucket, size, self.decode_rows, self.split_counters)

    def _prefill_of_size(self, bucket: Bucket, size: int) -> PrefillBuffers:
        if (key := (bucket, size)) not in self._prefill_buffers:
            self._prefill_buffers[key] = PrefillBuffers(self.plan, bucket, size, self.decode_rows, self.split_counters)
        return self._prefill_buffers[key]

    @torch.no_grad()
    def _forward(self, buffers: StepBuffers, before_program: Callable[[], None] = do_nothing) -> StepOutput:
        in_last_layer = self.variants[buffers.bucket].last_token_rows and buffers.logits_indices is not None
        logits = self._logits(buffers, buffers.logits_indices, in_last_layer, before_program)
        self._logits_dtype = logits.dtype
        if buffers.bucket.is_prefill and self.plan.uses_cuda_graph(buffers.bucket):
            logits = self._share_logits(logits)
        decode_rows = self.decode_rows
        tokens = advance(
            logits, buffers.rows, buffers.lengths, decode_rows.token_ids, decode_rows.positions, decode_rows.seq_lens,
            self._backend,
        )  # fmt: skip
        return StepOutput(logits, tokens, buffers.rows)

    def _share_logits(self, logits: Tensor) -> Tensor:
        """Copy the logits of a prefill step to a tensor that all graphs of prefill steps share.

        Otherwise each of some hundred graphs would keep its own: 68 MB for 264 outputs and a vocabulary of 128,256.
        Steps run in stream order, so a step's tokens are sampled before the next step overwrites the logits.
        """
        outputs, vocab_size = logits.shape
        if self._prefill_logits is None:
            max_outputs = self.plan.max_prefill_sequences + self._row_slots[-1]
            self._prefill_logits = logits.new_empty(max_outputs, vocab_size)
        return self._prefill_logits[:outputs].copy_(logits)

    def _logits(
        self, buffers: StepBuffers, rows: Tensor | None, in_last_layer: bool,
        before_program: Callable[[], None] = do_nothing,
    ) -> Tensor:  # fmt: skip
        """Logits [outputs, vocab] of `rows`, which are selected in the last layer or at the head."""
        if self.plan.graphs == "region":
            torch.compiler.cudagraph_mark_step_begin()
        if buffers.metadata.prefill is not None:
            buffers.metadata.prefill.host_scalars[HOST_SCALARS.index("rows")] = buffers.row_slots
        input_ids = buffers.input_ids
        if buffers.token_sources is not None:
            input_ids = torch.cat([self.decode_rows.token_ids, input_ids[0]])[buffers.token_sources][None]
        step = self._make_step(buffers, rows if in_last_layer else None, before_program)
        with rounding_inputs(self.plan.quantises_inputs(buffers.bucket)):  # of layers that run uncompiled
            return self.forward(StepInputs(input_ids, buffers.position_ids, step, rows, in_last_layer))

    def _make_step(
        self, buffers: StepBuffers, last_token_rows: Tensor | None, before_program: Callable[[], None] = do_nothing
    ) -> Step:
        bucket, variant = buffers.bucket, self.variants[buffers.bucket]
        attention = AttentionConfig(
            prefill_backend=variant.attention or self.plan.prefill_attention,
            decode_backend=self.plan.decode_attention,
            decode_splits=1 if bucket.is_prefill else choose_decode_splits(bucket.size, self.split_counters),
        )
        is_compiled = bucket not in self.eager_buckets
        return Step(bucket, variant, buffers.metadata, attention, last_token_rows, is_compiled, before_program)

    @torch.no_grad()
    def reference_logits(self, token_ids: list[list[int]], positions: list[int], attn_implementation: str) -> Tensor:
        """Logits [prompts, positions, vocab] by transformers' own attention, uncompiled. Prompts have equal lengths."""
        from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION  # imports transformers

        input_ids = torch.tensor(token_ids, device=self.model.device)
        rows = torch.tensor(positions, device=self.model.device)
        selected_rows = {"logits_to_keep": rows} if self.transformers_forward.supports_logits_to_keep else {}
        self.step_holder.step = None  # modules run uncompiled
        try:
            self.model.set_attn_implementation(attn_implementation)
        except ValueError:  # a part of the model, such as an audio tower, supports only eager attention
            self.model.set_attn_implementation("eager")
        try:
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **selected_rows).logits
        finally:
            self.model.set_attn_implementation(ATTN_IMPLEMENTATION)
        return logits if selected_rows else logits[:, rows]


def smallest_bucket(buckets: tuple[Bucket, ...], size: int) -> Bucket:
    return next(bucket for bucket in buckets if bucket.size >= size)
