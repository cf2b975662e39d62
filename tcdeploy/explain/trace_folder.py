"""The folder of `explain --trace`: one file per run, of limited size; only the newest files are kept.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.errors import OutputError
from tcdeploy.torch_compat.dynamo.compile_trace import write_trace

PREFIX, SUFFIX = "tcdeploy-explain-", ".log"
MAX_BYTES = 256 << 20  # of a file; the trace of an 8B model with ten buckets is a tenth of this
MAX_FILES = 5


@dataclass
class WrittenTrace:
    """`num_omitted`: records omitted because the file had reached its maximum size. Set at the end of the block."""

    path: Path
    num_omitted: int = 0


@contextlib.contextmanager
def writing_trace(folder: Path | None) -> Iterator[WrittenTrace | None]:
    """Write the trace of the block to a new file in `folder`. None: write no trace. Raises OutputError."""
    if folder is None:
        yield None
        return
    written = WrittenTrace(new_trace_path(folder))
    with write_trace(written.path, MAX_BYTES) as file:
        yield written
    written.num_omitted = file.num_omitted


def new_trace_path(folder: Path) -> Path:
    """Create an empty file, after removing the oldest files of earlier runs. Returns its path. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(folder.glob(f"{PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for file in files[: max(0, len(files) - MAX_FILES + 1)]:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
        path = folder / f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
        path.touch()
    except OSError as error:
        raise OutputError(
            f"the trace cannot be written to {folder}: {error}", "pass another folder: --trace DIR"
        ) from None
    return path
