"""Which prefix a prompt starts from, and where the state of a prompt is kept for others. Does not import torch.

The blocks of a prompt are registered in the prefix cache when the step after the one that writes them is scheduled,
because only a later step may read them.

If layers keep state in slots, a prompt starts from a snapshot of the state at the end of a prefix (snapshots.py).
Snapshots are large, and a prompt is split where one is taken, which delays its first token by one step. So they are
taken at two places only, each at least `min_snapshot_tokens` after the last one that the prompt starts from or takes:

- the end of the prefix that the prompt shares with an earlier one, for a third one that has it too, such as the
  instructions of an application. Until then nothing tells where that prefix ends.
- the last block border of the prompt, for the next turn of a chat, the same prompt, and after a preemption. A prompt
  that shares so many tokens with no earlier one may never be continued: it must have `min_lone_snapshot_tokens`, so
  that the additional step takes little time beside the others.

They are taken of prompts only. A decode row is computed one step beyond its last token before the host knows, and is
seldom at a border of blocks. So the tokens of an answer are computed again in the next turn.
"""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.engine.schedule.blocks import BlockAllocator, SnapshotMatch
from tcdeploy.engine.schedule.sequence import Chunk, Sequence

SlotCopies = tuple[tuple[int, int], ...]  # (source, target) slots


class PendingSnapshot(NamedTuple):
    """The state of a sequence after `tokens` tokens, which the last scheduled step copies to `slot`."""

    sequence: Sequence
    tokens: int
    slot: int


class PrefixReuse:
    """Matches and registers the prefixes of sequences, and decides the copies of state in each step."""

    def __init__(
        self, allocator: BlockAllocator, has_slots: bool, min_snapshot_tokens: int, min_lone_snapshot_tokens: int
    ) -> None:
        self.allocator = allocator
        self.min_snapshot_tokens, self.min_lone_snapshot_tokens = min_snapshot_tokens, min_lone_snapshot_tokens
        self._has_slots = has_slots
        # Of the last scheduled step.
        self._chunks: tuple[Chunk, ...] = ()
        self._snapshots: list[PendingSnapshot] = []
        self._restores: list[tuple[int, int]] = []

    @property
    def restores(self) -> SlotCopies:
        """The copies to make before the step that is being scheduled."""
        return tuple(self._restores)

    @property
    def snapshots(self) -> SlotCopies:
        """The copies to make after that step."""
        return tuple((sequence.slot, slot) for sequence, _, slot in self._snapshots)

    def start_step(self) -> None:
        """Register the blocks that the last step's chunks write, and its snapshots.

        A sequence released since then has no blocks left. Its blocks were registered at that time, and a snapshot is
        added to them if they have not been evicted: it is of the step's end, whatever became of the sequence.
        """
        for sequence, _, stop in self._chunks:
            self.allocator.register(sequence.token_ids, sequence.blocks, stop, sequence.adapter_id)
        for sequence, tokens, slot in self._snapshots:
            self.allocator.add_snapshot(slot, sequence.token_ids, tokens, sequence.adapter_id)
        self._forget_step()

    def reset(self) -> None:
        """After a scheduled step failed: drop all prefixes, those that the step would have written included."""
        self._forget_step()
        self.allocator.reset_prefix_cache()

    def match(self, sequence: Sequence) -> SnapshotMatch:
        """The blocks of its prefix that need not be computed, and if layers keep state the snapshot at their end."""
        if sequence.params.prompt_logprobs is not None:  # cached tokens have to be scored too
            return SnapshotMatch([], None, 0)
        if self._has_slots:
            return self.allocator.match_snapshot(sequence.token_ids, sequence.adapter_id)
        return SnapshotMatch(self.allocator.match(sequence.token_ids, sequence.adapter_id), None, 0)

    def admit(self, sequence: Sequence, match: SnapshotMatch) -> None:
        """Plan the copies of an admitted sequence, whose slot and computed tokens are set."""
        sequence.snapshot_borders = self._borders(sequence, match.registered_tokens)
        if match.slot is not None:
            self._restores.append((match.slot, sequence.slot))

    def launch(self, chunks: tuple[Chunk, ...]) -> None:
        """Take note of the chunks of the step that is being scheduled, and plan the snapshots at their ends."""
        self._chunks = chunks
        for sequence, _, stop in chunks:
            if stop in sequence.snapshot_borders and not self._is_taken(sequence, stop):
                slot = self.allocator.reserve_snapshot(sequence.token_ids, stop, sequence.adapter_id)
                if slot is not None:
                    self._snapshots.append(PendingSnapshot(sequence, stop, slot))

    def _borders(self, sequence: Sequence, registered_tokens: int) -> tuple[int, ...]:
        """The ends of chunks at which snapshots are taken, ascending, in tokens."""
        if not self.allocator.snapshots.capacity or sequence.params.prompt_logprobs is not None:
            return ()
        borders, start = [], sequence.num_computed_tokens
        last_border = (len(sequence.token_ids) - 1) // self.allocator.block_size * self.allocator.block_size
        is_lone = registered_tokens < self.min_snapshot_tokens
        min_tokens = self.min_lone_snapshot_tokens if is_lone else self.min_snapshot_tokens
        for border in (registered_tokens, last_border):
            if border - start >= min_tokens:
                borders.append(border)
                start = border
        return tuple(borders)

    def _is_taken(self, sequence: Sequence, tokens: int) -> bool:
        """Whether another sequence of the step has the same prefix, as the choices of one request do."""
        return any(
            stop == tokens
            and other.adapter_id == sequence.adapter_id
            and other.token_ids[:stop] == sequence.token_ids[:stop]
            for other, stop, _ in self._snapshots
        )

    def _forget_step(self) -> None:
        self._chunks = ()
        self._snapshots.clear()
        self._restores.clear()


def tokens_to_border(sequence: Sequence) -> int:
    """Tokens of a prompt up to the next place where it is split for a snapshot, or to its end."""
    computed = sequence.num_computed_tokens
    return (
        next((border for border in sequence.snapshot_borders if border > computed), len(sequence.token_ids)) - computed
    )
