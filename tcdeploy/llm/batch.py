"""Runs a batch of requests on the engine, in the thread of the caller.

Ctrl-C takes effect between two steps. An exception inside a step could leave the engine with blocks that no request
owns, so SIGINT is held back while a step runs, and delivered after it; then the open requests are aborted.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from tcdeploy.engine.thread.engine_thread import CAPTURE_INTERVAL_S
from tcdeploy.errors import TcdeployError, UsageError
from tcdeploy.llm.outputs import AnswerPiece, TextOutput

if TYPE_CHECKING:  # imports torch
    from tcdeploy.engine.engine import Engine


def run_batch(engine: Engine, outputs: list[TextOutput], on_piece: Callable[[int, AnswerPiece], None]) -> None:
    """Generate until all outputs are complete. `on_piece` is called with the index of an output and what was added.

    Raises UsageError or SpaceError, which names the prompt, before any step if one of them cannot be served. If this
    raises, the requests are aborted, and the engine can be used further.
    """
    if engine.num_open_requests:
        problem = f"the engine has {engine.num_open_requests} open requests of another loop"
        raise UsageError(problem, "complete them with engine.step(), or call engine.abort")
    indices: dict[int, int] = {}  # of the output, by id of the open request
    capture_due_at = 0.0
    with held_back_interrupts() as deliver_interrupt:
        try:
            for index, output in enumerate(outputs):
                with naming(f"prompt {index}: " if len(outputs) > 1 else ""):
                    indices[engine.submit(output.request.prompt_token_ids, output.request.params)] = index
            while indices:
                for token in engine.step():
                    if token.request_id not in indices:  # a stop string has ended it in this step
                        continue
                    index = indices[token.request_id]
                    on_piece(index, outputs[index].receive([token]))
                    if outputs[index].finish_reason:
                        del indices[token.request_id]
                        if not token.finish_reason:  # a stop string; the engine would generate on
                            engine.abort(token.request_id)
                if engine.wants_graph and time.monotonic() >= capture_due_at:
                    engine.capture_wanted_graph()
                    capture_due_at = time.monotonic() + CAPTURE_INTERVAL_S
                deliver_interrupt()
        finally:
            for request_id in indices:
                engine.abort(request_id)


@contextlib.contextmanager
def naming(prompt: str) -> Iterator[None]:
    """Begin the message of a TcdeployError with `prompt`, which names one of several prompts."""
    try:
        yield
    except TcdeployError as error:
        error.message = f"{prompt}{error.message}"
        error.args = (error.message,)
        raise


@contextlib.contextmanager
def held_back_interrupts() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back. The yielded function runs the handler if a SIGINT has arrived; so does the end of the block.

    Has no effect in other threads, where Python runs no signal handlers, and if SIGINT has no handler in Python.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        if received:
            handler(*received.pop())

    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
    deliver()
