"""Continuous batching: picks the prompt chunks and the decode rows of each step. Does not import torch.

A sequence is admitted when a decode row and the KV blocks for its present tokens are free. If layers keep state in
slots, there are as many slots as rows. Blocks for its maximum length are not reserved: most answers end early, and the
reservation would leave most of the cache unused. If the blocks run out, the scheduler preempts the sequence it admitted
last: that one goes back to the head of the queue and computes its tokens again, mostly from the prefix cache. The
sequence admitted first is never preempted, so there is no livelock.

Rows are shared fairly between groups; a group is the sequences of one client request, one per choice. A free row goes
to the waiting group with the fewest rows, and among equals to the group that has waited longest. If no row is free and
a waiting group has none, the scheduler preempts the last sequence of the group with the most rows, unless it has only
one. So a request with 128 choices delays other requests by one step, and always keeps one row.

`schedule` updates the sequences as if the step had run, so the engine must launch the step before it calls `schedule`,
`finish` or `abort` again. The host need not have read the tokens of the previous step: positions depend on counts only.
Steps run in stream order, so freed blocks can be given to the next step at once. prefix_reuse.py decides which part of
a prompt need not be computed.

With `mixed_steps`, every running sequence decodes one token in each step, and chunks of prompts fill the rest of it. So
sequences never wait for the prompts of others, and the weights are read once for both. step_size.py chooses the tokens
of such a step. Without mixed steps, or if the running sequences would take more than half of a prefill step, prefill
and decode are separate steps. Prefill has priority: an additional decode row is almost free, and an empty row produces
nothing. After `max_consecutive_prefills` prefill steps the running sequences get a decode step.

Prompts are computed first come, first served, with one exception if steps are mixed: a prompt that needs more than
LONG_PROMPT_STEPS steps of the present size gets half of the tokens of a step if it is the first, and the following
prompts get the other half in their order; tokens that they do not need go to the long one. So at most two prompts are
computed in part: the first, and the last of the others. There may be more if prompts are split where snapshots of
their state are taken. tests/engine/test_scheduler_costs.py derives how long a prompt may wait for its first chunk.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from typing import NamedTuple

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.prefix_reuse import PrefixReuse, tokens_to_border
from tcdeploy.engine.schedule.sequence import Chunk, SchedulerOutput, Sequence
from tcdeploy.engine.schedule.slots import SCRATCH_SLOT, SlotAllocator
from tcdeploy.engine.schedule.step_costs import StepPredictor
from tcdeploy.engine.schedule.step_size import MIN_CHUNK_TOKENS, Backlog, choose_step_tokens
from tcdeploy.planning.memory import MIN_LONE_SNAPSHOT_TOKENS, MIN_SNAPSHOT_TOKENS

LOOKAHEAD_BLOCKS = 8  # with blocks of 16 tokens, a row's block table changes once in 128 steps
MAX_BACKLOG_PROMPTS = 256  # most waiting prompts that are considered when the size of a step is chosen
LONG_PROMPT_STEPS = 4  # a prompt that needs more steps than this shares them with the prompts behind it


class SchedulerConfig(NamedTuple):
    """Limits of the warmed buckets."""

    max_rows: int
    prefill_tokens: int  # of one step
    max_prefill_sequences: int  # chunks of one step
    max_consecutive_prefills: int = 4
    mixed_steps: bool = False
    itl_target_ms: float | None = None  # of a mixed step's predicted time; None: the default of step_size.py
    min_chunk_tokens: int = MIN_CHUNK_TOKENS  # prompt tokens that a mixed step always has room for
    has_slots: bool = False  # whether layers keep state in slots, of which there is one for each row
    min_snapshot_tokens: int = MIN_SNAPSHOT_TOKENS  # prompt tokens before a snapshot, and between two
    min_lone_snapshot_tokens: int = MIN_LONE_SNAPSHOT_TOKENS  # the same for a prompt that shares no prefix


class SchedulerStats(NamedTuple):
    """Counts for metrics. `used_blocks` excludes cached blocks without a reference, since they can be evicted."""

    waiting: int
    prefilling: int
    running: int
    used_blocks: int
    preemptions: int  # since start-up


class Scheduler:
    """Owns the queue, the decode rows, the KV blocks and the state slots. Not thread-safe.

    Without a predictor of step times, mixed steps have up to `config.prefill_tokens` tokens.
    """

    def __init__(
        self, config: SchedulerConfig, allocator: BlockAllocator, predictor: StepPredictor | None = None
    ) -> None:
        largest_step = predictor.step_sizes(0)[-1] if predictor else config.prefill_tokens
        assert largest_step == config.prefill_tokens, "every prompt is computed in steps that exist"
        self.config = config
        self.allocator = allocator
        self.prefixes = PrefixReuse(
            allocator, config.has_slots, config.min_snapshot_tokens, config.min_lone_snapshot_tokens
        )
        self.slots = SlotAllocator(config.max_rows + 1 if config.has_slots else 0)
        self.predictor = predictor
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # prompts launched in part: at most two, in order of admission
        self.running: list[Sequence] = []  # index is the decode row
        self.preemptions = 0
        self._admitted: dict[Sequence, None] = {}  # prefilling and running, in order of admission
        self._consecutive_prefills = 0
        self._just_preempted: set[Sequence] = set()  # by the step that is being scheduled

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def has_prompts(self) -> bool:
        return bool(self.waiting or self.prefilling)

    @property
    def stats(self) -> SchedulerStats:
        used = self.allocator.capacity - self.allocator.num_allocatable
        return SchedulerStats(len(self.waiting), len(self.prefilling), len(self.running), used, self.preemptions)

    def submit(self, sequence: Sequence) -> None:
        """Append to the queue. The caller has checked that the sequence fits in the cache when it runs alone."""
        assert not sequence.blocks and not sequence.finish_reason, "the sequence is new"
        needed = self.allocator.blocks_for(sequence.max_cached_tokens)
        assert needed <= self.allocator.capacity, "the caller checks first"
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in any state. Its tokens in flight are dropped. A second call has no effect."""
        sequence.finish_reason = sequence.finish_reason or "abort"
        self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Release a sequence whose last token the host has read. It may be running, or queued after a preemption."""
        assert sequence.finish_reason, "`receive` sets it"
        self._release(sequence)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, which the caller launches at once.

        None if there is no work, or if nothing can run until tokens in flight are read.
        """
        self._just_preempted.clear()
        self.prefixes.start_step()
        self._release_finished()
        step = self._schedule_step()
        return step and step._replace(restores=self.prefixes.restores, snapshots=self.prefixes.snapshots)

    def _schedule_step(self) -> SchedulerOutput | None:
        if self.config.mixed_steps and 0 < 2 * len(self.running) <= self.config.prefill_tokens:
            self._make_room_for_new_group()
            decode = self._schedule_decode()
            self._consecutive_prefills = 0
            return SchedulerOutput(self._schedule_prefill(self._mixed_step_tokens(decode), len(decode)), decode)
        decode_is_due = bool(self.running) and self._consecutive_prefills >= self.config.max_consecutive_prefills
        chunks: tuple[Chunk, ...] = ()
        if not decode_is_due:
            self._make_room_for_new_group()
            chunks = self._schedule_prefill(self.config.prefill_tokens)
        if chunks:
            self._consecutive_prefills += 1
            return SchedulerOutput(chunks=chunks)
        if not self.running:
            return None
        self._consecutive_prefills = 0
        return SchedulerOutput(decode=self._schedule_decode())

    def _mixed_step_tokens(self, decode: tuple[Sequence, ...]) -> int:
        """Tokens that a mixed step may have, those of the decode rows included."""
        if self.predictor is None or not decode:  # all running sequences may just have been preempted
            return self.config.prefill_tokens
        free_rows = self.config.max_rows - len(self._admitted)
        prompts = [*self.prefilling, *itertools.islice(self.waiting, min(free_rows, MAX_BACKLOG_PROMPTS))]
        if not prompts:
            return len(decode)
        backlog = Backlog(
            rows=len(decode),
            row_context=SchedulerOutput(decode=decode).row_context,
            prompts=len(prompts),
            prompt_tokens=sum(sequence.num_uncomputed_tokens for sequence in prompts),
            prefix=max(sequence.num_computed_tokens for sequence in prompts),
        )
        return choose_step_tokens(self.predictor, backlog, self.config.itl_target_ms, self.config.min_chunk_tokens)

    def requeue_all(self) -> None:
        """After a scheduled step failed: return all admitted sequences to the queue and clear the prefix cache."""
        for sequence in reversed(list(self._admitted)):
            self._free_state(sequence)
            sequence.num_computed_tokens = sequence.num_in_flight = 0
            if not sequence.finish_reason:
                self.waiting.appendleft(sequence)
        self._admitted.clear()
        self.prefilling.clear()
        self.running.clear()
        self.prefixes.reset()

    def requeue_admitted(self) -> None:
        """Return all admitted sequences to the queue, so that no row, block or slot is in use.

        No step may be in flight. They are computed again later, mostly out of the prefix cache, which is kept.
        """
        for sequence in reversed(list(self._admitted)):
            self._release(sequence)
            sequence.num_computed_tokens = 0
            self.waiting.appendleft(sequence)

    def _release_finished(self) -> None:
        """Release sequences whose last token is sampled: they need no row, even if the host has not read the token."""
        for sequence in self.running.copy():
            if sequence.has_sampled_last_token or sequence.finish_reason:
                self._release(sequence)

    def _schedule_prefill(self, step_tokens: int, rows: int = 0) -> tuple[Chunk, ...]:
        """Prompts in order of arrival for a step of `step_tokens` tokens, of which `rows` belong to decode rows.

        Updates their sequences as if the step had run. The last prompt is split if it does not fit, the first if it is
        long, and any prompt where a snapshot of its state is taken.
        """
        token_budget = step_tokens - rows
        chunk_sizes: list[int] = []  # of the prompts in `prefilling`, from the first on
        while token_budget and len(chunk_sizes) < self.config.max_prefill_sequences:
            number = len(chunk_sizes)
            sequence = self.prefilling[number] if number < len(self.prefilling) else self._admit()
            if sequence is None:
                break
            is_long = sequence.num_uncomputed_tokens > LONG_PROMPT_STEPS * token_budget
            is_shared = self.config.mixed_steps and is_long and not chunk_sizes
            size = token_budget - token_budget // 2 if is_shared else token_budget
            chunk_sizes.append(min(size, tokens_to_border(sequence)))
            token_budget -= chunk_sizes[-1]
        if chunk_sizes:
            chunk_sizes[0] += min(token_budget, tokens_to_border(self.prefilling[0]) - chunk_sizes[0])
        chunks = tuple(
            Chunk(sequence, sequence.num_computed_tokens, sequence.num_computed_tokens + size)
            for sequence, size in zip(self.prefilling, chunk_sizes, strict=False)
        )
        self.prefixes.add_chunks(chunks)
        for sequence, _, stop in chunks:
            sequence.num_computed_tokens = stop
            if stop == len(sequence.token_ids):  # only the chunk that ends the prompt samples a token
                sequence.num_in_flight += 1
                self.prefilling.remove(sequence)
                self.running.append(sequence)
        takes_snapshots = self.allocator.snapshots.capacity > 0
        assert len(self.prefilling) <= 2 or takes_snapshots, "only the first and the last prompt of a step are split"
        return chunks

    def _admit(self) -> Sequence | None:
        """Admit the next sequence and allocate its blocks. None if it has to wait; then no other one is admitted."""
        if not self.waiting or not self._has_free_row():
            return None
        sequence = self._next_waiting()
        if sequence.num_in_flight:  # preempted with unread tokens, which the host cannot feed yet
            return None
        if sequence in self._just_preempted:  # its decode row has to be emptied first
            return None
        match = self.prefixes.match(sequence)
        missing = self.allocator.blocks_for(len(sequence.token_ids)) - len(match.blocks)
        watermark = len(self._admitted)  # each may need a block at the next step, and would preempt this sequence
        if missing + watermark > self.allocator.num_allocatable:
            self.allocator.release(match.blocks)
            return None
        sequence.blocks = match.blocks + self.allocator.allocate(missing)
        sequence.slot = self.slots.allocate()
        sequence.num_computed_tokens = len(match.blocks) * self.allocator.block_size
        self.prefixes.admit(sequence, match)
        sequence.prefix_hit_tokens += sequence.num_computed_tokens
        if not sequence.admitted_at:
            sequence.admitted_at, sequence.cached_prompt_tokens = time.perf_counter(), sequence.num_computed_tokens
        self.waiting.remove(sequence)
        self.prefilling.append(sequence)
        self._admitted[sequence] = None
        return sequence

    def _next_waiting(self) -> Sequence:
        """The first sequence of the waiting group with the fewest rows. One without a group forms its own group."""
        head, num_rows = self.waiting[0], self._rows_by_group()
        return min(self.waiting, key=lambda sequence: num_rows[sequence.group_id]) if num_rows[head.group_id] else head

    def _rows_by_group(self) -> Counter[int | None]:
        return Counter(sequence.group_id for sequence in self._admitted if sequence.group_id is not None)

    def _make_room_for_new_group(self) -> None:
        """If no row is free and a group waits without a row, preempt the last sequence of the group with most rows."""
        if not self.waiting or self._has_free_row():
            return
        num_rows, sequence = self._rows_by_group(), self._next_waiting()
        [(largest_group, count)] = num_rows.most_common(1) or [(None, 0)]
        if count > 1 and not num_rows[sequence.group_id] and not sequence.num_in_flight:
            self._preempt(next(other for other in reversed(self._admitted) if other.group_id == largest_group))

    def _schedule_decode(self) -> tuple[Sequence, ...]:
        self._allocate_decode_blocks()
        for sequence in self.running:
            sequence.num_computed_tokens = sequence.length
            sequence.num_in_flight += 1
        return tuple(self.running)

    def _allocate_decode_blocks(self) -> None:
        """Give every running sequence the blocks for `length` tokens, and lookahead blocks while enough are free.

        One call either grows or shrinks the blocks of a sequence: with the same number, it has the same blocks.
        """
        if not self._total_missing_blocks(0):
            return
        # Lookahead takes at most half of the free blocks, and none while a queued sequence waits for blocks.
        waits_for_blocks = self.waiting and self._has_free_row()
        missing = 0 if waits_for_blocks else self._total_missing_blocks(LOOKAHEAD_BLOCKS)
        looks_ahead = not waits_for_blocks and 2 * missing <= self.allocator.num_allocatable
        lookahead_blocks = LOOKAHEAD_BLOCKS if looks_ahead else 0
        self._preempt_until_it_fits()
        for sequence in self.running:
            sequence.blocks += self.allocator.allocate(self._missing_blocks(sequence, lookahead_blocks))

    def _preempt_until_it_fits(self) -> None:
        """Free unused lookahead blocks, then preempt the most recently admitted sequences."""
        if self._total_missing_blocks(0) > self.allocator.num_allocatable:
            for sequence in self.running:
                used = self.allocator.blocks_for(sequence.length)
                sequence.blocks, unused = sequence.blocks[:used], sequence.blocks[used:]
                self.allocator.release(unused)
        while self._total_missing_blocks(0) > self.allocator.num_allocatable:
            assert len(self._admitted) > 1, "every sequence fits when it runs alone"
            self._preempt(next(reversed(self._admitted)))

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.preemptions += 1
        self._just_preempted.add(sequence)
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue or row. Its full blocks with known tokens stay in the prefix cache."""
        if sequence not in self._admitted:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        del self._admitted[sequence]
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:  # fill the gap with the last row: rows stay dense, and no other row moves
            row, last = self.running.index(sequence), self.running.pop()
            if last is not sequence:
                self.running[row] = last
        num_known_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids))
        self.allocator.register(sequence.token_ids, sequence.blocks, num_known_tokens, sequence.adapter_id)
        self._free_state(sequence)

    def _free_state(self, sequence: Sequence) -> None:
        """Release its blocks and its slot, which a step in flight may still write: later steps run after it."""
        self.allocator.release(sequence.blocks)
        self.slots.release(sequence.slot)
        sequence.slot = SCRATCH_SLOT

    def _has_free_row(self) -> bool:
        return len(self._admitted) < self.config.max_rows

    def _total_missing_blocks(self, lookahead_blocks: int) -> int:
        return sum(self._missing_blocks(sequence, lookahead_blocks) for sequence in self.running)

    def _missing_blocks(self, sequence: Sequence, lookahead_blocks: int) -> int:
        """Blocks to allocate for the next token plus `lookahead_blocks`, at most what the sequence can ever fill."""
        target = min(
            self.allocator.blocks_for(sequence.length) + lookahead_blocks,
            self.allocator.blocks_for(sequence.max_cached_tokens),
        )
        return max(0, target - len(sequence.blocks))
