"""More than a thousand requests that schemathesis generates from /openapi.json cause no server error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.server.conftest import ServerProcess

CASES = 1_200  # at least
EXAMPLES = "40"  # per operation, in the fuzzing phase; the coverage phase tries the limits of every field


def test_generated_requests_cause_no_server_error(server: ServerProcess, tmp_path: Path) -> None:
    st = Path(sys.executable).parent / "st"
    completed = subprocess.run(
        [
            st, "run", f"{server.address}/openapi.json", "--phases", "coverage,fuzzing",
            "--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--generation-deterministic",
            "--no-color", "--workers", "1", "--request-timeout", "60",
            "--report", "json", "--report-json-path", str(tmp_path / "report.json"),
        ],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-4000:]
    cases = json.loads((tmp_path / "report.json").read_text())["test_cases"]
    assert cases["generated"] >= CASES and not cases["with_failures"] and not cases["errored"], cases
    assert httpx.get(f"{server.address}/health").status_code == 200
    assert server.metric("recompiles_total") == 0
