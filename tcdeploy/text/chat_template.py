"""Renders chat templates with a limit on their time, memory and output.

Templates run in another process (chat_template_process.py), which is replaced when a template exceeds a limit. That
process gives templates the functions that transformers gives them, so the text equals that of `apply_chat_template`.
It starts in 0.1 s and uses 23 MB; a short conversation takes 0.3 ms. Rejected: limits inside this process. It is not
enough to count loop iterations and to check operators in Jinja's sandbox: `~`, `*`, filters and string methods can each
build values of any size, and functions that are written in C hold the GIL until they return.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError, UsageError

RENDER_SECONDS = 5.0
TEMPLATE_HINT = "correct the file of --chat-template"
START_SECONDS = 120.0  # for its imports, while the machine is busy with loading a model
SCRIPT = Path(__file__).with_name("chat_template_process.py")
# Variables that the process inherits: those that Python and the template's `strftime_now` need, but no keys.
INHERITED_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ")
END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "  # the space shows whether the template strips messages
# Arguments of transformers' `apply_chat_template` and `render_jinja_template`, and of Jinja's `Template.render`. A test
# compares them with the signatures.
RESERVED_NAMES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip


class ChatTemplate(NamedTuple):
    """A template that replaces the tokenizer's."""

    path: Path
    text: str


def read_chat_template(path: Path) -> ChatTemplate:
    """Read and parse a template. Raises UsageError if the file cannot be read, ModelError for a syntax error."""
    from jinja2 import TemplateSyntaxError

    from tcdeploy.text.chat_template_process import make_environment

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the chat template {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            "--chat-template is the path of a Jinja file",
        ) from error
    try:
        make_environment().from_string(text)
    except TemplateSyntaxError as error:  # includes unknown filters and tests
        raise ModelError(
            f"the chat template {path} has an error in line {error.lineno}: {error.message}", TEMPLATE_HINT
        ) from error
    except RecursionError as error:
        raise ModelError(f"the chat template {path} is nested too deeply", TEMPLATE_HINT) from error
    return ChatTemplate(path, text)


def render_messages(
    tokenizer: Any, messages: list[dict[str, Any]], variables: dict[str, Any], *, continues: bool = False
) -> str:
    """The prompt of messages that are in the template's form. `variables`: of the template, `tools` included.

    With `continues`, the prompt ends with the text of the final message, so that the model continues it. Blocks until
    the text is rendered, so the event loop must call it in `render_pool`. Raises ModelError if the template fails,
    exceeds a limit, or leaves out the end of a message that is to be continued.
    """
    if renders_in_python(tokenizer):
        if continues:  # an argument that not every family has
            variables = {**variables, "continue_final_message": True}
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
        except Exception as error:  # code of the model family may raise anything
            raise ModelError(f"the chat template failed: {error}") from error
    if continues:
        messages = _mark_end(messages)
    try:
        template = tokenizer.get_chat_template(None, variables.get("tools"))
        variables = {**tokenizer.special_tokens_map, **variables}  # which override special tokens, as in transformers
        request = json.dumps({"template": template, "messages": messages, "variables": variables}).encode()
    except (TypeError, ValueError, RecursionError) as error:  # no template; arguments not JSON, or nested too deep
        raise ModelError(f"the chat template cannot be used: {error}") from error
    reply = _process.exchange(request)
    if "text" in reply:
        return _cut_at_mark(reply["text"]) if continues else str(reply["text"])
    location = "" if reply["line"] is None else f" in line {reply['line']}"
    raise ModelError(f"the chat template failed{location}: {reply['error']}", "check the messages and the template")


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy whose final message ends with END_MARK."""
    *others, final = messages
    match final.get("content"):
        case str() as text:
            content: Any = text + END_MARK
        case [*parts, {"type": "text", "text": text}]:
            content = [*parts, {"type": "text", "text": text + END_MARK}]
        case _:
            raise ModelError("the final message has no text to continue", "send continue_final_message: false")
    return [*others, {**final, "content": content}]


def _cut_at_mark(text: str) -> str:
    """The text before END_MARK. If the template strips messages, the end of the final message is stripped too."""
    end = text.rfind(END_MARK.strip())
    if end < 0:
        raise ModelError(
            "the chat template leaves out the end of the final message, so the message cannot be continued",
            "send continue_final_message: false",
        )
    is_stripped = not text.startswith(END_MARK, end)
    return text[:end].rstrip() if is_stripped else text[:end]


def reserved_names(tokenizer: Any) -> Set[str]:
    """Arguments of the functions that render. A client that set them could replace the messages or the template."""
    if renders_in_python(tokenizer):
        return RESERVED_NAMES | inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    return RESERVED_NAMES


def renders_in_python(tokenizer: Any) -> bool:
    """Whether the model family overrides transformers' `apply_chat_template`, for example to use no template."""
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if method is None:  # a StoredTokenizer
        return False
    from transformers import PreTrainedTokenizerBase  # imported with the tokenizer

    return method is not PreTrainedTokenizerBase.apply_chat_template


class _RenderProcess:
    """Owns the process and its connection. Requests are rendered one after another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False

    def exchange(self, request: bytes) -> dict[str, Any]:
        """Send a request and return the reply. Raises ModelError if no reply comes in time, or if the process exits."""
        with self._lock:
            connection = self.start()
            try:
                if not self._is_ready:
                    self._receive(connection, START_SECONDS, "did not start")
                    self._is_ready = True
                connection.send_bytes(request)
                return json.loads(self._receive(connection, RENDER_SECONDS, "is too slow: it did not finish"))
            except (EOFError, OSError) as error:
                self.stop()
                raise ModelError("the chat template failed: the process that renders it has exited") from error

    def _receive(self, connection: Connection, timeout_s: float, failure: str) -> bytes:
        if connection.poll(timeout_s):
            return connection.recv_bytes()
        self.stop()
        self.start()  # ready for the next request
        raise ModelError(f"the chat template {failure} within {timeout_s:g} s", "check the messages and the template")

    def start(self) -> Connection:
        with self._lock:
            if self._connection is None or self._process is None or self._process.poll() is not None:
                self.stop()
                self._connection, child_connection = Pipe()
                inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
                self._process = subprocess.Popen(
                    # -P: do not import modules from the script's folder
                    [sys.executable, "-P", str(SCRIPT), str(child_connection.fileno())],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    # this process's `sys.path` may differ from its own variable
                    env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=[child_connection.fileno()],
                )  # fmt: skip
                child_connection.close()
            return self._connection

    def stop(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._connection, self._process, self._is_ready = None, None, False

    def forget(self) -> None:
        """Drop the connection in a forked child, because the process belongs to the parent."""
        if self._connection is not None:
            self._connection.close()
        self.__init__()  # type: ignore[misc]


_process = _RenderProcess()
start_renderer = _process.start  # in the background, so that its imports do not delay the first rendering
render_pool = ThreadPoolExecutor(1, "chat-template")  # separate, so that slow templates block no other thread pool
atexit.register(_process.stop)
os.register_at_fork(after_in_child=_process.forget)
