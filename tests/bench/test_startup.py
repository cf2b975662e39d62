"""The parent process of `bench startup`, with a fake child; tests/cli/test_cli_bench.py runs the real one."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tcdeploy.bench import startup
from tcdeploy.bench.settings import StartupSettings
from tcdeploy.bench.startup import StartupRow, recipe_flags, run_process
from tcdeploy.errors import TcdeployError
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.recipe import Recipe, build_recipe


def test_recipe_flags_round_trip() -> None:
    recipe = Recipe(model="m", batch_sizes=(1, 4), trust_remote_code=True, memory_fraction=0.5, context=64)
    words = recipe_flags(recipe)
    flags: dict[str, object] = {"model": "m"}
    while words:
        word = words.pop(0).removeprefix("--")
        name = word.removeprefix("no-").replace("-", "_")
        if name in ("trust_remote_code", "trust_cache_dir", "require_signed", "compile"):
            flags[name] = not word.startswith("no-")
        else:
            flags[word.replace("-", "_")] = words.pop(0)
    assert build_recipe(flags, environ={"TCDEPLOY_REGION": "blocks"}) == recipe


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the children, which are not run: each reports two stages."""
    started: list[list[str]] = []

    def run_process(command: list[str]) -> str:
        started.append(command)
        now, stages = time.time(), {"import": 1.0, "compile": 2.0}
        child_report = {"began": now + 0.5, "ended": now + 4, "stage_seconds": stages, "plan": {"model": "m"}}
        return json.dumps(
            {**child_report, "import_seconds": {"torch": 0.8}, "weights_seconds": 0.6, "environment": {"gpu": ""}}
        )

    monkeypatch.setattr(startup, "run_process", run_process)
    return started


def test_one_cold_start_and_then_warm_starts_share_a_temporary_folder(commands: list[list[str]]) -> None:
    report = startup.run(Recipe(model="m", cache_dir="mine"), StartupSettings(warm_runs=2), NullProgress())
    rows = [row for row in report.rows if isinstance(row, StartupRow)]
    assert [row.start for row in rows] == ["cold", "warm", "warm"]
    folders = {command[command.index("--cache-dir") + 1] for command in commands}
    assert len(folders) == 1 and "mine" not in folders
    assert not Path(folders.pop()).exists()
    assert all("--child" in command for command in commands)


def test_starts_from_a_filled_cache_use_the_folder_of_the_recipe(commands: list[list[str]]) -> None:
    settings = StartupSettings(source="cache", warm_runs=2)
    report = startup.run(Recipe(model="m", cache_dir="mine"), settings, NullProgress())
    assert [row.start for row in report.rows if isinstance(row, StartupRow)] == ["warm", "warm"]
    assert all(command[command.index("--cache-dir") + 1] == "mine" for command in commands)


@pytest.mark.usefixtures("commands")
def test_stages_add_up_to_the_first_token() -> None:
    report = startup.run(Recipe(model="m"), StartupSettings(), NullProgress())
    row = report.rows[0]
    assert isinstance(row, StartupRow)
    assert list(row.stage_seconds) == ["interpreter", "import", "compile", "other"]
    assert row.import_seconds == {"torch": 0.8} and row.weights_seconds == 0.6
    assert sum(row.stage_seconds.values()) == pytest.approx(row.first_token_seconds) == pytest.approx(4, abs=0.2)


def test_the_exit_code_of_a_failed_child_is_kept() -> None:
    with pytest.raises(TcdeployError, match="exit code 7") as raised:
        run_process([sys.executable, "-c", "import sys; sys.exit(7)"])
    assert raised.value.exit_code == 7


def test_run_process_returns_stdout() -> None:
    assert run_process([sys.executable, "-c", "print('{}')"]) == "{}\n"
