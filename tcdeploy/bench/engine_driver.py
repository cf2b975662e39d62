"""Drives the engine of a prepared deployment.

There are three ways. *Placed* sequences occupy decode rows with a KV cache whose contents were never computed, so that
a step costs what it costs at that context and can be repeated from the same state. *Requests* go through `submit` and
`step`, like those of a server. *Scored* prompts run the steps of a request with `prompt_logprobs`, without the
scheduler: a request needs room for a new token, and returns at most 20 log-probabilities of each position.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import StepBatch, prefilled_rows, prompt_batch
from tcdeploy.engine.step.runner import PromptLogits
from tcdeploy.errors import UsageError
from tcdeploy.planning.plan import Plan
from tcdeploy.programs.stances import fail_on_recompile

TTFT_NEW_TOKENS = 2  # output tokens of a request whose time to first token is measured
COOL_DOWN_SECONDS = 0.2


class Prompts:
    """Random token ids from one seed, so that prompts share no prefix that could be cached."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def draw(self, length: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=length)


class SteadyShape(NamedTuple):
    prompt_length: int
    new_tokens: int
    steps: int


class SteadyRun(NamedTuple):
    """Consecutive engine steps with a full bucket. `host_seconds` is None on a CPU, which is host and device.

    `tokens` is less than steps * requests if a request ended before the last step. `early_steps`: those before all
    requests decoded, in which the first one already did.
    """

    steps: int
    tokens: int
    wall_seconds: float
    host_seconds: float | None
    early_steps: int


@contextmanager
def placed_sequences(engine: Engine, prompts: Prompts, count: int, length: int) -> Iterator[list[Sequence]]:
    """Context manager: `count` sequences of `length` tokens with KV blocks and a slot each, released at the end."""
    slots, sequences = engine.scheduler.slots, []
    try:
        for index in range(count):
            tokens, blocks = prompts.draw(length), engine.allocator.allocate(engine.allocator.blocks_for(length))
            slot = slots.allocate()
            sequences.append(Sequence(-1 - index, tokens, length, SamplingParams(), blocks=blocks, slot=slot))
        yield sequences
    finally:
        engine.runner.row_assignment.clear()
        for sequence in sequences:
            engine.allocator.release(sequence.blocks)
            slots.release(sequence.slot)


def decode_step(engine: Engine, sequences: list[Sequence]) -> tuple[Callable[[], None], Callable[[], None]]:
    """(restore, step): reset the sequences to their context, and run one decode step over them."""
    rows, batch = prefilled_rows(sequences), StepBatch(num_decoding=len(sequences))

    def step() -> None:
        with fail_on_recompile():
            engine.runner.run(batch)

    return lambda: engine.runner.row_assignment.apply(rows), step


def prefill_step(engine: Engine, sequence: Sequence) -> Callable[[], None]:
    """A function that prefills the whole prompt, in chunks of the largest prefill bucket."""
    largest, length = engine.plan.prefill_buckets[-1].size, len(sequence.token_ids)
    chunks = [Chunk(sequence, start, min(start + largest, length)) for start in range(0, length, largest)]

    def step() -> None:
        with fail_on_recompile():
            for chunk in chunks:
                engine.runner.run(prompt_batch([chunk]))

    step()
    while engine.wants_graph:  # a server captures these graphs while it runs
        engine.capture_wanted_graph()
    return step


def prompt_logits(engine: Engine, token_ids: list[int]) -> Generator[PromptLogits]:
    """Logits of all positions but the last, in order, in pieces. The engine must have no requests.

    These are the logits from which the engine computes the log-probabilities of a prompt. `token_ids` may fill the
    context, because nothing is generated. Close the iterator if it is not used to its end.
    """
    assert not engine.has_work, "requests would overwrite the rows"
    allocator, slots, largest = engine.allocator, engine.scheduler.slots, engine.plan.prefill_buckets[-1].size
    sequence = Sequence(-1, token_ids, len(token_ids), SamplingParams(prompt_logprobs=0))
    sequence.blocks, sequence.slot = allocator.allocate(allocator.blocks_for(len(token_ids))), slots.allocate()
    num_inputs = len(token_ids) - 1  # the last token is only predicted
    try:
        for start in range(0, num_inputs, largest):
            batch = prompt_batch([Chunk(sequence, start, min(start + largest, num_inputs))])
            with fail_on_recompile(), engine.runner.uncounted_steps():
                engine.runner.run(batch)
                yield from engine.runner.compute_prompt_logits(batch.chunks[0])
    finally:
        allocator.release(sequence.blocks)
        slots.release(sequence.slot)


