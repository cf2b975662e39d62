"""Runs a build for a GPU that this machine does not have in a process of its own (worker.py). Does not import torch."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from tcdeploy import errors
from tcdeploy.errors import CompileError, TcdeployError
from tcdeploy.host.die_with_parent import command
from tcdeploy.host.progress import Progress
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.planning.recipe import Recipe

KEPT_LINES = 20  # of stderr, for the error of a process that was killed


@dataclass(frozen=True)
class BlindResult:
    """A plan that was built. `choices`: what was chosen without timing it. `peak_bytes`: host memory of the process."""

    plan_key: str
    cache_dir: str
    seconds: float
    choices: tuple[str, ...]
    peak_bytes: int


def build_blind(recipe: Recipe, target: str, progress: Progress, winners: Path | None = None) -> BlindResult:
    """Build the programs of a recipe for a GPU, and write them to its cache folder.

    target: a name or a file, as `read_gpu_description` takes it. winners: a folder with measured autotuner results of
    Inductor. Raises the TcdeployError of the build, and CompileError if its process ends without a result.
    """
    progress.stage("build")
    with temporary_folder("blind") as folder:
        report = folder / "report.json"
        request = {
            "recipe": asdict(recipe), "target": target, "winners": winners and str(winners), "report": str(report),
        }  # fmt: skip
        process = subprocess.Popen(
            command("tcdeploy.start.blind.worker"), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace",
        )  # fmt: skip
        assert process.stdin is not None and process.stderr is not None
        lines: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(request))
            for line in process.stderr:
                lines.append(line.strip())
                progress.detail(" ".join(line.split()))
            code = process.wait()
        finally:
            process.kill()
        if not report.is_file():
            raise CompileError(f"the build ended with exit code {code}: {lines[-1] if lines else 'no message'}")
        result = json.loads(report.read_text(encoding="utf-8"))
    if "error" in result:
        raise _error(result)
    return BlindResult(**{**result, "choices": tuple(result["choices"])})


def _error(result: dict[str, str]) -> TcdeployError:
    """The error that the process reported, as its class if that takes no more than a message and a hint."""
    kind = getattr(errors, result["error"], TcdeployError)
    return kind(result["message"], result["hint"])  # type: ignore[no-any-return]
