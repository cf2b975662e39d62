"""One rule for all commands: tables and sentences on a terminal, one JSON document with --json."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from tcdeploy.bench.report import FailedRow, Report
from tcdeploy.bench.serving import ServeRow
from tcdeploy.cli import app as cli
from tcdeploy.cli.bench_display import publish_document
from tcdeploy.errors import UsageError
from tests.conftest import ROOT, TINY, RunCLI

REPORT = Report(
    "serve", {}, {}, {}, [ServeRow("llama", 64, {}, 1.0, 9, 12.5, 3.0, None), FailedRow("other", "it was down")]
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def leaves(command: Any, name: str = "") -> dict[str, Any]:
    children = getattr(command, "commands", None)
    if children is None:
        return {name: command}
    return {path: leaf for child in children for path, leaf in leaves(children[child], f"{name} {child}").items()}


def test_every_command_has_the_option_json() -> None:
    options = {name: {item.name for item in command.params} for name, command in leaves(get_command(cli.app)).items()}
    assert len(options) == 9 + 6 + 14
    assert [name for name, names in options.items() if "json" not in names] == []


def published(stdout: io.StringIO, as_json: bool, output: str | None = None) -> tuple[str, str]:
    stderr = io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        publish_document(REPORT, output, as_json)
    return stdout.getvalue(), stderr.getvalue()


def test_bench_prints_tables_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stdout, stderr = published(Terminal(), as_json=False)
    assert "out tok/s" in stdout and "other: not measured: it was down" in stdout
    assert "{" not in stdout and stderr == ""


def test_bench_prints_its_document_to_a_terminal_with_json() -> None:
    stdout, stderr = published(Terminal(), as_json=True)
    assert (json.loads(stdout)["command"], stderr) == ("bench serve", "")


@pytest.mark.parametrize("as_json", [True, False])
def test_bench_prints_its_document_to_a_pipe_and_the_tables_to_stderr(as_json: bool) -> None:
    stdout, stderr = published(io.StringIO(), as_json)
    assert json.loads(stdout)["rows"][0]["requests"] == 64
    assert "out tok/s" in stderr and "it was down" in stderr


def test_bench_prints_a_document_that_cannot_be_written(tmp_path: Path) -> None:
    stdout = Terminal()
    with pytest.raises(UsageError, match="cannot be written"):
        published(stdout, as_json=False, output=str(tmp_path))
    assert json.loads(stdout.getvalue()[stdout.getvalue().index("{") :])["command"] == "bench serve"


def test_recipes_as_a_document(run_cli: RunCLI) -> None:
    document = json.loads(run_cli("recipes", "--json").stdout)
    assert document["command"] == "recipes" and len(document["recipes"]) == len(list((ROOT / "recipes").glob("*.yaml")))
    for entry in document["recipes"]:
        assert yaml.safe_load(Path(entry["path"]).read_text())["model"] == entry["model"]


def test_a_dry_run_of_serve_prints_the_plan_of_compile(run_cli: RunCLI) -> None:
    flags = (TINY, "--dry-run", "--context", "256")
    served, compiled = (json.loads(run_cli(command, *flags, "--json").stdout) for command in ("serve", "compile"))
    assert served["command"] == compiled["command"] == "plan"
    assert served["plan"]["key"] == compiled["plan"]["key"] and served["plan"]["context"] == 256
    plain = run_cli("serve", *flags)
    assert plain.returncode == 0 and "plan for builtin:tiny" in plain.stdout
    refused = run_cli("serve", *flags, "--cache-from", "/x")
    assert refused.returncode == 2 and "--dry-run excludes --budget and --cache-from" in refused.stderr
