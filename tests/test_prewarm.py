"""scripts/prewarm and the GitHub Action, whose steps run here without GitHub.

The steps come from action.yml. The test substitutes `${{ }}` expressions; a fake `python3` skips `pip install`, and a
fake `gh` prints the comment file. Both record their arguments.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tcdeploy.models.load import resolve_model_path
from tests.conftest import ROOT, TINY, cli_command, cli_environment

ACTION, WORKFLOW = ROOT / ".github/actions/prewarm/action.yml", ROOT / ".github/workflows/prewarm.yml"
SMALL = ("--buckets", "32", "--batch-sizes", "1")
WARM = " ".join((TINY, *SMALL, "--load-format", "dummy"))
LINT = "{extends: default, rules: {line-length: {max: 120}, truthy: {check-keys: false}, document-start: disable}}"


class Step(NamedTuple):
    name: str
    done: subprocess.CompletedProcess[str]


class Runner:
    """Simulates GitHub's runner for a composite action: folders, output files, values of expressions."""

    def __init__(self, work_dir: Path, event: str, inputs: dict[str, str]) -> None:
        self.work_dir, self.event = work_dir, event
        self.programs, self.temporary = work_dir / "programs", work_dir / "temporary"
        self.programs.mkdir(), self.temporary.mkdir()
        self.outputs, self.summary, self.calls = work_dir / "outputs", work_dir / "summary", work_dir / "calls"
        self.document = yaml.safe_load(ACTION.read_text())
        defaults = {name: str(item.get("default", "")) for name, item in self.document["inputs"].items()}
        self.values = {
            **{f"inputs.{name}": value for name, value in {**defaults, **inputs}.items()},
            "github.action_path": str(ACTION.parent), "github.token": "t0ken", "runner.temp": str(self.temporary),
            "github.event.pull_request.html_url": "https://github.com/someone/something/pull/7",
        }  # fmt: skip
        self._program("python3", f'case "$*" in *"pip install"*) exit 0 ;; esac; exec {sys.executable} "$@"')
        self._program("gh", 'cat "${@: -1}"')

    def _program(self, name: str, body: str) -> None:
        path = self.programs / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.calls}\n{body}\n')
        path.chmod(0o755)

    def run(self) -> list[Step]:
        steps = []
        for step in self.document["runs"]["steps"]:
            if step.get("if") and f"'{self.event}'" not in step["if"]:
                continue
            steps.append(Step(step["name"], self._run_step(step)))
            if steps[-1].done.returncode:
                break
            self.values |= {
                f"steps.{step.get('id')}.outputs.{name}": value for name, value in self._read_outputs().items()
            }
        return steps

    def _run_step(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        assert step["shell"] == "bash" and "${{" not in step["run"], "expressions in a script would allow injection"
        environment = cli_environment(self.work_dir / "home")
        environ = {
            **environment, **{name: self._substitute(value) for name, value in step.get("env", {}).items()},
            "PATH": f"{self.programs}:{environment['PATH']}", "GITHUB_OUTPUT": str(self.outputs),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }  # fmt: skip
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]], env=environ, capture_output=True, text=True,
            cwd=self.work_dir, timeout=900,
        )  # fmt: skip

    def _substitute(self, text: str) -> str:
        return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda match: self.values[match[1]], text)

    def _read_outputs(self) -> dict[str, str]:
        lines = self.outputs.read_text().splitlines() if self.outputs.exists() else []
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(cli_command("cache", "keygen", str(folder / "ci")), check=True, env=cli_environment(folder))
    return {"key": (folder / "ci.key").read_text(), "public-key": (folder / "ci.pub").read_text()}


