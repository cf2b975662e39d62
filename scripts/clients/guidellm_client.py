"""guidellm's benchmark with one request at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL_FOLDER, URL, check, run_checks


@check("benchmark of a streamed chat")
def benchmark() -> None:
    output = Path(tempfile.mkdtemp()) / "report.json"
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run", "--backend", f"kind=openai_http,target={URL}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--tokenizer", f"kind=huggingface_auto,model={MODEL_FOLDER}", "--output", f"kind=json,path={output}",
        "--disable-console",
    ]  # fmt: skip
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-800:]
    [benchmark] = json.loads(output.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3 and not totals["errored"], totals


run_checks()
