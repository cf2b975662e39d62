"""What is measured: a prepared deployment. The only file of the bench that knows how an engine is driven.

Two kinds of driving. *Placed* sequences stand in the decode rows with keys that nobody computed: a step over them costs
what it costs at that context, and putting them back makes the next one cost the same. *Requests* go through
`submit` and `step`, as a server's do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tcdeploy.compiler.stances import fail_on_recompile
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.planning.plan import Plan

TTFT_NEW_TOKENS = 2


class Prompts:
    """Random token ids from one seed: no two prompts share a prefix worth caching."""

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
    """A stretch of engine steps with a full bucket. `host_seconds` None: on a CPU host and device are one."""

    steps: int
    tokens: int
    wall_seconds: float
    host_seconds: float | None


@contextmanager
def placed_sequences(engine: Engine, prompts: Prompts, count: int, length: int) -> Iterator[list[Sequence]]:
    """Sequences of `length` tokens that own their blocks, for as long as the block lasts."""
    sequences = []
    for number in range(count):
        blocks = engine.allocator.allocate(engine.allocator.blocks_for(length))
        sequences.append(Sequence(-1 - number, prompts.draw(length), length, SamplingParams(), blocks=blocks))
    try:
        yield sequences
    finally:
        engine.runner.row_assignment.assign([])
        for sequence in sequences:
            engine.allocator.release(sequence.blocks)


def decode_step(engine: Engine, sequences: list[Sequence]) -> tuple[Callable[[], None], Callable[[], None]]:
    """(restore, step): put the sequences back to their context, and one decode step over them."""

    def step() -> None:
        with fail_on_recompile():
            engine.runner.decode(sequences)

    return lambda: engine.runner.row_assignment.assign_prefilled(sequences), step


def prefill_step(engine: Engine, sequence: Sequence) -> Callable[[], None]:
    """The whole prompt, in as many chunks of the largest bucket as it takes."""
    largest, length = engine.plan.prefill_buckets[-1].size, len(sequence.token_ids)
    chunks = [Chunk(sequence, start, min(start + largest, length)) for start in range(0, length, largest)]

    def step() -> None:
        with fail_on_recompile():
            for chunk in chunks:
                engine.runner.prefill([chunk])

    return step


def submit(engine: Engine, prompt: list[int], new_tokens: int) -> Sequence:
    """A greedy request that stops at nothing but its length. What is returned is the engine's own: to be read only."""
    engine.submit(prompt, SamplingParams(max_new_tokens=new_tokens))
    return engine.scheduler.waiting[-1]


COOL_DOWN_SECONDS = 0.2


def cool_down(device: str) -> None:
    """Before a prompt that comes alone; the same for every subject."""
    if device == "cuda":
        time.sleep(COOL_DOWN_SECONDS)


def measure_ttft(engine: Engine, prompt: list[int]) -> float:
    """From submitting a prompt to an idle engine until its first token is on the host.

    The request wants a second token, as most do: so the launch of its first decode step is in the figure. A GPU rests
    before: prompts one after another keep it at its power limit, where its clocks are lower (2,048 tokens of an 8B
    shape on an H100: 50.1 ms in a row, 46.4 ms each after 0.2 s).
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


def steady_shape(plan: Plan, batch: int, context: int, steps: int) -> SteadyShape | None:
    """Requests that all run together for `steps` steps, around `context`; fewer steps where the KV cache ends sooner.

    While the last prompts are prefilled, the first ones already decode: at most one step for each step of prefill. None
    where there is no room for a single step. One block a sequence is left free: the scheduler admits nobody without.
    """
    limit = min(plan.context, ((plan.kv_blocks - 1) // batch - 1) * plan.block_size)
    prefill_steps = -(-batch * context // plan.prefill_buckets[-1].size) + -(-batch // plan.max_prefill_sequences)
    early = prefill_steps + 3
    steps = min(steps, limit - early - 1)
    if steps < 1:
        return None
    new_tokens = early + steps
    return SteadyShape(max(1, min(context - steps // 2, limit - new_tokens)), new_tokens, steps)


def run_steady(engine: Engine, prompts: list[list[int]], new_tokens: int, steps: int) -> SteadyRun:
    """Submit all prompts, wait until each has begun to decode, and time `steps` steps of them together."""
    engine.allocator.reset_prefix_cache()
    requests = [submit(engine, prompt, new_tokens).request_id for prompt in prompts]
    begun: set[int] = set()
    while len(begun) < len(requests):
        begun.update(token.request_id for token in engine.step())
    engine.step()  # reads the step that was launched before the last prompt had begun
    tokens, waited_before, start = 0, engine.device_wait_seconds, time.perf_counter()
    for _ in range(steps):
        tokens += len(engine.step())
    wall_seconds = time.perf_counter() - start
    host_seconds = wall_seconds - (engine.device_wait_seconds - waited_before)
    for request_id in requests:
        engine.abort(request_id)
    drain(engine)
    return SteadyRun(steps, tokens, wall_seconds, host_seconds if can_time_host(engine) else None)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def can_time_host(engine: Engine) -> bool:
    """Whether the host can be timed apart from the device."""
    return engine.plan.device == "cuda"


def count_captured_graphs(engine: Engine) -> int:
    return sum(engine.runner.is_captured(bucket) for bucket in engine.plan.buckets)
