"""`bench startup`: seconds from process start to the first token, with an empty and with a filled compile cache.

Each start is a separate process. Parent and child read the same wall clock, so the start of the interpreter is
included. The parent does not import torch and does not use the GPU. *Cold* refers to the compile cache: torch's files
may be in the page cache, so a freshly booted machine is slower than either row.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from typing import Any

from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan
from tcdeploy.bench.settings import StartupSettings
from tcdeploy.errors import TcdeployError
from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.host.progress import Progress
from tcdeploy.planning.environment import detect_environment
from tcdeploy.planning.recipe import Recipe


@dataclass(frozen=True)
class StartupRow(Row):
    """`stage_seconds` are in order and end with the first token; `other` is the time outside all stages.

    `import_seconds` are those of imports in all stages, by package. `weights_seconds`: how long threads read the
    weights, in parallel with other stages; None if transformers loaded them, or if they were not read.
    """

    start: str  # cold or warm
    first_token_seconds: float  # since the start of the process
    stage_seconds: dict[str, float]
    process_seconds: float  # until the end of the process
    import_seconds: dict[str, float]
    weights_seconds: float | None = None


def run(recipe: Recipe, settings: StartupSettings, progress: Progress) -> Report:
    """One row per start; the child reports environment and plan. Raises TcdeployError if a child fails."""
    with tempfile.TemporaryDirectory(prefix="tcdeploy-startup-") as folder:
        is_cold = settings.source == "cold"
        command = child_command(dataclasses.replace(recipe, cache_dir=folder) if is_cold else recipe, settings)
        rows = []
        for number, kind in enumerate((*["cold"] * is_cold, *["warm"] * settings.warm_runs), 1):
            progress.stage(f"start {number}, {kind}")
            started = time.time()  # on the wall clock, as the times of the child
            child_report = json.loads(run_process(command))
            rows.append(_row(kind, child_report, started, time.time()))
    return Report("startup", child_report["environment"], child_report["plan"], dataclasses.asdict(settings), rows)


def child_command(recipe: Recipe, settings: StartupSettings) -> list[str]:
    """The command of the measured process. Passes every field of the recipe, which overrides environment variables."""
    options = ["--child", "--prompt-length", str(settings.prompt_length), "--seed", str(settings.seed)]
    return [sys.executable, "-m", "tcdeploy", "bench", "startup", recipe.model, *options, *recipe_flags(recipe)]


def recipe_flags(recipe: Recipe) -> list[str]:
    """Command-line flags for the fields of a recipe that are not None. The model is an argument, not a flag."""
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
    """Run in the child: start a deployment, generate a first token, and report the times on the wall clock."""
    began = time.time()
    from tcdeploy.start.prepare import prepare

    deployment = prepare(recipe, progress)
    from tcdeploy.bench.engine_driver import Prompts, measure_ttft  # imports torch, which is a stage of `prepare`

    freeze_gc_after_startup()  # as `serve` does
    settings.check_against_plan(deployment.plan)
    prompt = Prompts(deployment.planned.architecture.vocab_size, settings.seed).draw(settings.prompt_length)
    seconds = measure_ttft(deployment.engine, prompt, cools_down=False)  # the wait would count as a part of the start
    ended = time.time()
    return {
        "began": began,
        "ended": ended,
        "stage_seconds": {**deployment.stage_seconds, "first token": seconds},
        "import_seconds": deployment.import_seconds,
        "weights_seconds": deployment.weights_read.seconds if deployment.weights_read else None,
        "plan": describe_plan(deployment.plan),
        "environment": describe_environment(detect_environment(recipe.device)),
    }


def _row(kind: str, child_report: dict[str, Any], started: float, ended: float) -> StartupRow:
    stages = {"interpreter": child_report["began"] - started, **child_report["stage_seconds"]}
    first_token_seconds = child_report["ended"] - started
    stages["other"] = max(0.0, first_token_seconds - sum(stages.values()))
    imports, weights_seconds = child_report["import_seconds"], child_report["weights_seconds"]
    return StartupRow(TCDEPLOY, kind, first_token_seconds, stages, ended - started, imports, weights_seconds)


def run_process(command: list[str]) -> str:
    """Run a command and return its stdout; its stderr is inherited. Raises TcdeployError with its exit code."""
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if completed.returncode:
        error = TcdeployError(f"the measured process ended with exit code {completed.returncode}")
        error.hint = "see its error message above"
        error.exit_code = completed.returncode
        raise error
    return completed.stdout
