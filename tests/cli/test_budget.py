"""`--budget`: a start that took longer ends with exit code 6, and the error names its slowest stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench import startup
from tcdeploy.bench.report import Report
from tcdeploy.bench.startup import StartupRow
from tcdeploy.cli.report_options import enforce_budget, parse_budget
from tcdeploy.errors import ThresholdError
from tests.cli.test_cli_usage import refused, run
from tests.conftest import TINY, TINY_FLAGS, RunCLI

STAGES = {"import": 1.0, "decide": 0.5, "compile": 2.5}


def test_the_error_names_the_slowest_stage() -> None:
    enforce_budget(STAGES, None)
    enforce_budget(STAGES, 4.0)
    with pytest.raises(ThresholdError) as raised:
        enforce_budget(STAGES, 3.9)
    assert raised.value.message == "startup took 4.0 s, over the budget of 3.9 s"
    assert raised.value.hint.startswith("the slowest stage was 'compile' with 2.5 s")


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("6s", 6.0), ("0.5", 0.5)])
def test_a_budget_is_a_number_of_seconds(text: str | None, seconds: float | None) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("command", ["warm", "compile", "serve", "generate", "bench startup"])
@pytest.mark.parametrize("budget", ["soon", "-1s", "0", "nan", "inf"])
def test_every_command_refuses_an_invalid_budget(command: str, budget: str) -> None:
    prompt = ("hello",) if command == "generate" else ()
    error, _ = refused(*command.split(), TINY, *prompt, "--budget", budget)
    assert error == f"--budget is {budget!r}, expected a positive number of seconds"


def test_a_command_that_starts_nothing_takes_no_budget() -> None:
    assert refused("compile", TINY, "--dry-run", "--budget", "6s")[0] == "--budget excludes --dry-run"


@pytest.mark.parametrize(
    "command",
    [
        ("warm", "--json", "--programs", "jit"), ("serve", "--port", "0"),
        *(pytest.param(command, marks=pytest.mark.long) for command in (("compile", "--json"), ("generate",))),
    ],
)  # fmt: skip
def test_a_start_over_its_budget_ends_the_command(
    command: tuple[str, ...], filled_cache: Path, cache_dir: str, run_cli: RunCLI
) -> None:
    name, *flags = command
    prompt = ("hello",) if name == "generate" else ()
    done = run_cli(name, TINY, *prompt, *TINY_FLAGS, *flags, "--cache-dir", cache_dir, "--budget", "0.001s")
    assert done.returncode == 6 and "over the budget of 0.001 s" in done.stderr and "Traceback" not in done.stderr
    if "--json" in flags:
        assert json.loads(done.stdout)["stage_seconds"], "the report comes first"
    else:
        assert done.stdout == "", "neither a text nor a ready server"


def test_a_start_within_its_budget_is_not_affected(cache_dir: str, run_cli: RunCLI) -> None:
    flags = ("--max-new-tokens", "2", "--cache-dir", cache_dir, "--budget", "300s")
    done = run_cli("generate", TINY, "hello", *TINY_FLAGS, *flags)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_budget_of_bench_startup_is_for_warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        StartupRow("tcdeploy", "cold", 9.5, None, None, {"import": 9.0}, {}),
        StartupRow("tcdeploy", "warm", None, 3.9, 4.0, STAGES, {}),
    ]

    def run_startup(*args: Any) -> Report:
        return Report("startup", {}, {}, {}, rows)

    monkeypatch.setattr(startup, "run", run_startup)
    within = run("bench", "startup", TINY, "--budget", "5s")
    assert within.returncode == 0 and len(json.loads(within.stdout)["rows"]) == 2, within.stderr
    over = run("bench", "startup", TINY, "--budget", "3s")
    assert over.returncode == 6 and "startup took 4.0 s, over the budget of 3 s" in over.stderr
    assert len(json.loads(over.stdout)["rows"]) == 2, "the report comes first"
