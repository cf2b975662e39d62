"""`AsyncLLM`: stream answers within an event loop. Requests may arrive at any time, and share the engine's steps.

The engine runs in a thread of its own (engine/thread/), as in the server. A request is submitted when its stream is
first read, so a stream that is never read costs nothing. It is aborted when the stream is closed, or freed, before its
end; its KV blocks are free after the engine's current step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.thread.engine_thread import EngineThread
from tcdeploy.engine.thread.request_group import RequestGroup
from tcdeploy.errors import EngineDeadError, UsageError
from tcdeploy.host.progress import Progress
from tcdeploy.llm.loaded_model import EncodedPrompt, LoadedModel, Message, Prompt, progress_of_start
from tcdeploy.llm.outputs import Answer, AnswerPiece, TextOutput
from tcdeploy.planning.recipe import recipe_of_fields
from tcdeploy.start.prepare import prepare
from tcdeploy.text.chat_template import render_pool

if TYPE_CHECKING:  # imports torch
    from tcdeploy.start.deployment import Deployment


class AnswerStream(AsyncIterator[AnswerPiece]):
    """The answer to one prompt: `async for piece in stream`, or `await stream` for the whole `Answer`.

    `aclose`, or the cancellation of the task that reads, aborts the request.
    """

    def __init__(self, make_output: Callable[[], Awaitable[TextOutput]], engine_thread: EngineThread) -> None:
        self._outputs: list[TextOutput] = []  # empty until the stream is read
        # A function, because a method would keep this object alive: dropping the stream would not abort the request.
        self._pieces = _read(make_output, engine_thread, self._outputs)

    async def __anext__(self) -> AnswerPiece:
        return await self._pieces.__anext__()

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._answer().__await__()

    async def aclose(self) -> None:
        """Abort the request, unless it is complete."""
        await self._pieces.aclose()

    async def _answer(self) -> Answer:
        async with contextlib.aclosing(self._pieces) as pieces:
            async for _ in pieces:
                pass
        if not self._outputs or not self._outputs[0].finish_reason:
            raise UsageError("this stream was closed before its answer was complete", "call `generate` again")
        return self._outputs[0].answer()


async def _read(
    make_output: Callable[[], Awaitable[TextOutput]], engine_thread: EngineThread, outputs: list[TextOutput]
) -> AsyncGenerator[AnswerPiece, None]:
    """Submit a request, and yield the pieces of its answer. The output is added to `outputs`."""
    output = await make_output()
    outputs.append(output)
    group = RequestGroup(engine_thread, [(output.request.prompt_token_ids, output.request.params)])
    [engine_request] = group.engine_requests
    try:
        await group.start()
        async with contextlib.aclosing(group.tokens()) as batches:
            async for tokens in batches:
                piece = output.receive(token for _, token in tokens)
                if any(token.finish_reason for _, token in tokens):
                    engine_request.is_open = False
                elif piece.finish_reason:  # a stop string; the engine would generate on
                    group.cancel(engine_request)
                yield piece
    finally:
        group.close()


class AsyncLLM:
    """A model that is loaded and compiled in this process, for streams and for requests that arrive at any time.

        async with AsyncLLM("Qwen/Qwen3-8B") as llm:
            async for piece in llm.generate("Once upon a time"):
                print(piece.text, end="")
            answer = await llm.generate("Once upon a time", SamplingParams(max_tokens=64))

    The arguments are those of `LLM`. The model is loaded by `start`, which `async with` calls. All methods belong to
    the event loop that called it. The engine runs in a thread; the tokenizer runs in the event loop.
    """

    def __init__(self, model: str, *, progress: Progress | bool = True, **fields: Any) -> None:
        self._recipe = recipe_of_fields({"model": model, **fields}, "AsyncLLM")
        self._progress = progress_of_start(progress)
        self._thread: EngineThread | None = None
        self._model: LoadedModel | None = None

    async def start(self) -> None:
        """Load the model in the engine thread. Raises TcdeployError, as `prepare` does."""
        if self._thread is not None:
            raise UsageError("this AsyncLLM has started already", "call start once, or use `async with`")
        deployments: list[Deployment] = []  # emptied below, because the thread keeps a reference to `on_loaded`
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_loaded(deployment: Deployment) -> None:
            if not loaded.done():
                deployments.append(deployment)
                loaded.set_result(None)

        def on_death(error: BaseException) -> None:
            if not loaded.done():  # else the open requests have failed
                loaded.set_exception(error)

        self._thread = EngineThread(self._load, on_loaded, on_death)
        self._thread.start()
        try:
            await loaded
        except asyncio.CancelledError:  # the load cannot be interrupted, so a second start would load beside it
            self._thread.stop()
            raise
        except BaseException:
            self._thread = None
            raise
        self._model = LoadedModel(deployments.pop())

    def _load(self) -> Deployment:
        return prepare(self._recipe, self._progress, needs_tokenizer=True, serves=True)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AnswerStream:
        """The answer to a text or to a list of token ids. The request is submitted when the stream is first read.

        params: None: the model's defaults, as in `LLM.generate`. Reading the stream raises UsageError if the prompt
        cannot be served, and EngineDeadError if the engine has failed or the AsyncLLM is closed.
        """
        model, thread = self._loaded

        async def make_output() -> TextOutput:
            return _output(model, model.encode(prompt), params)

        return AnswerStream(make_output, thread)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AnswerStream:
        """The answer to a conversation, as `generate`. The messages are those of `LLM.chat`."""
        model, thread = self._loaded

        async def make_output() -> TextOutput:
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(render_pool, model.encode_chat, messages, chat_template_kwargs or {})
            return _output(model, prompt, params)

        return AnswerStream(make_output, thread)

    @property
    def default_params(self) -> SamplingParams:
        """The model's sampling defaults. To change some: `dataclasses.replace(llm.default_params, max_tokens=50)`."""
        return self._loaded[0].default_params

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, or a StoredTokenizer after a start from packages."""
        return self._loaded[0].tokenizer

    async def aclose(self) -> None:
        """End the engine after its present step, and free the memory of the model, its KV cache and its programs.

        Streams that are still read raise EngineDeadError.
        """
        if self._thread is None or self._model is None:
            return
        from tcdeploy.start.deployment import release_memory  # imports torch, which is loaded by now

        thread, self._model = self._thread, None
        error = EngineDeadError("the AsyncLLM is closed", "read streams to their end first")
        thread.fail_all(error)
        thread.stop(error)
        await asyncio.to_thread(thread.join)
        release_memory()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def _loaded(self) -> tuple[LoadedModel, EngineThread]:
        if self._model is None or self._thread is None:
            state = "has not started" if self._thread is None else "is closed"
            raise UsageError(f"this AsyncLLM {state}", "use it in `async with AsyncLLM(...) as llm:`")
        return self._model, self._thread


def _output(model: LoadedModel, prompt: EncodedPrompt, params: SamplingParams | None) -> TextOutput:
    return TextOutput(model.tokenizer, model.request(prompt, params))
