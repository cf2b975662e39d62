"""What the benchmark scripts share: a `tcdeploy serve` process, and runs of `tcdeploy bench` as separate processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def run_server(model: str, *flags: str) -> Iterator[str]:
    """Start a server, yield its URL once it is ready, and stop it. Exits with the server's code if it does not start.

    The queue is long enough for a load beyond what the server can keep up with; `flags` may shorten it.
    """
    command = [sys.executable, "-m", "tcdeploy", "serve", model, "--port", "0", "--max-queued", "1000", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        url = next((line.split()[1] for line in process.stdout if line.startswith("ready: ")), None)
        if url is None:
            sys.exit(process.wait() or 1)
        try:
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def run_bench(command: str, *args: str, report: Path) -> dict[str, Any]:
    """The document of `tcdeploy bench`, also written to `report`; {"failed": ...} if it fails."""
    completed = subprocess.run(
        [sys.executable, "-m", "tcdeploy", "bench", command, *args, "--output", str(report.absolute())],
        stdout=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    if completed.returncode != 0:
        return {"failed": f"exit code {completed.returncode}"}
    document: dict[str, Any] = json.loads(report.read_text())
    return document
