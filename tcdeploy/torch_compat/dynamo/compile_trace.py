"""Reads graph breaks and recompilations from torch's structured trace, and writes the trace to a file for `tlparse`.

torch logs one record per event to the logger of TORCH_TRACE, with metadata and a text. No public API lists the graph
breaks of a call with their stacks, or the guards that failed: `torch._dynamo.explain` misses breaks before the first
operation, and covers a single call.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcdeploy.torch_compat.internal import find, has_parameters, internal

LOGGER = "torch._logging._internal:trace_log"
FORMATTER = "torch._logging._internal:TorchLogsFormatter"


@internal("compile trace", "torch._logging.trace_structured",
          "`explain` cannot look for graph breaks and recompilations")  # fmt: skip
def supported() -> bool:
    return isinstance(find(LOGGER), logging.Logger) and has_parameters(find(FORMATTER), "trace")


@dataclass
class CompileTrace:
    """torch's messages, in the order in which they were logged."""

    graph_breaks: list[str] = field(default_factory=list)  # the reason, followed by the stack of the user's code
    recompilations: list[str] = field(default_factory=list)  # the guard that failed in the latest program
    guard_counts: list[int] = field(default_factory=list)  # of each program


class _Collector(logging.Handler):
    def __init__(self, trace: CompileTrace) -> None:
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        payload = getattr(record, "payload", None)
        match getattr(record, "metadata", None):
            case {"artifact": {"name": "dynamo_graph_break_reason"}}:
                self._trace.graph_breaks.append(str(payload))
            case {"artifact": {"name": "recompile_reasons"}}:
                self._trace.recompilations.append(_latest_reason(payload))
            case {"compilation_metrics": {"guard_count": int(guard_count)}}:
                self._trace.guard_counts.append(guard_count)


def _latest_reason(payload: Any) -> str:
    """The payload is a reason, or a JSON list of the reasons of all earlier programs, the latest first."""
    reasons = payload
    if isinstance(payload, str):
        try:
            reasons = json.loads(payload)
        except ValueError:
            return payload
    return str(reasons[0]) if isinstance(reasons, list) and reasons else str(reasons)


@contextlib.contextmanager
def collect_trace() -> Iterator[CompileTrace]:
    """Collect the breaks and recompilations within the block; nothing if the logger is not supported."""
    trace = CompileTrace()
    with _handler(_Collector(trace)):
        yield trace


class TraceFile(logging.FileHandler):
    """Writes all records in the format of TORCH_TRACE, up to about `max_bytes`; then only counts them."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(find(FORMATTER)(trace=True))
        self.num_omitted = 0
        self._max_bytes, self._num_bytes = max_bytes, 0

    def emit(self, record: logging.LogRecord) -> None:
        size = len(getattr(record, "payload", None) or "") + len(str(getattr(record, "metadata", "")))
        if self._num_bytes + size > self._max_bytes:
            self.num_omitted += 1
            return
        self._num_bytes += size
        super().emit(record)


@contextlib.contextmanager
def write_trace(path: Path, max_bytes: int) -> Iterator[TraceFile]:
    """Write the trace of all compilations within the block. Raises OSError."""
    file = TraceFile(path, max_bytes)
    with _handler(file):
        yield file
    file.close()


@contextlib.contextmanager
def _handler(handler: logging.Handler) -> Iterator[None]:
    logger = find(LOGGER) if supported() else logging.getLogger(__name__)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
