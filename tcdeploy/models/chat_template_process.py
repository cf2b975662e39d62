"""The process that renders chat templates for chat_template.py. Run as a script: chat_template_process.py DESCRIPTOR

A chat template is code of the model's author. Jinja's sandbox prevents access to files and to Python's internals, but
does not limit time and memory: two nested loops over range(100000) take hours, `9 ** 9 ** 9` holds the GIL until it is
computed, and doubling a string 40 times needs a terabyte. A thread that runs such code cannot be stopped, but a process
can be killed.

Requests and replies are JSON objects: arguments of transformers' `render_jinja_template`, and {"text": ...} or
{"error": ..., "line": ...}. Imports nothing of this package, and no torch.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

CPU_SECONDS = 10  # of one request; the parent kills this process earlier, unless the parent itself was killed
MEMORY_BYTES = 1 << 30  # in addition to what the process has mapped after its imports
MAX_TEXT_CHARS = 16 << 20  # a request has at most 8 MiB
TEMPLATE_FILE = "<template>"  # the file name of templates in Jinja's tracebacks


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may still finish requests
    connection = Connection(descriptor)
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # the parent has exited
            return
        _limit_cpu_time()
        connection.send_bytes(json.dumps(_render(render_jinja_template, request)).encode())


def _render(render_jinja_template: Any, request: bytes) -> dict[str, Any]:
    try:
        (text,), _ = render_jinja_template(**json.loads(request))
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory", "line": None}
    except Exception as error:  # templates raise exceptions of Jinja and of Python
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0], "line": _template_line(error)}
    if len(text) > MAX_TEXT_CHARS:
        return {"error": f"its output has {len(text)} characters; the limit is {MAX_TEXT_CHARS}", "line": None}
    return {"text": text}


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
