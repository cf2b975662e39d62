"""What the parity check has written to the KV cache, so that the check of the next bucket need not write it again."""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.engine.schedule.sequence import Sequence


class FilledState(NamedTuple):
    """The sequences whose keys and values are in the KV cache, for all but their last tokens.

    compared: the tokens of each compared sequence, by its blocks. blocks: all that have been written, including those
    of other sequences.
    """

    compared: dict[tuple[int, ...], tuple[int, ...]]
    blocks: set[int]

    def includes(self, other: FilledState) -> bool:
        return other.compared.items() <= self.compared.items() and other.blocks <= self.blocks

    def is_kept_by(self, decoding: list[Sequence]) -> bool:
        """Whether a decode step of these sequences, which writes their last tokens, leaves `compared` as it is."""
        compared = {block for blocks in self.compared for block in blocks}
        return all(
            self.compared.get(tuple(sequence.blocks)) == tuple(sequence.token_ids)
            or compared.isdisjoint(sequence.blocks)
            for sequence in decoding
        )
