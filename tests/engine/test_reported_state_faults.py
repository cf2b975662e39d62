"""Faults of state in slots that users of other servers have reported. Each is planted here, and must change answers.

Each entry names its report. The traffic has prompts of one token, prompts longer than a step, common prefixes,
preemption, and retries of aborted prompts; slots contain stale state at first. Programs are traced and not compiled.
Faults in snapshots (wrong slot, step or border) are in test_snapshots.py. Faults in CUDA graphs need a GPU (tests/gpu).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tcdeploy.engine.schedule.blocks import PrefixMatch
from tcdeploy.engine.schedule.prefix_reuse import PrefixReuse
from tcdeploy.engine.schedule.scheduler import Scheduler
from tcdeploy.engine.schedule.sequence import SamplingParams, Sequence
from tcdeploy.kernels import state as state_kernels
from tcdeploy.kernels.state import causal_conv, recurrence
from tcdeploy.kernels.state.sequences import Sequences, chunks
from tests import hybrid_models
from tests.engine.test_scheduler import Arrival, check_end, run
from tests.engine.test_snapshot_models import Served, random_tokens
from tests.engine.test_snapshots import CONFIG, make_engine

MAX_STEPS, MAX_TOKENS = 2000, 80
Plant = Callable[[pytest.MonkeyPatch], None]


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]  # of the tokens


class Received(NamedTuple):
    expected: Answer
    tokens: list[int]


recur, convolve = recurrence.compute_plainly, causal_conv.compute_plainly


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("qwen3_5_text", tmp_path_factory.mktemp("served"))


@pytest.fixture(autouse=True)
def without_requests(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the requests that a planted fault has left unfinished."""
    yield
    if "served" in request.fixturenames:
        engine = request.getfixturevalue("served").engine
        for request_id in list(engine._requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()


def requests() -> list[tuple[list[int], int]]:
    """(prompt, number of new tokens). Prompts of more than 150 tokens take several steps, and are aborted once."""
    instructions = random_tokens(80, 70)  # whole blocks; some prompts then have a chunk of two tokens
    shared = [[*instructions, *random_tokens(30 * (number % 3) + 2, 81 + number)] for number in range(6)]
    long = [[*instructions, *random_tokens(160, 90 + number)] for number in range(2)]
    short = [[7], [9, 8], [7, 5, 3]]
    prompts = [shared[0], long[0], short[0], *shared[1:3], short[1], long[1], *shared[3:], short[2], [11]]
    return [(prompt, MAX_TOKENS if number % 2 else 6) for number, prompt in enumerate(prompts)]


def has_expected_answers(served: Served) -> bool:
    """Run all requests, twice. Aborted prompts are tried again at once. Ends at the first token that differs."""
    engine, answers = served.engine, {}
    engine.allocator.reset_prefix_cache()
    for tensor in engine.runner.slot_states.tensors:
        tensor.fill_(0.5)

    def submit(prompt: list[int], tokens: int, answer: Answer) -> int:
        request_id = engine.submit(prompt, SamplingParams(max_tokens=tokens, logprobs=0))
        answers[request_id] = Received(answer, [])
        return request_id

    def step() -> bool:
        for token in engine.step():
            answer, tokens = answers[token.request_id]
            logprob = pytest.approx(answer.logprobs[len(tokens)], abs=1e-4)
            if (token.token_id, token.logprobs.chosen) != (answer.tokens[len(tokens)], logprob):
                return False
            tokens.append(token.token_id)
        return True

    for attempt in range(2):
        for number, ((prompt, tokens), answer) in enumerate(zip(requests(), expected(served), strict=True)):
            request_id = submit(prompt, tokens, answer)
            for _ in range(1 + number % 2 if attempt == 0 else 0):
                if not step():
                    return False
            if attempt == 0 and len(prompt) > 150:
                assert not answers.pop(request_id).tokens, "the test aborts in the middle of the prompt"
                engine.abort(request_id)
                submit(prompt, tokens, answer)
        for _ in range(MAX_STEPS):
            if engine.has_work and not step():
                return False
        assert not engine.has_work, "livelock"
    return all(answer.tokens == tokens for answer, tokens in answers.values())


@functools.cache
def expected(served: Served) -> list[Answer]:
    prompts = [prompt for prompt, _ in requests()]
    answers = []
    for prompt, tokens, (_, count) in zip(prompts, served.answers(prompts, MAX_TOKENS), requests(), strict=True):
        logprobs = hybrid_models.prompt_logprobs(served.model, [*prompt, *tokens[:count]])
        answers.append(Answer(tokens[:count], logprobs[len(prompt) - 1 :]))
    return answers


def in_ops(change: Callable[[Sequences, int], Sequences]) -> Plant:
    """Both ops get the sequences that `change` returns. It also gets the number of tokens of the step."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            recurrence, "compute_plainly",
            lambda inputs, state, sequences: recur(inputs, state, change(sequences, len(inputs.x))),
        )  # fmt: skip
        patch.setattr(
            causal_conv, "compute_plainly",
            lambda x, *rest: convolve(x, *rest[:-1], change(rest[-1], len(x))),
        )  # fmt: skip

    return plant


def one_token_prompt(sequences: Sequences, _: int) -> Sequences:
    """A new prompt of one token continues the state in its slot, as a decode row does."""
    if sequences.starts is None or sequences.seq_lens is None:
        return sequences
    is_one = (sequences.starts.diff() == 1) & (sequences.seq_lens == 1)
    return sequences._replace(seq_lens=sequences.seq_lens + is_one.int())


def padding_row(sequences: Sequences, _: int) -> Sequences:
    """Padding rows compute a token with the slot of the first row."""
    lengths, slots = sequences.row_seq_lens, sequences.row_slots
    if sequences.starts is not None or lengths is None or slots is None:
        return sequences
    is_padding = lengths == 0
    return sequences._replace(
        row_seq_lens=torch.where(is_padding, 9, lengths), row_slots=torch.where(is_padding, slots[0], slots)
    )


def wrong_unit(sequences: Sequences, _: int) -> Sequences:
    """The number of a row is used as its slot."""
    if sequences.row_slots is None:
        return sequences
    numbers = torch.arange(len(sequences.row_slots), dtype=torch.int32)
    return sequences._replace(row_slots=numbers.clamp(max=4))


def padding_tokens(sequences: Sequences, tokens: int) -> Sequences:
    """The last chunk includes the padding tokens of the step."""
    if sequences.starts is None or sequences.seq_lens is None or not int(sequences.seq_lens.max()):
        return sequences
    last = int(sequences.seq_lens.nonzero()[-1])
    padding = tokens - int(sequences.starts[last + 1])
    starts, lengths = sequences.starts.clone(), sequences.seq_lens.clone()
    starts[last + 1 :] = tokens
    lengths[last] += padding
    return sequences._replace(starts=starts, seq_lens=lengths)


def rows_of_a_mixed_step(sequences: Sequences, _: int) -> Sequences:
    """The ops of a mixed step run as in a step of prompts only, so its decode rows are not computed."""
    if sequences.starts is None:
        return sequences
    return sequences._replace(row_seq_lens=None, row_slots=None)


def short_chunk(patch: pytest.MonkeyPatch) -> None:
    """After a chunk shorter than the convolution's state, the rest of the state is zero instead of older tokens."""

    def compute(x: Any, state: Any, weight: Any, *rest: Any) -> Any:
        out, kept = convolve(x, state, weight, *rest), weight.shape[1] - 1
        for start, end, slot, _ in chunks(rest[-1]):
            if end - start < kept:
                state[slot, : kept - (end - start)] = 0
        return out

    patch.setattr(causal_conv, "compute_plainly", compute)


def stale_tail(patch: pytest.MonkeyPatch) -> None:
    """The entries after the last sequence of a step still have the values of an earlier step."""
    steps: list[Sequences] = []

    def change(sequences: Sequences, tokens: int) -> Sequences:
        starts, lengths, slots = sequences[:3]
        if starts is None or lengths is None or slots is None:
            return sequences
        if not steps or not torch.equal(starts, steps[-1].starts):
            steps.append(Sequences(starts.clone(), lengths.clone(), slots.clone(), None, None, None))
        previous = steps[max(len(steps) - 2, 0)]
        first = int(lengths.nonzero()[-1]) + 1 if lengths.any() else 1
        changed = starts.clone(), lengths.clone(), slots.clone()
        for tensor, stale, offset in zip(changed, previous[:3], (1, 0, 0), strict=True):
            tensor[first + offset :] = stale[first + offset :]
        changed[0].copy_(changed[0].cummax(0).values.clamp(max=tokens))
        changed[1][changed[0].diff() == 0] = 0  # the plain form cannot compute a chunk without tokens
        return sequences._replace(starts=changed[0], seq_lens=changed[1], slots=changed[2])

    in_ops(change)(patch)


def stale_state_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence continues after its cached blocks, with the stale state of its new slot."""
    match = PrefixReuse.match

    def matched(self: PrefixReuse, sequence: Sequence) -> PrefixMatch:
        if not sequence.preemptions:
            return match(self, sequence)
        return PrefixMatch(self.allocator.match(sequence.token_ids), None, 0)

    patch.setattr(PrefixReuse, "match", matched)


def unwritten_state_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    """An aborted prompt leaves a snapshot of its last border, although no step has computed the state there."""
    abort = Scheduler.abort

    def registering(self: Scheduler, sequence: Sequence) -> None:
        if sequence in self.prefilling:
            border = sequence.snapshot_borders[-1]
            self.allocator.register(sequence.token_ids, sequence.blocks, border)
            slot = self.allocator.reserve_snapshot(sequence.token_ids, border)
            self.allocator.add_snapshot(slot, sequence.token_ids, border)
        abort(self, sequence)

    patch.setattr(Scheduler, "abort", registering)


FAULTS: dict[str, Plant] = {
    "vllm#57720: a prompt of one token": in_ops(one_token_prompt),
    "sglang#32555: a stale tail of a static buffer": stale_tail,
    "sglang#25110: the program of another kind of step": in_ops(rows_of_a_mixed_step),
    "TensorRT-LLM#13278: a padding row that aliases a live slot": in_ops(padding_row),
    "vllm-metal#488: resumption from a stale state": stale_state_after_preemption,
    "vllm#56525: a retry that hits unwritten state": unwritten_state_after_an_abort,
    "vllm#56196: a chunk shorter than the convolution": short_chunk,
    "vllm#55600: an index in the wrong unit": in_ops(wrong_unit),
    "transformers#46190: padding that changes state": in_ops(padding_tokens),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_answers(served: Served, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        assert not has_expected_answers(served)


def test_the_traffic_has_the_answers_of_transformers(served: Served) -> None:
    """Also after the faults above, which leave requests in the engine."""
    preempted = served.engine.scheduler.preemptions
    assert has_expected_answers(served)
    assert served.engine.scheduler.preemptions > preempted, "the test needs preemptions"


def test_a_request_that_needs_the_whole_pool_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#52520: when a request needs nearly all blocks, scheduling goes on for ever and no request advances."""

    def run_scarce() -> None:
        params = SamplingParams(max_tokens=24)
        arrivals = [Arrival(0, [number % 2] * 20, params, aborted_at=None) for number in range(4)]
        arrivals.append(Arrival(2, [1] * 41, SamplingParams(max_tokens=3), aborted_at=None))
        engine = make_engine(CONFIG, blocks=11)  # for 44 tokens
        check_end(engine, run(engine, arrivals), arrivals)
        assert engine.scheduler.preemptions > 0, "the test needs preemptions"

    def admit_with_a_spare_block(self: Scheduler) -> Sequence | None:
        is_scarce = self.waiting and self.allocator.blocks_for(len(self.waiting[0].token_ids)) > 10
        return None if is_scarce else admit(self)

    run_scarce()
    admit = Scheduler._admit
    monkeypatch.setattr(Scheduler, "_admit", admit_with_a_spare_block)
    with pytest.raises(AssertionError, match="stuck"):
        run_scarce()


def functions_of(folder: Path) -> Iterator[ast.FunctionDef]:
    """The functions of the kernel files in a folder."""
    for file in sorted(folder.glob("*_kernel.py")):
        yield from (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))


def waits(function: ast.FunctionDef) -> list[str]:
    """The operations of a function that may wait for another program: unbounded loops and atomics."""
    loops = ["while" for node in ast.walk(function) if isinstance(node, ast.While)]
    names = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    return loops + [name for name in names if name.startswith("atomic")]


def test_no_kernel_waits_for_another_program() -> None:
    """flashinfer#3329: when its graph was replayed, a kernel hung. It waited for a flag that only its first run set."""
    functions = list(functions_of(Path(state_kernels.__file__).parent))
    assert len(functions) > 8 and not {function.name: found for function in functions if (found := waits(function))}
    [spinning] = ast.parse("def spin(flag):\n    while tl.atomic_add(flag, 0) == 0:\n        pass").body
    assert isinstance(spinning, ast.FunctionDef) and waits(spinning) == ["while", "atomic_add"]
