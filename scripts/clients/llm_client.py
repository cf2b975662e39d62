"""llm, the command line tool, with an entry in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import CLOCK_SCHEMA, MODEL, QUESTION, URL, check, run_checks

COMMAND = str(Path(sys.executable).parent / "llm")
folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_schema: true\n"
)


def llm(*arguments: str) -> str:
    environ = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    command = [
        COMMAND,
        "prompt",
        "-m",
        "local",
        "-o",
        "max_tokens",
        "300",
        "-o",
        "temperature",
        "0",
        QUESTION,
        *arguments,
    ]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr[-500:]
    return completed.stdout


@check("chat, stream")
def chat() -> None:
    assert llm() and llm("--no-stream")


@check("structured output")
def structured_output() -> None:
    assert isinstance(json.loads(llm("--no-stream", "--schema", json.dumps(CLOCK_SCHEMA)))["utc"], bool)


run_checks()
