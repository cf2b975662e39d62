"""Timing batches fill their bucket, and long prompts are split into chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.check import inputs
from tcdeploy.engine.check.check_prompts import checked_rows
from tcdeploy.engine.check.inputs import _packed_chunks, make_small_batch, make_timing_batch, timed_context
from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.planning.plan import Bucket

PREFILL, DECODE = Bucket("prefill", 64), Bucket("decode", 4)


def make_runner(**changes: Any) -> Any:
    """A runner with as much of a plan as the batches need."""
    values = {"kv_blocks": 100, "block_size": 16, "context": 2048, "max_prefill_sequences": 4, "slots": 0}
    plan = SimpleNamespace(**{**values, "prefill_buckets": (PREFILL,), **changes})
    return SimpleNamespace(
        plan=plan, vocab_size=300, batch_allocator=lambda: BlockAllocator(plan.kv_blocks, plan.block_size),
        filled_state=None, has_model=True, row_assignment=SimpleNamespace(apply=lambda batch: None),
    )  # fmt: skip


def lengths(batch: Any) -> list[int]:
    return [len(sequence.token_ids) for sequence in batch.sequences]


def test_a_timing_batch_fills_its_bucket() -> None:
    assert lengths(make_timing_batch(make_runner(), PREFILL)) == [64]
    assert lengths(make_timing_batch(make_runner(kv_blocks=1000), DECODE)) == [512] * 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mixed_steps": True}, [16, 2]),
        ({"mixed_steps": False}, [16]),
        ({"mixed_steps": True, "context": 5}, [5, 2]),
        ({"mixed_steps": True, "kv_blocks": 3}, [16, 2]),
        ({"mixed_steps": True, "kv_blocks": 2}, [16]),  # one block is for padding
    ],
)
def test_a_small_batch_has_a_decode_row_if_it_fits(changes: dict[str, Any], expected: list[int]) -> None:
    assert lengths(make_small_batch(make_runner(**changes), PREFILL)) == expected


@pytest.mark.parametrize(("changes", "tokens"), [({}, 384), ({"context": 100}, 100), ({"kv_blocks": 1000}, 512)])
def test_the_timed_context_is_limited_by_blocks_and_context(changes: dict[str, int], tokens: int) -> None:
    assert timed_context(make_runner(**changes).plan, DECODE) == tokens


def test_the_cache_is_filled_in_steps_of_the_largest_bucket_without_the_last_tokens() -> None:
    runner = make_runner(kv_blocks=1000)
    sequences = make_timing_batch(runner, Bucket("decode", 2)).sequences
    steps = list(_packed_chunks(sequences, [511] * 2, runner.plan))
    assert all(sum(stop - start for _, start, stop in chunks) <= 64 for chunks in steps)
    assert all(len(chunks) <= 4 for chunks in steps)
    for sequence in sequences:
        covered = [
            position for chunks in steps for owner, start, stop in chunks if owner is sequence
            for position in range(start, stop)
        ]  # fmt: skip
        assert covered == list(range(511))


@pytest.mark.parametrize(("changes", "steps"), [({}, 4 + 3), ({"context": 32}, 4 + 6), ({"slots": 65}, 16)])
def test_rows_that_are_not_compared_are_filled_in_few_steps(changes: dict[str, int], steps: int) -> None:
    """A step has 256 tokens and 4 prompts. 16 of 64 rows are compared, and rows with slots are filled one by one."""
    runner = make_runner(**{"kv_blocks": 1000, "prefill_buckets": (Bucket("prefill", 256),), **changes})
    lengths = [16 - row % 3 for row in range(64)]
    batch = inputs._make_batch(runner, Bucket("decode", 64), [[row] * length for row, length in enumerate(lengths)])
    written: dict[int, list[int]] = {}  # tokens by block
    num_steps = 0

    def run(step: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        assert len(step.chunks) <= 4 and sum(len(chunk.token_ids) for chunk in step.chunks) <= 256
        for chunk in step.chunks:
            assert chunk.start == 0 and len(chunk.token_ids) <= min(runner.plan.context, 16 * len(chunk.blocks))
            for index, token in enumerate(chunk.token_ids):
                written.setdefault(chunk.blocks[index // 16], []).append(token)

    runner.run = run
    batch.fill_state()
    assert num_steps == steps
    for row, sequence in enumerate(batch.sequences):
        [block] = sequence.blocks
        tokens = written.pop(block)
        assert len(tokens) >= len(sequence.token_ids) - 1
        if row in checked_rows(batch.bucket, 64):
            assert tokens == [row] * (len(sequence.token_ids) - 1)
    assert not written


class RecordingRunner:
    """Counts the prefill steps of `make_runner`. As in ModelRunner, each step resets `filled_state`."""

    def __init__(self, **changes: Any) -> None:
        self.runner = make_runner(**{"kv_blocks": 1000, "prefill_buckets": (Bucket("prefill", 256),), **changes})
        self.runner.run = self._run
        self.num_prefills = 0

    def _run(self, step: Any) -> None:
        self.num_prefills += bool(step.chunks)
        self.runner.filled_state = None

    def batch(self, size: int, changed: int = 0) -> Any:
        """Of a decode bucket. The compared rows of all sizes have the same tokens, shifted by `changed`."""
        rows = checked_rows(Bucket("decode", size), size)
        token_ids = [[100] * 16 for _ in range(size)]
        for number, row in enumerate(rows):
            token_ids[row] = [number + changed] * (40 - number)
        return inputs._make_batch(self.runner, Bucket("decode", size), token_ids, blocks_first=rows)

    def fill(self, batch: Any) -> int:
        """Fill the state and run the batch. Returns the number of prefill steps."""
        before = self.num_prefills
        batch.fill_state()
        batch.run()
        return self.num_prefills - before


def test_compared_rows_of_smaller_buckets_need_not_be_filled_again() -> None:
    recording = RecordingRunner()
    assert [recording.fill(recording.batch(size)) > 0 for size in (64, 64, 20, 8, 1)] == [True, *[False] * 4]
    assert recording.fill(recording.batch(128)), "blocks of rows that are not compared may hold NaN"
    assert recording.fill(recording.batch(8, changed=1))


def test_rows_are_filled_again_if_another_step_may_have_changed_their_blocks() -> None:
    recording = RecordingRunner()
    for disturb in (
        lambda: recording.runner.run(SimpleNamespace(chunks=())),
        lambda: make_timing_batch(recording.runner, Bucket("decode", 8), length=40).run(),
        lambda: recording.batch(8, changed=1).run(),
        lambda: make_timing_batch(recording.runner, Bucket("prefill", 256)).run(),
    ):
        assert recording.fill(recording.batch(8)) and not recording.fill(recording.batch(8))
        disturb()
    assert recording.fill(recording.batch(8))


def test_state_in_slots_is_filled_for_each_bucket() -> None:
    recording = RecordingRunner(slots=65)
    assert all(recording.fill(recording.batch(size)) for size in (16, 16, 8))
