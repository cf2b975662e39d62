"""From nothing to the first token, in a process of its own: once with an empty compile cache, then with a filled one.

The parent starts the command as a shell would, and both read one clock (the epoch's), so the interpreter's own start is
in the figure. The parent imports no torch and holds no GPU. *Cold* means the compile cache: torch's own files may well
be in the system's memory from the last time they were read, and a machine that just booted is slower than either row.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan
from tcdeploy.bench.settings import StartupSettings
from tcdeploy.errors import TcdeployError
from tcdeploy.planning.environment import detect_environment
from tcdeploy.planning.recipe import Recipe
from tcdeploy.progress import Progress

RunProcess = Callable[[list[str]], str]  # a command to what it wrote to stdout


@dataclass(frozen=True)
class StartupRow(Row):
    """Seconds. `stage_seconds` are in order and end with the first token; `other` is what no stage covers."""

    start: str  # cold or warm
    first_token_seconds: float
    stage_seconds: dict[str, float]
    process_seconds: float  # to the end of the process


def run(recipe: Recipe, settings: StartupSettings, progress: Progress, start: RunProcess | None = None) -> Report:
    """A row for each start. Machine and plan are the children's word. Raises TcdeployError where a child fails."""
    with tempfile.TemporaryDirectory(prefix="tcdeploy-startup-") as folder:
        isolated = dataclasses.replace(recipe, cache_dir=folder)
        command = child_command(isolated, settings)
        rows = []
        for name in ("cold", *["warm"] * settings.warm_runs):
            progress.stage(f"{name} start")
            child_report, before, after = _run_child(command, start or run_process)
            rows.append(_row(name, child_report, before, after))
    return Report("startup", child_report["environment"], child_report["plan"], dataclasses.asdict(settings), rows)


def child_command(recipe: Recipe, settings: StartupSettings) -> list[str]:
    """Every field is spelled out, so that no variable of the environment decides anew."""
    own = ["--child", "--prompt-length", str(settings.prompt_length), "--seed", str(settings.seed)]
    return [sys.executable, "-m", "tcdeploy", "bench", "startup", recipe.model, *own, *recipe_flags(recipe)]


def recipe_flags(recipe: Recipe) -> list[str]:
    """The options that give this recipe again; the model itself is an argument. None is what is not asked."""
    flags: list[str] = []
    for item in fields(recipe):
        value, name = getattr(recipe, item.name), item.name.replace("_", "-")
        if item.name == "model" or value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return flags


def measure_first_token(recipe: Recipe, settings: StartupSettings, progress: Progress) -> dict[str, Any]:
    """What the child does and tells: everything up to a first token, and when that was."""
    began = time.time()
    from tcdeploy import pipeline
    from tcdeploy.bench.engine_driver import Prompts, measure_ttft

    deployment = pipeline.prepare(recipe, progress)
    settings.check_against_plan(deployment.plan)
    prompt = Prompts(deployment.architecture.vocab_size, settings.seed).draw(settings.prompt_length)
    seconds = measure_ttft(deployment.engine, prompt)
    ended = time.time()
    return {
        "began": began,
        "ended": ended,
        "stage_seconds": {**deployment.stage_seconds, "first token": seconds},
        "plan": describe_plan(deployment.plan),
        "environment": describe_environment(detect_environment()),
    }


def _run_child(command: list[str], start: RunProcess) -> tuple[dict[str, Any], float, float]:
    """(what the child told, when it was started, when it was over), on the epoch's clock."""
    before = time.time()
    child_report = json.loads(start(command))
    return child_report, before, time.time()


def _row(name: str, child_report: dict[str, Any], before: float, after: float) -> StartupRow:
    stages = {"interpreter": child_report["began"] - before, **child_report["stage_seconds"]}
    first_token_seconds = child_report["ended"] - before
    stages["other"] = max(0.0, first_token_seconds - sum(stages.values()))
    return StartupRow(TCDEPLOY, name, first_token_seconds, stages, after - before)


def run_process(command: list[str]) -> str:
    """Its stderr is ours: the child's progress, and its own error."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        error = TcdeployError(f"the process that was to be measured ended with exit code {done.returncode}")
        error.hint = "its own words stand above"
        error.exit_code = done.returncode
        raise error
    return done.stdout
