"""aiperf's profile of streamed chats, which also reads /metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, MODEL_FOLDER, URL, check, run_checks


@check("profile of streamed chats")
def profile() -> None:
    folder = tempfile.mkdtemp()
    command = [
        str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL, "--url", URL, "--endpoint-type",
        "chat", "--streaming", "--request-count", "4", "--concurrency", "2", "--tokenizer", MODEL_FOLDER,
        "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--artifact-dir", folder, "--ui", "none",
    ]  # fmt: skip
    environ = {**os.environ}
    environ.pop("HF_HUB_OFFLINE", None)  # with it, aiperf takes the folder for a name on the Hub
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-800:]
    report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 4, "not all requests were answered"
    assert (Path(folder) / "server_metrics_export.json").exists(), "/metrics was not read"


run_checks()
