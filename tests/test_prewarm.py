"""Pre-warming in CI: the script, and the Action's own steps, run here as far as they go without GitHub.

The steps are taken from action.yml as they stand; what GitHub puts into `${{ }}` is put in here, `pip install` meets a
`python` that only notes it, and `gh` is a program that notes what it was asked to comment.
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
    """What a runner of GitHub's gives to a composite action: folders, files for outputs, values of expressions."""

    def __init__(self, place: Path, event: str, inputs: dict[str, str]) -> None:
        self.place, self.event = place, event
        self.programs, self.temporary = place / "programs", place / "temporary"
        self.programs.mkdir(), self.temporary.mkdir()
        self.outputs, self.summary, self.asked = place / "outputs", place / "summary", place / "asked"
        self.document = yaml.safe_load(ACTION.read_text())
        defaults = {name: str(item.get("default", "")) for name, item in self.document["inputs"].items()}
        self.values = {
            **{f"inputs.{name}": value for name, value in {**defaults, **inputs}.items()},
            "github.action_path": str(ACTION.parent), "github.token": "t0ken", "runner.temp": str(self.temporary),
            "github.event.pull_request.html_url": "https://github.com/someone/something/pull/7",
        }  # fmt: skip
        self._program("python3", f'case "$*" in *"pip install"*) exit 0 ;; esac; exec {sys.executable} "$@"')
        self._program("gh", 'cat "${@: -1}"')

    def _program(self, name: str, what: str) -> None:
        path = self.programs / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.asked}\n{what}\n')
        path.chmod(0o755)

    def run(self) -> list[Step]:
        steps = []
        for step in self.document["runs"]["steps"]:
            if step.get("if") and f"'{self.event}'" not in step["if"]:
                continue
            steps.append(Step(step["name"], self._run_step(step)))
            if steps[-1].done.returncode:
                break
            self.values |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in self._told().items()}
        return steps

    def _run_step(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        assert step["shell"] == "bash" and "${{" not in step["run"], "an input in a script could be any script"
        known = cli_environment(self.place / "home")
        environ = {
            **known, **{name: self._filled(value) for name, value in step.get("env", {}).items()},
            "PATH": f"{self.programs}:{known['PATH']}", "GITHUB_OUTPUT": str(self.outputs),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }  # fmt: skip
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]], env=environ, capture_output=True, text=True,
            cwd=self.place, timeout=900,
        )  # fmt: skip

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda match: self.values[match[1]], text)

    def _told(self) -> dict[str, str]:
        lines = self.outputs.read_text().splitlines() if self.outputs.exists() else []
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("keys")
    subprocess.run(cli_command("cache", "keygen", str(place / "ci")), check=True, env=cli_environment(place))
    return {"key": (place / "ci.key").read_text(), "public-key": (place / "ci.pub").read_text()}


def test_the_actions_steps_warm_sign_push_and_comment_and_the_next_runs_hold_it_to_its_budget(
    keys: dict[str, str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    asked = {**keys, "warm": WARM, "to": str(store), "budget": "300s", "extras": "s3"}
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    first = Runner(tmp_path / "first", "pull_request", asked)
    steps = first.run()
    assert [step.done.returncode for step in steps] == [0, 0, 0], steps[-1].done.stderr
    (stored,) = store.iterdir()
    assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{64}\.tcb", stored.name)
    comment = steps[-1].done.stdout
    assert f"is at `{stored}`" in comment
    cold, warm = re.search(r"\| all, from nothing to ready \| ([\d.]+) \| ([\d.]+) \|", comment).groups()  # type: ignore[union-attr]
    assert float(cold) > float(warm) > 0
    assert first.summary.read_text() == comment
    told = first.asked.read_text()
    assert "pip install --quiet" in told and "../../..[s3]" in told
    assert "gh pr comment https://github.com/someone/something/pull/7 --body-file" in told
    assert not list(first.temporary.glob("keys-*")), "the secret key is gone"
    assert "PRIVATE" not in "".join(step.done.stdout + step.done.stderr for step in steps)
    second = Runner(tmp_path / "second", "workflow_dispatch", asked)
    steps = second.run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    assert "was stored already" in steps[-1].done.stdout and list(store.iterdir()) == [stored]

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
    assert served.returncode == 0, f"warmed without weights, started with them: {served.stderr}"

    (tmp_path / "third").mkdir()
    steps = Runner(tmp_path / "third", "pull_request", {**asked, "budget": "0.1s"}).run()
    assert [step.done.returncode for step in steps] == [0, 6], "stored, and slower than it may be"
    assert "over the budget of 0.1 s" in steps[-1].done.stderr


def test_a_key_that_is_none_fails_before_anything_is_warmed(keys: dict[str, str], tmp_path: Path) -> None:
    runner = Runner(tmp_path, "pull_request", {**keys, "public-key": "", "warm": WARM, "to": str(tmp_path / "store")})
    steps = runner.run()
    assert [step.done.returncode for step in steps] == [0, 2]
    assert "is no public key" in steps[-1].done.stderr and "tcdeploy warm" not in steps[-1].done.stderr


def test_the_yaml_is_what_github_takes() -> None:
    """By yamllint, and by the schemas that GitHub publishes for actions and workflows."""
    checks = [
        ("yamllint", "--strict", "-d", LINT, str(ROOT / ".github")),
        ("check_jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION)),
        ("check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)),
    ]
    for check in checks:
        done = subprocess.run([sys.executable, "-m", *check], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_yaml_check_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "action.yml").write_text(ACTION.read_text().replace("using: composite", "using: magic"))
    check = ("check_jsonschema", "--builtin-schema", "vendor.github-actions", str(tmp_path / "action.yml"))
    assert subprocess.run([sys.executable, "-m", *check], capture_output=True).returncode == 1


def test_the_workflow_uses_the_action_with_inputs_that_it_has() -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    (used,) = [step for step in job["steps"] if step["uses"] == "./.github/actions/prewarm"]
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    assert set(used["with"]) <= set(inputs)
    assert {name for name, item in inputs.items() if item.get("required")} <= set(used["with"])
    assert "--recipe llama-3.1-8b" in used["with"]["warm"] and (ROOT / "recipes/llama-3.1-8b.yaml").exists()
    assert os.access(ROOT / "scripts/prewarm", os.X_OK)
