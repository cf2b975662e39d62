"""Decide what the next step computes: chunks of prompts, or one token for everything that runs. No torch.

Continuous batching with paged keys. A waiting sequence is admitted when a row and the blocks for the tokens it has so
far are free, not those for all that it may come to say: most answers end early, and reserving their longest form
would leave most of the cache empty. The price is that blocks can run out under running sequences. Then the one
admitted last goes back to the front of the queue and computes its tokens again later, mostly out of the prefix cache.
The one admitted first is never sent back, so every step brings the oldest request nearer to its end: no livelock.

`schedule` updates the sequences as if the step had run: the engine launches it before it calls `schedule`, `finish`
or `abort` again. The host need not have read the tokens of the step before, since positions follow from counts alone.
Work is ordered on the device's stream, so blocks freed here may at once be handed to the next step; for the same
reason a prompt's blocks are registered without waiting for their step to end: when the next one is scheduled, since
only a later step may read what this one writes, and by then the device is at work on this one.

Prefill comes first, because a row that decodes costs nearly nothing beside the others and an empty one earns nothing;
after `max_consecutive_prefills` the running ones get a token, so that a burst of prompts does not stop their streams.
Prefill and decode stay separate steps: they are separate compiled programs.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.sequence import Chunk, Sequence

LOOKAHEAD_BLOCKS = 8  # 128 tokens at blocks of 16: a row's block table changes once in that many steps


class SchedulerConfig(NamedTuple):
    """What the warmed buckets can take: `max_rows` decode rows; tokens and chunks of one prefill step."""

    max_rows: int
    prefill_tokens: int
    max_prefill_sequences: int
    max_consecutive_prefills: int = 4


class SchedulerOutput(NamedTuple):
    """What to launch: one of the two, never both. `decode` is `running` as it stands, in row order."""

    chunks: tuple[Chunk, ...] = ()
    decode: tuple[Sequence, ...] = ()


class SchedulerStats(NamedTuple):
    """Counts for metrics. Blocks of the prefix cache that nobody holds are not used: they can be taken."""

    waiting: int
    prefilling: int
    running: int
    used_blocks: int
    preemptions: int  # since the start


class Scheduler:
    """Owns the queue, the rows and the blocks. Not thread-safe."""

    def __init__(self, limits: SchedulerConfig, allocator: BlockAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # some chunks launched, not all: at most one, since it fills its step
        self.running: list[Sequence] = []  # number i is decode row i
        self.preemptions = 0
        self._admitted: dict[Sequence, None] = {}  # prefilling and running, in order of admission
        self._consecutive_prefills = 0
        self._unregistered_chunks: tuple[Chunk, ...] = ()  # of the last step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def stats(self) -> SchedulerStats:
        used = self.allocator.capacity - self.allocator.free
        return SchedulerStats(len(self.waiting), len(self.prefilling), len(self.running), used, self.preemptions)

    def submit(self, sequence: Sequence) -> None:
        """First come, first served. The caller has checked that it fits when alone."""
        assert not sequence.blocks and not sequence.finish_reason, "a new sequence"
        assert self.allocator.blocks_for(_max_cached_tokens(sequence)) <= self.allocator.capacity, (
            "the caller checks first"
        )
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Whatever it is doing, it ends; its tokens in flight are for nobody. A second call changes nothing."""
        sequence.finish_reason = sequence.finish_reason or "abort"
        self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The host has read its last token. It may have been sampled from since, or wait after a pre-emption."""
        assert sequence.finish_reason, "`receive` sets it"
        self._release(sequence)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, to be launched at once. None: nothing can run until tokens in flight have been read."""
        self._register_prefixes()
        self._release_finished()
        decode_is_due = bool(self.running) and self._consecutive_prefills >= self.limits.max_consecutive_prefills
        chunks = () if decode_is_due else self._prefill()
        if chunks:
            self._consecutive_prefills += 1
            return SchedulerOutput(chunks=chunks)
        if not self.running:
            return None
        self._consecutive_prefills = 0
        return SchedulerOutput(decode=self._decode())

    def requeue_all(self) -> None:
        """The last scheduled step did not run: forget what it, or anyone, wrote; all that is open waits again."""
        for sequence in reversed(list(self._admitted)):
            self.allocator.release(sequence.blocks)
            sequence.num_computed_tokens = sequence.in_flight = 0
            if not sequence.finish_reason:
                self.waiting.appendleft(sequence)
        self._admitted.clear()
        self.prefilling.clear()
        self.running.clear()
        self._unregistered_chunks = ()
        self.allocator.reset_prefix_cache()

    def _register_prefixes(self) -> None:
        """What the last step's chunks write; nothing of a sequence that has given its blocks back since."""
        for sequence, _, stop in self._unregistered_chunks:
            self.allocator.register(sequence.token_ids, sequence.blocks, stop)
        self._unregistered_chunks = ()

    def _release_finished(self) -> None:
        """Whose last token is sampled needs its row no more."""
        for sequence in self.running.copy():
            if sequence.has_sampled_last_token or sequence.finish_reason:
                self._release(sequence)

    def _prefill(self) -> tuple[Chunk, ...]:
        """Fill a step first come, first served; the last prompt is cut where the step is full."""
        chunks: list[Chunk] = []
        room = self.limits.prefill_tokens
        while room and len(chunks) < self.limits.max_prefill_sequences:
            sequence = self.prefilling[0] if self.prefilling else self._admit()
            if sequence is None:
                break
            chunk = Chunk(
                sequence,
                sequence.num_computed_tokens,
                min(sequence.num_computed_tokens + room, len(sequence.token_ids)),
            )
            self._launch_chunk(chunk)
            chunks.append(chunk)
            room -= chunk.stop - chunk.start
        self._unregistered_chunks = tuple(chunks)
        return self._unregistered_chunks

    def _admit(self) -> Sequence | None:
        """The head of the queue, with its blocks; None where it has to wait, and all behind it wait too."""
        if not self.waiting or not self._has_free_row():
            return None
        sequence = self.waiting[0]
        if sequence.in_flight:  # pre-empted with tokens unread: the host cannot feed what it does not know
            return None
        wants_prompt_logprobs = sequence.params.prompt_logprobs is not None  # also of tokens whose keys are there
        shared = [] if wants_prompt_logprobs else self.allocator.match(sequence.token_ids)
        missing = self.allocator.blocks_for(len(sequence.token_ids)) - len(shared)
        watermark = len(self._admitted)  # each of them may want a block at the next step, and would send us back
        if missing + watermark > self.allocator.free:
            self.allocator.release(shared)
            return None
        sequence.blocks = shared + self.allocator.allocate(missing)
        sequence.num_computed_tokens = (len(sequence.blocks) - missing) * self.allocator.block_size
        sequence.prefix_hit_tokens += sequence.num_computed_tokens
        sequence.admitted_at = sequence.admitted_at or time.perf_counter()
        self.prefilling.append(self.waiting.popleft())
        self._admitted[sequence] = None
        return sequence

    def _launch_chunk(self, chunk: Chunk) -> None:
        """The chunk that reaches the end samples the next token; one before it samples nothing."""
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.stop
        if chunk.stop == len(sequence.token_ids):
            sequence.in_flight += 1
            self.prefilling.remove(sequence)
            self.running.append(sequence)

    def _decode(self) -> tuple[Sequence, ...]:
        self._allocate_decode_blocks()
        for sequence in self.running:
            sequence.num_computed_tokens = sequence.length
            sequence.in_flight += 1
        return tuple(self.running)

    def _allocate_decode_blocks(self) -> None:
        """Blocks for `length` tokens of every running sequence; where blocks are plentiful, some ahead.

        In one call a sequence's blocks grow or shrink, never both. So a row whose sequence and number of blocks are
        those of the decode step before has the same blocks.
        """
        if not self._total_missing_blocks(0):
            return
        ahead = LOOKAHEAD_BLOCKS if self._can_look_ahead() else 0
        self._preempt_until_it_fits()
        for sequence in self.running:
            sequence.blocks += self.allocator.allocate(self._missing_blocks(sequence, ahead))

    def _can_look_ahead(self) -> bool:
        """At most half of what is free goes into looking ahead, and nothing while somebody waits for blocks."""
        someone_waits = bool(self.waiting) and self._has_free_row()
        return not someone_waits and 2 * self._total_missing_blocks(LOOKAHEAD_BLOCKS) <= self.allocator.free

    def _preempt_until_it_fits(self) -> None:
        """First the blocks ahead that nobody has used, then the sequence admitted last."""
        if self._total_missing_blocks(0) > self.allocator.free:
            self._drop_lookahead()
        while self._total_missing_blocks(0) > self.allocator.free:
            assert len(self._admitted) > 1, "every request fits when alone"
            self._preempt(next(reversed(self._admitted)))

    def _drop_lookahead(self) -> None:
        for sequence in self.running:
            used = self.allocator.blocks_for(sequence.length)
            spare = sequence.blocks[used:]
            del sequence.blocks[used:]
            self.allocator.release(spare)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Out of wherever it is. What is known of it can be found again, by itself or by its next turn of a chat."""
        if sequence not in self._admitted:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        del self._admitted[sequence]
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            self._remove_row(sequence)
        known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        self.allocator.register(sequence.token_ids, sequence.blocks, known)
        self.allocator.release(sequence.blocks)

    def _remove_row(self, sequence: Sequence) -> None:
        """The last row moves into its place: rows stay dense, and no other moves."""
        row = self.running.index(sequence)
        last = self.running.pop()
        if last is not sequence:
            self.running[row] = last

    def _has_free_row(self) -> bool:
        return len(self._admitted) < self.limits.max_rows

    def _total_missing_blocks(self, ahead: int) -> int:
        return sum(self._missing_blocks(sequence, ahead) for sequence in self.running)

    def _missing_blocks(self, sequence: Sequence, ahead: int) -> int:
        """Blocks to take for the next token and `ahead` more, within what it can ever fill."""
        wanted = min(
            self.allocator.blocks_for(sequence.length) + ahead, self.allocator.blocks_for(_max_cached_tokens(sequence))
        )
        return max(0, wanted - len(sequence.blocks))


def _max_cached_tokens(sequence: Sequence) -> int:
    """Tokens that it may come to have keys of: its last new token is never fed back."""
    return sequence.prompt_length + sequence.params.max_new_tokens - 1
