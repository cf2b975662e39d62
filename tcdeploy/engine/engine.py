"""Turn prompts into tokens with the warmed programs: continuous batching, one step ahead of the device.

`step` launches the next step and then reads the tokens of the one before, so the device never waits for the host. The
host decides (scheduler.py, no torch) from what it knows: lengths, blocks, limits. Which token was sampled it learns one
step late; a sequence that turns out to have stopped has run one step for nothing, whose token is dropped here.

A constraint has to see a token before it can say what may follow. Where such a row decodes, the model's part of the
next step is launched first, the tokens are read while the device works on it, and sampling follows with the masks. The
device waits only if reading and masks take longer than the model. Without constraints that order is never taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.compiler.stances import fail_on_recompile
from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.graphs import StepOutput
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.sampling import Logprobs, logprobs
from tcdeploy.engine.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from tcdeploy.engine.sequence import Chunk, NewToken, SamplingParams, Sequence, TokenLogprobs
from tcdeploy.errors import SpaceError, UsageError


class _PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens after the one at `start`, in host memory."""

    sequence: Sequence
    start: int
    logprobs: Logprobs


class _ForwardPass(NamedTuple):
    """A step whose model was launched, and whose tokens are still the greedy ones."""

    output: StepOutput
    sequences: tuple[Sequence | None, ...]  # None: a chunk that does not end its prompt
    chunks: tuple[Chunk, ...]

    @property
    def masks_need_unread_tokens(self) -> bool:
        """Of a step before this one, that the host has not read."""
        return any(one is not None and one.matcher is not None and one.in_flight > 1 for one in self.sequences)


class _InFlightStep(NamedTuple):
    """A step on its way: whose tokens it makes, and where the host will find them."""

    sequences: tuple[Sequence | None, ...]
    tokens: Tensor  # [outputs] int64, in host memory
    logprobs: Logprobs | None  # in host memory
    copy_done: torch.cuda.Event | None
    logprob_chunks: tuple[_PromptLogprobs, ...] = ()


