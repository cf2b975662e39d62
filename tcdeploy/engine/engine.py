"""Turn prompts into tokens with the warmed programs: prefill in chunks, then decode everything that runs together.

Each `step` either brings one waiting sequence in or advances all running ones by a token. A sequence is admitted when
the blocks for its prompt and all its new tokens are free, so nothing is ever evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from tcdeploy.compiler.programs import sealed
from tcdeploy.engine.batch import Chunk
from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.graphs import StepOutput
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.sampling import make_generator, sample
from tcdeploy.engine.sequence import SamplingParams, Sequence
from tcdeploy.errors import SpaceError, UsageError


class NewToken(NamedTuple):
    """A token for prompt number `prompt`; `finish_reason` is "" until its last one."""

    prompt: int
    token_id: int
    finish_reason: str


class Engine:
    """Owns the sequences and the KV blocks. Not thread-safe."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.plan = runner.plan
        self.allocator = BlockAllocator(self.plan.kv_blocks, self.plan.block_size)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._generators: dict[int, torch.Generator | None] = {}

    def stream(self, prompts: Iterable[list[int]], params: SamplingParams) -> Iterator[NewToken]:
        """Tokens of all prompts as they come; one stream at a time.

        Raises UsageError for a prompt that cannot be served, and RecompileError should a step want to compile.
        """
        if self._waiting or self._running:
            raise UsageError("another stream of this engine is still open", "finish or close it first")
        sequences = [self._admissible(index, list(prompt), params) for index, prompt in enumerate(prompts)]
        self._waiting.extend(sequences)
        try:
            while self._waiting or self._running:
                yield from self.step()
        finally:
            self._abandon(sequences)

    def generate(self, prompts: Iterable[list[int]], params: SamplingParams) -> list[list[int]]:
        """The new token ids of each prompt, a stop token included."""
        prompts = list(prompts)
        results: list[list[int]] = [[] for _ in prompts]
        for token in self.stream(prompts, params):
            results[token.prompt].append(token.token_id)
        return results

    def step(self) -> list[NewToken]:
        """Bring one sequence in, or advance all that run. Nothing can compile here."""
        with sealed():
            return self._step()

    def _step(self) -> list[NewToken]:
        if self._waiting and len(self._running) < self.plan.decode_buckets[-1].size and self._fits(self._waiting[0]):
            sequence = self._waiting.popleft()
            return self._advance([sequence], self._prefill(sequence))
        batch = list(self._running)
        return self._advance(batch, self.runner.decode(batch))

    def _prefill(self, sequence: Sequence) -> StepOutput:
        """The whole prompt, in chunks of the largest bucket; the last chunk's output."""
        sequence.blocks = self.allocator.take(self.allocator.needed(self._longest(sequence)))
        self._generators[sequence.index] = make_generator(sequence.params, self.runner.model.device)
        self._running.append(sequence)
        largest = self.plan.prefill_buckets[-1].size
        while True:
            stop = min(sequence.cached + largest, sequence.prompt_length)
            output = self.runner.prefill([Chunk(sequence, sequence.cached, stop)])
            sequence.cached = stop
            if stop == sequence.prompt_length:
                return output

    def _advance(self, batch: list[Sequence], output: StepOutput) -> list[NewToken]:
        greedy = output.tokens.tolist()  # synchronises; each sampled row does once more
        made = []
        for row, sequence in enumerate(batch):
            generator = self._generators[sequence.index]
            token_id = sample(output.logits[row], sequence.params, generator) if generator else greedy[row]
            sequence.cached = len(sequence.token_ids)
            sequence.append(token_id)
            made.append(NewToken(sequence.index, token_id, sequence.finish_reason))
            if sequence.finish_reason:
                self._release(sequence)
        return made

    def _admissible(self, index: int, prompt: list[int], params: SamplingParams) -> Sequence:
        if not prompt:
            raise UsageError("the prompt is empty")
        sequence = Sequence(index, prompt, len(prompt), params)
        longest = self._longest(sequence)
        if longest > self.plan.context:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones exceed the context of "
                f"{self.plan.context} tokens",
                "a shorter prompt, or a smaller --max-new-tokens",
            )
        if self.allocator.needed(longest) > self.allocator.capacity:
            raise SpaceError(f"{longest} tokens need more KV blocks than the {self.allocator.capacity} there are")
        return sequence

    @staticmethod
    def _longest(sequence: Sequence) -> int:
        """Tokens it may come to hold; the last new one is never fed back, but costs at most one block."""
        return sequence.prompt_length + sequence.params.max_new_tokens

    def _fits(self, sequence: Sequence) -> bool:
        return self.allocator.needed(self._longest(sequence)) <= self.allocator.free

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._generators.pop(sequence.index)
        self.allocator.give_back(sequence.blocks)

    def _abandon(self, sequences: list[Sequence]) -> None:
        """What a caller left unfinished: out of the queue, its blocks free."""
        for sequence in sequences:
            if sequence in self._running:
                self._release(sequence)
            elif sequence in self._waiting:
                self._waiting.remove(sequence)
