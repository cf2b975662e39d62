"""Batches are small, and contain what changed; a runner in another process samples the same tokens from them."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy
import pytest
from msgspec.msgpack import Decoder, Encoder

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import MAX_POSITION, Chunk, SamplingParams, SchedulerOutput, Sequence
from tcdeploy.engine.schedule.step_batch import (
    NewRow,
    PromptChunk,
    RowBlocks,
    RowSampling,
    StepBatch,
    StepBatchBuilder,
    new_row,
    prompt_chunk,
)
from tcdeploy.planning.plan import Bucket
from tests.block_checks import assert_consistent
from tests.conftest import PACKAGES, prepare_tiny
from tests.engine.constraints import SumConstraint

ROWS, BLOCKS, BLOCK_SIZE = 256, 8, 16
SCARCE_BLOCKS = 24  # of 16 tokens: a long request alone takes 21 of 23, so others are preempted
VOCAB = 2048
ROOT = Path(__file__).resolve().parents[2]
ENCODER, DECODER = Encoder(), Decoder(StepBatch)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, seed=2**60)


def make_sequence(request_id: int, params: SamplingParams | None = None, blocks: int = BLOCKS) -> Sequence:
    first = 1 + request_id * BLOCKS
    return Sequence(
        request_id, [7] * 100, 100, params or SamplingParams(), blocks=list(range(first, first + blocks)),
        num_computed_tokens=100,
    )  # fmt: skip


def decode(sequences: list[Sequence]) -> SchedulerOutput:
    return SchedulerOutput(decode=tuple(sequences))


# Structure


def test_a_batch_of_steady_decode_is_the_number_of_its_rows() -> None:
    sequences, batches = [make_sequence(number, SAMPLED) for number in range(ROWS)], StepBatchBuilder()
    first, second = (batches.build(decode(sequences), sequences) for _ in range(2))
    assert [len(first.rows or ()), len(first.blocks)] == [ROWS, ROWS]
    assert second == StepBatch(num_decoding=ROWS) and len(ENCODER.encode(second)) == 13
    assert len(ENCODER.encode(first)) < 110 * ROWS, "8 settings and 8 blocks of each row"


def test_a_batch_is_equal_after_encoding_and_decoding() -> None:
    sampling = RowSampling(
        temperature=1e300, top_k=2**31 - 1, top_p=0.1, min_p=0.0, repetition_penalty=1e-300, presence_penalty=-2.0,
        frequency_penalty=2.0, seed=-(2**63), is_constrained=True,
        biases=[(5, -math.inf, 12), (6, -100.0, MAX_POSITION)], history=([1, 2], []),
    )  # fmt: skip
    batch = StepBatch(
        num_decoding=2,
        rows=[1, NewRow(), NewRow(sampling, logprobs=0), NewRow(token_id=5, length=2**31), NewRow(slot=256)],
        blocks=[RowBlocks(0, 3, [7, 2**31 - 1])],
        chunks=[PromptChunk(16, [9, 8], [1, 2], None, [8], 3), PromptChunk(0, [1], [4], 3, slot=9)],
        lengths=[40, 50],
        empties_rows=True,
        bucket=Bucket("prefill", 2048, 1),
        early_size_from=0,
    )
    assert DECODER.decode(ENCODER.encode(batch)) == batch
    assert DECODER.decode(ENCODER.encode(StepBatch())) == StepBatch()


def test_outputs_of_a_mixed_step_begin_with_the_chunks_and_their_padding() -> None:
    chunks = [PromptChunk(0, [1], [1], None), PromptChunk(0, [1, 2], [2], 2)]
    assert StepBatch(chunks=chunks).output_rows(4) == [None, 2]
    assert StepBatch(num_decoding=2, chunks=chunks).output_rows(4) == [None, 2, None, None, 0, 1]
    assert StepBatch(num_decoding=2).output_rows(4) == [0, 1]
    assert StepBatch(num_decoding=2, chunks=chunks).num_tokens == 5


def test_a_batch_shares_no_list_with_the_scheduler() -> None:
    """The scheduler clears the blocks of a sequence that it releases, maybe before another thread reads the batch."""
    sequence, batches = make_sequence(1), StepBatchBuilder()
    batch = batches.build(SchedulerOutput((Chunk(sequence, 0, 100),), (sequence,)), [sequence])
    expected = DECODER.decode(ENCODER.encode(batch))
    sequence.blocks.clear()
    sequence.token_ids.clear()
    assert batch == expected


def test_the_settings_of_a_row_are_sent_once_and_only_if_it_samples() -> None:
    params = SamplingParams(
        temperature=0.5, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=2, stop_token_ids=[9], logprobs=2
    )
    sequence = Sequence(1, [5, 6, 7], 2, params)
    sampling = new_row(sequence).sampling
    assert sampling is not None and sampling.history == ([5, 6], [7])
    assert sampling.biases == [(3, 1.0, MAX_POSITION), (9, -math.inf, 4)]
    assert new_row(sequence).logprobs == 2
    assert new_row(Sequence(1, [5], 1, SamplingParams(top_k=5, logprobs=1))) == NewRow(logprobs=1), "greedy"
    assert len({new_row(Sequence(1, [5], 1, SamplingParams(temperature=1))).sampling.seed for _ in range(9)}) == 9  # type: ignore[union-attr]


def test_settings_of_numpy_types_can_be_encoded() -> None:
    half = numpy.float64(0.5)
    params = SamplingParams(temperature=half, top_p=half, repetition_penalty=half, logit_bias={3: half})
    row = new_row(Sequence(1, [5], 1, params))
    assert Decoder(NewRow).decode(ENCODER.encode(row)) == row


@pytest.mark.parametrize(
    ("start", "stop", "scored"), [(0, 4, [1, 2, 3, 4]), (4, 8, [5, 6, 7]), (4, 10, [5, 6, 7]), (8, 10, [])]
)
def test_a_chunk_contains_the_prompt_tokens_after_its_own_if_they_are_scored(
    start: int, stop: int, scored: list[int]
) -> None:
    """The last two tokens are of the output: the sequence was preempted."""
    sequence = Sequence(1, list(range(10)), 8, SamplingParams(prompt_logprobs=0))
    assert prompt_chunk(Chunk(sequence, start, stop)).scored_ids == scored
    assert prompt_chunk(Chunk(Sequence(1, list(range(10)), 8, SamplingParams()), start, stop)).scored_ids == []


# Rows are compared by the ids of their sequences


def test_another_object_with_the_id_of_a_row_continues_the_row() -> None:
    batches = StepBatchBuilder()
    batches.build(decode([]), [make_sequence(1), make_sequence(2)])
    equal = [make_sequence(1), make_sequence(2)]
    assert batches.build(SchedulerOutput(), equal).rows is None
    assert batches.build(SchedulerOutput(), equal[::-1]).rows == [1, 0]
    assert batches.build(SchedulerOutput(), [make_sequence(3), equal[0]]).rows == [NewRow(), 1]


def test_a_preempted_sequence_gets_a_new_row_and_all_its_blocks() -> None:
    first, second, batches = make_sequence(1, SAMPLED), make_sequence(2), StepBatchBuilder()
    batches.build(decode([first, second]), [first, second])
    assert batches.build(decode([second]), [second]).rows == [1]
    first.blocks = [90, 91]
    batch = batches.build(decode([second, first]), [second, first])
    assert batch.rows == [0, new_row(first)] and batch.blocks == [RowBlocks(1, 0, [90, 91])]


def test_blocks_that_replace_released_ones_are_sent_again() -> None:
    """Of a step whose lookahead blocks the scheduler took back."""
    sequence, batches = make_sequence(1), StepBatchBuilder()
    batches.build(decode([sequence]), [sequence])
    del sequence.blocks[3:]
    assert batches.build(decode([sequence]), [sequence]) == StepBatch(num_decoding=1)
    sequence.blocks += [70, 71]
    assert batches.build(decode([sequence]), [sequence]).blocks == [RowBlocks(0, 3, [70, 71])]


def test_blocks_are_sent_with_the_first_decode_step_of_their_row() -> None:
    """Prefill reads a table of its own, and each earlier launch would delay the first token."""
    sequence, batches = make_sequence(1), StepBatchBuilder()
    prefill = batches.build(SchedulerOutput((Chunk(sequence, 0, 100),)), [sequence])
    assert prefill.blocks == [] and prefill.chunks[0].blocks == sequence.blocks and prefill.chunks[0].row == 0
    assert batches.build(decode([sequence]), [sequence]).blocks == [RowBlocks(0, 0, sequence.blocks)]


def test_after_the_rows_are_emptied_every_sequence_is_new() -> None:
    sequence, batches = make_sequence(1), StepBatchBuilder()
    batches.build(decode([sequence]), [sequence])
    assert batches.empty_rows() == StepBatch(empties_rows=True)
    batch = batches.build(decode([sequence]), [sequence])
    assert batch.rows == [NewRow()] and batch.blocks == [RowBlocks(0, 0, sequence.blocks)]


# Another process


class Mirror:
    """Sends the batches of an engine to a runner in another process, and compares the tokens of each step."""

    def __init__(self, engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection, self.counts = connection, Counter[str]()
        self._build, self._empty = engine._batches.build, engine._batches.empty_rows
        self._sample = engine.runner.sample
        monkeypatch.setattr(engine._batches, "build", lambda *arguments: self._send(self._build(*arguments)))
        monkeypatch.setattr(engine._batches, "empty_rows", lambda: self._send(self._empty()))
        monkeypatch.setattr(engine.runner, "sample", self._compare)
        self._send(StepBatch(empties_rows=True))
        self._max_chunks = engine.plan.max_prefill_sequences
        self.counts.clear()

    def _send(self, batch: StepBatch) -> StepBatch:
        self.connection.send_bytes(b"b" + ENCODER.encode(batch))
        rows = batch.rows or []
        kept = [row for row in rows if isinstance(row, int)]
        new = [row.sampling for row in rows if isinstance(row, NewRow) and row.sampling]
        self.counts["mixed"] += bool(batch.chunks and batch.num_decoding)
        self.counts["moved"] += kept != list(range(len(kept)))
        self.counts["steady"] += batch.num_decoding > 0 and batch == StepBatch(num_decoding=batch.num_decoding)
        self.counts["penalties"] += any(sampling.history is not None for sampling in new)
        self.counts["biases"] += any(bool(sampling.biases) for sampling in new)
        self.counts["emptied"] += batch.empties_rows
        return batch

    def _compare(self, batch: StepBatch, output: Any, masks: Any) -> Any:
        self.connection.send_bytes(b"s" + (b"" if masks is None else masks.numpy().tobytes()))
        sampled = self._sample(batch, output, masks)
        tokens = numpy.frombuffer(self.connection.recv_bytes(), numpy.int64)
        used = [number for number, row in enumerate(batch.output_rows(self._max_chunks)) if row is not None]
        assert tokens[used].tolist() == sampled.tokens[used].tolist()
        self.counts["masks"] += masks is not None
        self.counts["tokens"] += len(used)
        return sampled


@pytest.fixture
def runner_process(cache_dir: str) -> Iterator[Connection]:
    """A connection to a process with a runner of the embedded model."""
    connection, other = Pipe()
    flags = json.dumps({"kv_blocks": SCARCE_BLOCKS})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.runner_process", str(other.fileno()), cache_dir, flags],
        pass_fds=[other.fileno()], cwd=ROOT, env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip
    other.close()
    assert connection.recv_bytes() == b"ready"
    yield connection
    connection.send_bytes(b"")
    connection.close()
    assert process.wait(60) == 0


def make_requests(source: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of which several share a beginning, with all kinds of settings."""
    beginning = [source.randrange(3, 900) for _ in range(200)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 1.0, "logit_bias": {7: 2.0, 8: -100.0}},
        {"temperature": 1.2, "min_p": 0.02, "min_tokens": 5, "stop_token_ids": [3, 4]},
        {"temperature": 0.8, "constraint": SumConstraint(9, VOCAB)},
    ]
    return [
        (
            beginning[: source.choice((0, 40, 150))]
            + [source.randrange(3, 900) for _ in range(source.choice((1, 7, 40, 130)))],
            SamplingParams(max_tokens=source.choice((1, 6, 40)), seed=number, **kinds[number % len(kinds)]),
        )
        for number in range(count)
    ]


def test_a_runner_in_another_process_samples_the_same_tokens_under_random_traffic(
    cache_dir: str, runner_process: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    engine.allocator.reset_prefix_cache()
    preemptions, source, cached = engine.scheduler.preemptions, random.Random(8), 0
    mirror = Mirror(engine, runner_process, monkeypatch)
    for number, (prompt, params) in enumerate(make_requests(source, 42)):
        request_id = engine.submit(prompt, params)
        for _ in range(source.choice((0, 0, 1, 3))):
            cached += sum(token.cached_tokens > 0 for token in engine.step())
        if number % 11 == 5 and request_id in engine._requests:
            engine.abort(request_id)
        if number == 20:  # a step that fails after it was launched
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
                patch.setattr(engine, "_sample_and_copy", lambda _: (_ for _ in ()).throw(RuntimeError("out of luck")))
                engine.step()
    while engine.has_work:
        cached += sum(token.cached_tokens > 0 for token in engine.step())
    wanted = ("mixed", "moved", "steady", "penalties", "biases", "emptied", "masks")
    assert not [name for name in wanted if not mirror.counts[name]] and mirror.counts["tokens"] > 400
    assert engine.scheduler.preemptions > preemptions and cached
    assert_consistent(engine.allocator)
