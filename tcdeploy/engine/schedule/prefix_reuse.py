"""Chooses the prefix that a prompt reuses, and the places where its state is kept. Does not import torch.

The blocks of a prompt are registered in the prefix cache when the step after the one that writes them is scheduled,
because only a later step may read them.

If layers keep state in slots, a prompt starts from a snapshot of the state at the end of a prefix (snapshots.py).
Snapshots are large, and a prompt is split where one is taken, which delays its first token by one step. So they are
taken at two places only, each at least `min_snapshot_tokens` after the reused prefix and after the previous snapshot:

- the end of the prefix that the prompt shares with an earlier one, for later prompts that have it too, such as the
  instructions of an application. Before the second prompt arrives, the end of that prefix is unknown.
- the last block border of the prompt, for the next turn of a chat, for the same prompt, and after a preemption. A
  prompt that shares fewer than `min_snapshot_tokens` tokens with earlier ones may never be continued. Its snapshot must
  be `min_lone_snapshot_tokens` after the reused prefix, so that the additional step takes a small part of the time.

No snapshot is taken of decode rows. The host launches a decode step before it reads whether the previous token was the
last one, so the state may be one token too far, and it is seldom at a block border. The next turn of a chat therefore
computes the tokens of the answer again.
"""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.engine.schedule.blocks import BlockAllocator, PrefixMatch
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

        A sequence that was released since then has no blocks left to register. Its snapshot is added if its prefix is
        registered: the copy follows the step on the device, so the release cannot change it.
        """
        for sequence, _, stop in self._chunks:
            self.allocator.register(sequence.token_ids, sequence.blocks, stop, sequence.adapter_id)
        for sequence, tokens, slot in self._snapshots:
            self.allocator.add_snapshot(slot, sequence.token_ids, tokens, sequence.adapter_id)
        self._forget_step()

    def reset(self) -> None:
        """Drop all prefixes after a step failed, including those that the step would have written."""
        self._forget_step()
        self.allocator.reset_prefix_cache()

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix of a sequence. If layers keep state in slots, it ends at a snapshot."""
        if sequence.params.prompt_logprobs is not None:  # cached tokens have to be scored too
            return PrefixMatch([], None, 0)
        if self._has_slots:
            return self.allocator.match_snapshot(sequence.token_ids, sequence.adapter_id)
        return PrefixMatch(self.allocator.match(sequence.token_ids, sequence.adapter_id), None, 0)

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Choose the snapshot borders of an admitted sequence, and plan the copy of the matched snapshot to its slot.

        Its slot and its computed tokens must be set.
        """
        sequence.snapshot_borders = self._borders(sequence, match.registered_tokens)
        if match.slot is not None:
            self._restores.append((match.slot, sequence.slot))

    def add_chunks(self, chunks: tuple[Chunk, ...]) -> None:
        """Record the chunks of the step that is being scheduled, and plan the snapshots at their ends."""
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
        """Whether this step already takes the snapshot for another sequence, such as a choice of the same request."""
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