class Engine:
    """Owns the requests and the KV blocks. Not thread-safe."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.plan = plan = runner.plan
        self.allocator = BlockAllocator(plan.kv_blocks, plan.block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_rows=plan.decode_buckets[-1].size,
                prefill_tokens=plan.prefill_buckets[-1].size,
                max_prefill_sequences=plan.max_prefill_sequences,
                max_consecutive_prefills=plan.max_consecutive_prefills,
            ),
            self.allocator,
        )
        self.device_wait_seconds = 0.0  # that the host stood still for the device
        self._requests: dict[int, Sequence] = {}
        self._stream_tokens: dict[int, list[NewToken]] = {}  # of requests that a stream will ask for
        self._buffered_tokens: list[NewToken] = []  # of submitted requests, made while a stream drove the engine
        self._next_id = 0
        self._in_flight: _InFlightStep | None = None

    def submit(self, prompt: Iterable[int], params: SamplingParams) -> int:
        """Queue a request and give its id. Raises UsageError or SpaceError for one that can never be served."""
        sequence = self._validated_sequence(list(prompt), params)
        self._requests[sequence.request_id] = sequence
        self.scheduler.submit(sequence)
        return sequence.request_id

    def abort(self, request_id: int) -> None:
        """Drop a request; nothing more comes from it. Raises UsageError where none of that id is open."""
        if request_id not in self._requests:
            raise UsageError(f"there is no open request {request_id}", "it may have finished already")
        self.scheduler.abort(self._requests.pop(request_id))
        self._stream_tokens.pop(request_id, None)
        self._buffered_tokens = [token for token in self._buffered_tokens if token.request_id != request_id]

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work or bool(self._buffered_tokens)

    def step(self) -> list[NewToken]:
        """Advance everything that runs; the new tokens of requests that were submitted.

        Those of a stream go to the stream. Nothing can compile here. Should a step raise, the requests are still
        open: they go back to the queue and compute their keys again.
        """
        self._launch_and_collect()
        taken, self._buffered_tokens = self._buffered_tokens, []
        return taken

    def stream(self, prompts: Iterable[Iterable[int]], params: SamplingParams) -> Iterator[NewToken]:
        """Tokens of all prompts as they come; `request_id` is replaced by the prompt's number.

        Raises UsageError for a prompt that cannot be served, and RecompileError should a step want to compile. Other
        requests of this engine go on meanwhile.
        """
        ids = self._submit_all(prompts, params)
        numbers = {request_id: number for number, request_id in enumerate(ids)}
        self._stream_tokens.update((request_id, []) for request_id in ids)
        try:
            while any(request_id in self._requests or self._stream_tokens.get(request_id) for request_id in ids):
                for request_id in ids:
                    for token in self._pop_stream_tokens(request_id):
                        yield token._replace(request_id=numbers[request_id])
                if any(request_id in self._requests for request_id in ids):
                    self._launch_and_collect()
        finally:
            self._abort_all(ids)

    def generate(self, prompts: Iterable[Iterable[int]], params: SamplingParams) -> list[list[int]]:
        """The new token ids of each prompt, a stop token included."""
        prompts = list(prompts)
        results: list[list[int]] = [[] for _ in prompts]
        for token in self.stream(prompts, params):
            results[token.request_id].append(token.token_id)
        return results

    def _launch_and_collect(self) -> None:
        """Launch the next step, then read the tokens of the one before; or in between, where masks need them."""
        before, self._in_flight = self._in_flight, None
        with fail_on_recompile():
            try:
                forward_pass = self._launch_forward()
                if forward_pass and before and forward_pass.masks_need_unread_tokens:
                    unread, before = before, None
                    self._deliver(self._collect(unread))
                self._in_flight = self._launch_sampling(forward_pass) if forward_pass else None
            except BaseException:
                self._discard_step(before)
                raise
            self._deliver(self._collect(before) if before else [])
            if self._in_flight is None and not self.scheduler.running:
                self.runner.row_assignment.assign([])  # idle: rows are emptied now rather than before the next prompt

    def _discard_step(self, before: _InFlightStep | None) -> None:
        """A step was scheduled and did not run: what the scheduler believes to be in the cache is not there."""
        try:
            self._deliver(self._collect(before) if before else [])
        finally:
            self.scheduler.requeue_all()
            self.runner.row_assignment.clear()

    def _launch_forward(self) -> _ForwardPass | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        running = self.scheduler.running
        output = self.runner.prefill(step.chunks, running) if step.chunks else self.runner.decode(running)
        return _ForwardPass(output, _output_sequences(step), step.chunks)

    def _launch_sampling(self, forward_pass: _ForwardPass) -> _InFlightStep:
        launched = self._sample_and_copy(forward_pass.output, forward_pass.sequences)
        logprob_chunks = self._prompt_logprobs(forward_pass.chunks)  # writes the step's buffers, which sampling read
        return (
            launched._replace(logprob_chunks=logprob_chunks, copy_done=_record_event(forward_pass.output.tokens))
            if logprob_chunks
            else launched
        )

    def _prompt_logprobs(self, chunks: tuple[Chunk, ...]) -> tuple[_PromptLogprobs, ...]:
        """The prompts' own tokens, where a request asks for them."""
        return tuple(
            _PromptLogprobs(chunk.sequence, start, Logprobs(*map(_to_host, found)))
            for chunk in chunks
            if (wanted := chunk.sequence.params.prompt_logprobs) is not None
            for start, found in self.runner.compute_prompt_logprobs(chunk, wanted)
        )

    def _sample_and_copy(self, output: StepOutput, sequences: tuple[Sequence | None, ...]) -> _InFlightStep:
        """Sample where greedy is not enough, and start the copy of the tokens to the host."""
        live = [sequence for sequence in sequences if sequence is not None and not sequence.finish_reason]
        features = self.runner.row_assignment.features(live)
        if features:
            masks = self.runner.row_assignment.masks(sequences, len(output.logits)) if features.masks else None
            output = self.runner.sample(output, features, masks)
        wanted = max((-1 if one.params.logprobs is None else one.params.logprobs for one in live), default=-1)
        found = logprobs(output.logits, output.tokens, wanted) if wanted >= 0 else None
        tokens = _to_host(output.tokens)
        found = Logprobs(*map(_to_host, found)) if found else None
        return _InFlightStep(sequences, tokens, found, _record_event(output.tokens))

    def _collect(self, launched: _InFlightStep) -> list[NewToken]:
        if launched.copy_done:  # the one place where the host waits for the device
            start = time.perf_counter()
            launched.copy_done.synchronize()
            self.device_wait_seconds += time.perf_counter() - start
        for logprob_chunks in launched.logprob_chunks:
            logprob_chunks.sequence.prompt_logprobs[
                logprob_chunks.start : logprob_chunks.start + len(logprob_chunks.logprobs.chosen)
            ] = [
                _token_logprobs(logprob_chunks.logprobs, row, logprob_chunks.sequence.params.prompt_logprobs)
                for row in range(len(logprob_chunks.logprobs.chosen))
            ]
        made = []
        for row, (sequence, token_id) in enumerate(zip(launched.sequences, launched.tokens.tolist(), strict=False)):
            if sequence is None or sequence.finish_reason:  # it stopped, or was aborted, after this was launched
                continue
            sequence.receive(token_id)
            if sequence.finish_reason:
                self.scheduler.finish(sequence)
                del self._requests[sequence.request_id]
            found = _token_logprobs(launched.logprobs, row, sequence.params.logprobs)
            token = NewToken(sequence.request_id, token_id, sequence.finish_reason, found)
            made.append(_with_prompt_info(token, sequence) if sequence.num_output_tokens == 1 else token)
        return made

    def _validated_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence:
        if not prompt:
            raise UsageError("the prompt is empty", "give at least one token; most tokenizers add one at the start")
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise UsageError(f"the prompt holds what is no token id from 0 to {self.vocab_size - 1}")
        longest = len(prompt) + params.max_new_tokens
        if longest > self.plan.context:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones exceed the context of "
                f"{self.plan.context} tokens",
                "a shorter prompt, or a smaller --max-new-tokens",
            )
        if self.allocator.blocks_for(longest) > self.allocator.capacity:
            raise SpaceError(f"{longest} tokens need more KV blocks than the {self.allocator.capacity} there are")
        named = [*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)]
        if named and max(named) >= self.vocab_size and (params.logit_bias or params.min_new_tokens):
            raise UsageError(f"token id {max(named)} is named, and the vocabulary ends at {self.vocab_size - 1}")
        self._next_id += 1
        return Sequence(self._next_id, prompt, len(prompt), params)

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    def _submit_all(self, prompts: Iterable[Iterable[int]], params: SamplingParams) -> list[int]:
        """All or none: one that is refused takes the others back."""
        ids: list[int] = []
        try:
            for prompt in prompts:
                ids.append(self.submit(prompt, params))
        except Exception:
            self._abort_all(ids)
            raise
        return ids

    def _abort_all(self, ids: list[int]) -> None:
        """What a caller left unfinished: out of the queue, its blocks free."""
        for request_id in ids:
            self._stream_tokens.pop(request_id, None)
            if request_id in self._requests:
                self.abort(request_id)

    def _deliver(self, tokens: list[NewToken]) -> None:
        for token in tokens:
            self._stream_tokens.get(token.request_id, self._buffered_tokens).append(token)

    def _pop_stream_tokens(self, request_id: int) -> list[NewToken]:
        taken = self._stream_tokens.get(request_id)
        if not taken:  # nothing new, or aborted by somebody else
            return []
        self._stream_tokens[request_id] = []
        return taken


def _with_prompt_info(token: NewToken, sequence: Sequence) -> NewToken:
    """The first token brings what there is to say of the prompt."""
    wanted = sequence.params.prompt_logprobs is not None
    return token._replace(
        prompt_logprobs=tuple(sequence.prompt_logprobs) if wanted else None,
        queue_seconds=sequence.admitted_at - sequence.submitted_at,
    )


def _output_sequences(step: SchedulerOutput) -> tuple[Sequence | None, ...]:
    """Whose next token each output of the step is."""
    if step.decode:
        return step.decode
    return tuple(sequence if stop == len(sequence.token_ids) else None for sequence, _, stop in step.chunks)


def _record_event(tensor: Tensor) -> torch.cuda.Event | None:
    """When all that was launched so far is done."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that the host may read once the event after it has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _token_logprobs(found: Logprobs | None, row: int, wanted: int | None) -> TokenLogprobs | None:
    if found is None or wanted is None:
        return None
    ids, values = found.top_ids[row, :wanted].tolist(), found.top_logprobs[row, :wanted].tolist()
    return TokenLogprobs(float(found.chosen[row]), tuple(zip(ids, values, strict=True)))
