"""The process that renders chat templates for chat_template.py. Run as a script: chat_template_process.py DESCRIPTOR

A chat template is code of the model's author. Jinja's sandbox prevents access to files and to Python's internals, but
does not limit time and memory: two nested loops over range(100000) take hours, `9 ** 9 ** 9` holds the GIL until it is
computed, and doubling a string 40 times needs a terabyte. A thread that runs such code cannot be stopped.

Requests are JSON objects with `template`, `messages` and `variables`; replies are {"text": ...} or {"error": ...,
"line": ...}. transformers is not imported: it takes 1 s and 60 MB, and need not be installed; tests compare the texts.
Imports nothing of this package, and no torch.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
import traceback
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CPU_SECONDS = 10  # of one request; the parent kills this process earlier, unless the parent itself was killed
MEMORY_BYTES = 1 << 30  # in addition to what the process has mapped after its imports
MAX_TEXT_CHARS = 16 << 20  # a request has at most 8 MiB
TEMPLATE_FILE = "<template>"  # the file name of templates in Jinja's tracebacks
# Names of a message's reasoning in the API and in templates; the first that is set is used.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may still finish requests
    connection = Connection(descriptor)
    _limit_memory()
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # the parent has exited
            return
        _limit_cpu_time()
        connection.send_bytes(json.dumps(_reply(**json.loads(request))).encode())


def _reply(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> dict[str, Any]:
    try:
        text = render(template, messages, variables)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory", "line": None}
    except Exception as error:  # templates raise exceptions of Jinja and of Python
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0], "line": _template_line(error)}
    if len(text) > MAX_TEXT_CHARS:
        return {"error": f"its output has {len(text)} characters; the limit is {MAX_TEXT_CHARS}", "line": None}
    return {"text": text}


def render(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The text that transformers' `render_jinja_template` returns for one conversation."""
    defined = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    return _compile(template).render({**defined, "messages": [_with_reasoning_names(item) for item in messages]})


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the two names that templates read."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@functools.lru_cache
def _compile(template: str) -> Template:
    return make_environment().from_string(template)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Jinja's sandbox with transformers' settings, filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": DictFunctions(),
        "namespace": PublicNamespace,
    }
    return environment


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's output for training. It adds nothing to the text.

    The block is called like a macro, so a variable that is set inside keeps its value inside.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class DictFunctions:
    """The functions of `dict` that a template may call, without the attributes of the type."""

    def __call__(self, *items: Any, **named_items: Any) -> dict[Any, Any]:
        return dict(*items, **named_items)

    def fromkeys(self, keys: Any, value: Any = None, /) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class PublicNamespace(Namespace):
    """Jinja's `namespace` without names that start with an underscore, such as `__class__`."""

    def __init__(self, /, *items: Any, **named_items: Any) -> None:
        super().__init__()
        for name, value in dict(*items, **named_items).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}, which starts with an underscore")
        super().__setitem__(name, value)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes characters that have a meaning in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _template_line(error: Exception) -> int | None:
    """The line of a syntax error, else the innermost template line in the traceback; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == TEMPLATE_FILE]
    return getattr(error, "lineno", None) or (lines[-1] if lines else None)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _set_limit(resource.RLIMIT_AS, mapped_bytes + MEMORY_BYTES)


def _limit_cpu_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + CPU_SECONDS)


def _set_limit(kind: int, value: int) -> None:
    """Set the soft limit, which can be raised again later. A lower hard limit of the user has precedence."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