def submit(engine: Engine, prompt: list[int], new_tokens: int) -> Sequence:
    """Submit a greedy request that stops only at its length. Returns the engine's own sequence; do not modify it."""
    engine.submit(prompt, SamplingParams(max_tokens=new_tokens))
    return engine.scheduler.waiting[-1]


def cool_down(device: str) -> None:
    """Let a GPU idle before an isolated prompt, for every subject alike, so that its clocks are comparable."""
    if device == "cuda":
        time.sleep(COOL_DOWN_SECONDS)


def measure_ttft(engine: Engine, prompt: list[int]) -> float:
    """Seconds from submitting a prompt to an idle engine until its first token is on the host.

    The request asks for a second token, as most do, so the launch of the first decode step is included. A GPU idles
    first: back-to-back prompts keep it at its power limit, where clocks are lower (2,048 tokens of Llama 3.1 8B on an
    H100: 50.1 ms back to back, 46.4 ms after 0.2 s idle).
    """
    engine.allocator.reset_prefix_cache()
    cool_down(engine.plan.device)
    start = time.perf_counter()
    submit(engine, prompt, TTFT_NEW_TOKENS)
    while not engine.step():
        pass
    seconds = time.perf_counter() - start
    drain(engine)
    return seconds


def steady_shape(
    plan: Plan, batch: int, context: int, steps: int, early_steps: int | None = None
) -> SteadyShape | None:
    """The shape of `batch` requests that all decode together for `steps` steps, at about `context` tokens.

    Fewer steps if the KV cache is too small, and None if it has no room for one. The first requests already decode
    while the last prompts are prefilled, for `early_steps` steps. None: one step per full prefill step; mixed steps may
    need more. One block per sequence stays free, because the scheduler requires it for admission.
    """
    limit = min(plan.context, ((plan.kv_blocks - 1) // batch - 1) * plan.block_size)
    if early_steps is None:
        prefill_steps = -(-batch * context // plan.prefill_buckets[-1].size) + -(-batch // plan.max_prefill_sequences)
        early_steps = prefill_steps + 3
    steps = min(steps, limit - early_steps - 1)
    if steps < 1:
        return None
    new_tokens = early_steps + steps
    return SteadyShape(max(1, min(context - steps // 2, limit - new_tokens)), new_tokens, steps)


def run_steady(engine: Engine, prompts: list[list[int]], new_tokens: int, steps: int) -> SteadyRun:
    """Submit all prompts, step until every request decodes, and time `steps` steps of all together."""
    engine.allocator.reset_prefix_cache()
    requests = [submit(engine, prompt, new_tokens).request_id for prompt in prompts]
    decoding: set[int] = set()
    early_steps = 0
    while len(decoding) < len(requests):
        decoding.update(token.request_id for token in engine.step())
        early_steps += bool(decoding)
    engine.step()  # reads the step that was launched before the last request started decoding
    tokens, wait_before, start = 0, engine.device_wait_seconds, time.perf_counter()
    for _ in range(steps):
        tokens += len(engine.step())
    wall_seconds = time.perf_counter() - start
    host_seconds = wall_seconds - (engine.device_wait_seconds - wait_before)
    for request_id in requests:
        with contextlib.suppress(UsageError):  # it has ended
            engine.abort(request_id)
    drain(engine)
    return SteadyRun(steps, tokens, wall_seconds, host_seconds if engine.plan.device == "cuda" else None, early_steps)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
