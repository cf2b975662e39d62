"""`AsyncLLM`: streams add up to the answers of `LLM`, requests share steps, and abandoned streams are aborted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tcdeploy import LLM, AsyncLLM, SamplingParams
from tcdeploy.errors import EngineDeadError, ModelError, UsageError
from tcdeploy.llm import async_llm as async_module

TEXT = "This module provides"
PROMPTS: list[Any] = [TEXT, [40, 41, 42], "Return the", [7] * 200]
QUESTION = [{"role": "user", "content": "What is a list?"}]
PLAIN = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = dataclasses.replace(PLAIN, max_tokens=400)

MakeLLM = Callable[[], AsyncLLM]


async def wait_until_idle(engine: Any) -> None:
    async with asyncio.timeout(30):  # on a busy machine
        while engine.num_open_requests or engine.allocator.num_allocatable < engine.allocator.capacity:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(make_async_llm: MakeLLM, deployment: Any) -> AsyncIterator[AsyncLLM]:
    """The engine must be idle soon after the block."""
    async with make_async_llm() as llm:
        yield llm
        await wait_until_idle(deployment.engine)


def test_pieces_add_up_to_the_answer_of_a_batch(llm: LLM, make_async_llm: MakeLLM, tiny_deployment: Any) -> None:
    asking = dataclasses.replace(PLAIN, logprobs=1)
    expected = [*llm.generate(PROMPTS, asking), llm.chat(QUESTION, asking)]

    async def run() -> list[Any]:
        async with opened(make_async_llm, tiny_deployment) as async_llm:
            streams = [*(async_llm.generate(prompt, asking) for prompt in PROMPTS), async_llm.chat(QUESTION, asking)]
            return [[piece async for piece in stream] for stream in streams]

    for pieces, answer in zip(asyncio.run(run()), expected, strict=True):
        assert "".join(piece.text for piece in pieces) == answer.text
        assert [token_id for piece in pieces for token_id in piece.token_ids] == answer.token_ids
        logprobs = [entry.chosen for piece in pieces for entry in piece.logprobs]
        assert logprobs == pytest.approx([entry.chosen for entry in answer.logprobs], abs=1e-4)
        assert [piece.finish_reason for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
        assert len(pieces) > 4


def test_awaited_streams_give_whole_answers_and_share_steps(
    llm: LLM, make_async_llm: MakeLLM, tiny_deployment: Any
) -> None:
    expected = llm.generate(PROMPTS, PLAIN)
    steps = tiny_deployment.engine.runner.step_counts

    async def run() -> list[Any]:
        async with opened(make_async_llm, tiny_deployment) as async_llm:
            return await asyncio.gather(*(async_llm.generate(prompt, PLAIN) for prompt in PROMPTS))

    before = steps.total()
    assert asyncio.run(run()) == expected
    assert steps.total() - before < 2 * PLAIN.max_tokens


def test_a_stop_string_ends_a_stream_and_its_request(llm: LLM, make_async_llm: MakeLLM, tiny_deployment: Any) -> None:
    [plain] = llm.generate(TEXT, PLAIN)
    stopping = dataclasses.replace(LONG, stop=plain.text[20:23])
    [expected] = llm.generate(TEXT, stopping)

    async def run() -> Any:
        async with opened(make_async_llm, tiny_deployment) as async_llm:
            return await async_llm.generate(TEXT, stopping)

    assert asyncio.run(run()) == expected and expected.stop_reason == plain.text[20:23]


async def leave_by_break(llm: AsyncLLM) -> None:
    async for piece in llm.generate(TEXT, LONG):
        if piece.token_ids:
            break


async def close_explicitly(llm: AsyncLLM) -> None:
    stream = llm.generate(TEXT, LONG)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    unread = llm.generate(TEXT, LONG)
    await unread.aclose()
    for closed in (stream, unread):
        with pytest.raises(UsageError, match="closed before its answer was complete"):
            await closed


async def cancel_the_reader(llm: AsyncLLM) -> None:
    task = asyncio.ensure_future(llm.generate(TEXT, LONG))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_by_break, close_explicitly, cancel_the_reader])
def test_a_stream_that_is_left_is_aborted_in_the_engine(
    leave: Callable[[AsyncLLM], Any], make_async_llm: MakeLLM, tiny_deployment: Any
) -> None:
    steps = tiny_deployment.engine.runner.step_counts

    async def run() -> int:
        async with opened(make_async_llm, tiny_deployment) as async_llm:
            before = steps.total()
            await leave(async_llm)
            await wait_until_idle(tiny_deployment.engine)
            return int(steps.total() - before)

    assert asyncio.run(run()) < LONG.max_tokens / 2


def test_a_prompt_that_cannot_be_served_is_an_error_of_its_stream(
    make_async_llm: MakeLLM, tiny_deployment: Any
) -> None:
    async def run() -> None:
        async with opened(make_async_llm, tiny_deployment) as async_llm:
            with pytest.raises(UsageError, match="2000 prompt tokens and 24 new tokens exceed the context"):
                await async_llm.generate([5] * 2000, PLAIN)
            with pytest.raises(UsageError, match="messages is empty"):
                await async_llm.chat([])
            assert len((await async_llm.generate(TEXT, PLAIN)).token_ids) == PLAIN.max_tokens

    asyncio.run(run())


def test_a_stream_fails_if_the_engine_dies_or_the_llm_is_closed(
    make_async_llm: MakeLLM, tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_deployment.engine

    async def close_while_reading() -> None:
        async_llm = make_async_llm()
        async with async_llm:
            stream, unread = (async_llm.generate(TEXT, LONG) for _ in range(2))
            await anext(stream)
        for open_stream in (stream, unread):
            with pytest.raises(EngineDeadError, match="closed"):
                async for _ in open_stream:
                    pass
        with pytest.raises(UsageError, match="is closed"):
            async_llm.generate(TEXT)

    async def die() -> None:
        def fail() -> Any:
            raise RuntimeError("CUDA error")

        async with make_async_llm() as async_llm:
            monkeypatch.setattr(engine, "step", fail)
            for _ in range(2):
                with pytest.raises(EngineDeadError):
                    await async_llm.generate(TEXT, PLAIN)
            monkeypatch.undo()

    for run in (close_while_reading, die):
        asyncio.run(run())
        for request_id in list(engine._requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()


def test_a_closed_llm_keeps_no_reference_to_its_model(
    make_async_llm: MakeLLM, tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployments = [copy.copy(tiny_deployment)]
    reference = weakref.ref(deployments[0])
    monkeypatch.setattr(async_module, "prepare", lambda *_, **__: deployments.pop())

    async def run() -> AsyncLLM:
        async with make_async_llm() as async_llm:
            await async_llm.generate(TEXT, PLAIN)
        gc.collect()
        assert reference() is None
        return async_llm

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ModelError("no such model", "check the name")

    async def run() -> None:
        async_llm = AsyncLLM("some/model")
        with pytest.raises(UsageError, match="has not started"):
            async_llm.generate(TEXT)
        for _ in range(2):
            with pytest.raises(ModelError, match="no such model"):
                await async_llm.start()

    monkeypatch.setattr(async_module, "prepare", fail)
    asyncio.run(run())
