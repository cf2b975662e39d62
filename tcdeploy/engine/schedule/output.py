"""What the scheduler decided for one step. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.engine.schedule.sequence import Chunk, Sequence


class SchedulerOutput(NamedTuple):
    """The next step: prefill chunks, decode sequences, or both in a mixed step.

    `decode` is in row order, and holds the first of the running sequences if chunks end prompts in the same step.
    """

    chunks: tuple[Chunk, ...] = ()
    decode: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(stop - start for _, start, stop in self.chunks)

    @property
    def row_context(self) -> int:
        """Tokens in the KV cache, summed over the decode rows."""
        return sum(sequence.num_computed_tokens for sequence in self.decode)

    @property
    def prefix_pairs(self) -> int:
        """Pairs of a token of a chunk and a token before the chunk in the same prompt, summed over the chunks."""
        return sum((stop - start) * start for _, start, stop in self.chunks)

    @property
    def prefix(self) -> int:
        """Tokens before a chunk in its prompt; the maximum over the chunks."""
        return max((start for _, start, _ in self.chunks), default=0)

    def output_sequences(self, max_chunks: int) -> tuple[Sequence | None, ...]:
        """The sequence of each output; None for a chunk that does not end its prompt, and for padding.

        In a mixed step the outputs of `max_chunks` chunks come first, and then those of the decode rows.
        """
        of_chunks = tuple(sequence if stop == len(sequence.token_ids) else None for sequence, _, stop in self.chunks)
        if not self.decode or not self.chunks:
            return self.decode or of_chunks
        padding: tuple[Sequence | None, ...] = (None,) * (max_chunks - len(of_chunks))
        return (*of_chunks, *padding, *self.decode)