def test_the_action_warms_signs_pushes_and_comments_and_later_runs_check_the_stored_bundle(
    keys: dict[str, str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    inputs = {**keys, "warm": WARM, "to": str(store), "budget": "300s", "extras": "s3"}
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    first = Runner(tmp_path / "first", "pull_request", inputs)
    steps = first.run()
    assert [step.done.returncode for step in steps] == [0, 0, 0], steps[-1].done.stderr
    (stored,) = store.iterdir()
    assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{64}\.tcb", stored.name)
    comment = steps[-1].done.stdout
    assert f"is stored at `{stored}`" in comment
    cold, warm = re.search(r"\| total, process start to ready \| ([\d.]+) \| ([\d.]+) \|", comment).groups()  # type: ignore[union-attr]
    assert float(cold) > float(warm) > 0
    assert first.summary.read_text() == comment
    calls = first.calls.read_text()
    assert "pip install --quiet" in calls and "../../..[s3]" in calls
    assert "gh pr comment https://github.com/someone/something/pull/7 --body-file" in calls
    assert not list(first.temporary.glob("keys-*")), "the secret key is gone"
    assert "PRIVATE" not in "".join(step.done.stdout + step.done.stderr for step in steps)
    second = Runner(tmp_path / "second", "workflow_dispatch", inputs)
    steps = second.run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    assert "was already stored" in steps[-1].done.stdout and list(store.iterdir()) == [stored]

    (tmp_path / "ci.pub").write_text(keys["public-key"])
    trusted = ("--trusted-keys", str(tmp_path / "trusted"))
    home = cli_environment(tmp_path)
    subprocess.run(cli_command("cache", "trust", "ci", str(tmp_path / "ci.pub"), *trusted), check=True, env=home)
    real = cli_command(
        "warm",
        str(resolve_model_path(TINY)),
        *SMALL,
        "--cache-dir",
        str(tmp_path / "real"),
        "--cache-from",
        str(store),
        *trusted,
    )
    served = subprocess.run([*real, "--require-hit"], capture_output=True, text=True, env=home)
    assert served.returncode == 0, f"a cache warmed without weights must serve them: {served.stderr}"

    (tmp_path / "third").mkdir()
    steps = Runner(tmp_path / "third", "pull_request", {**inputs, "budget": "0.1s"}).run()
    assert [step.done.returncode for step in steps] == [0, 6], "the stored bundle exceeds the budget"
    assert "over the budget of 0.1 s" in steps[-1].done.stderr


def test_an_invalid_public_key_fails_before_warming(keys: dict[str, str], tmp_path: Path) -> None:
    runner = Runner(tmp_path, "pull_request", {**keys, "public-key": "", "warm": WARM, "to": str(tmp_path / "store")})
    steps = runner.run()
    assert [step.done.returncode for step in steps] == [0, 2]
    assert "is not a public key" in steps[-1].done.stderr and "tcdeploy warm" not in steps[-1].done.stderr


def test_the_yaml_matches_githubs_schemas() -> None:
    """Checked by yamllint and by the published schemas of GitHub actions and workflows."""
    checks = [
        ("yamllint", "--strict", "-d", LINT, str(ROOT / ".github")),
        ("check_jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION)),
        ("check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)),
    ]
    for check in checks:
        done = subprocess.run([sys.executable, "-m", *check], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_check_detects_an_error(tmp_path: Path) -> None:
    (tmp_path / "action.yml").write_text(ACTION.read_text().replace("using: composite", "using: magic"))
    check = ("check_jsonschema", "--builtin-schema", "vendor.github-actions", str(tmp_path / "action.yml"))
    assert subprocess.run([sys.executable, "-m", *check], capture_output=True).returncode == 1


def test_the_workflow_passes_inputs_that_the_action_declares() -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    (action_step,) = [step for step in job["steps"] if step["uses"] == "./.github/actions/prewarm"]
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    assert set(action_step["with"]) <= set(inputs)
    assert {name for name, item in inputs.items() if item.get("required")} <= set(action_step["with"])
    assert "--recipe llama-3.1-8b" in action_step["with"]["warm"] and (ROOT / "recipes/llama-3.1-8b.yaml").exists()
    assert os.access(ROOT / "scripts/prewarm", os.X_OK)
