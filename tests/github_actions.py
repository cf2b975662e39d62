"""Runs the steps of a composite GitHub Action on this machine, without GitHub.

The steps come from action.yml. `${{ }}` expressions are substituted. A fake `python3` skips `pip install`, and its
`-m venv` creates a Python that can import only the packages that the action installs by hash. It records its arguments.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.conftest import ROOT, cli_environment

ACTIONS = ROOT / ".github/actions"
LOCKED_PYTHON = """
import runpy, sys

class RefuseWhatIsNotLocked:
    def find_spec(self, name, path=None, target=None):
        if name in REFUSED:
            raise ModuleNotFoundError(f"{name} is not in the lock", name=name)

sys.meta_path.insert(0, RefuseWhatIsNotLocked())
sys.path[0] = sys.argv[1]
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Step(NamedTuple):
    name: str
    done: subprocess.CompletedProcess[str]


class ActionRunner:
    """Simulates GitHub's runner for a composite action: folders, output files, values of expressions."""

    def __init__(self, action: str, work_dir: Path, inputs: dict[str, str]) -> None:
        self.work_dir, self.folder = work_dir, ACTIONS / action
        work_dir.mkdir(parents=True, exist_ok=True)
        self.programs, self.temporary = work_dir / "programs", work_dir / "temporary"
        self.programs.mkdir(), self.temporary.mkdir()
        self.output_file, self.summary, self.calls = work_dir / "outputs", work_dir / "summary", work_dir / "calls"
        self.document = yaml.safe_load((self.folder / "action.yml").read_text())
        assert set(inputs) <= set(self.document["inputs"])
        defaults = {name: str(item.get("default", "")) for name, item in self.document["inputs"].items()}
        self.values = {
            **{f"inputs.{name}": value for name, value in {**defaults, **inputs}.items()},
            "github.action_path": str(self.folder), "runner.temp": str(self.temporary),
        }  # fmt: skip
        self._write_programs()

    def run(self) -> list[Step]:
        """The steps that ran, up to the first that fails."""
        steps = []
        for step in self.document["runs"]["steps"]:
            steps.append(Step(step["name"], self._run_step(step)))
            if steps[-1].done.returncode:
                break
            self.values |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in self._outputs().items()}
        return steps

    def output(self, name: str) -> str:
        """An output of the action, as a workflow reads it; empty if the step has not set it."""
        expression = re.fullmatch(r"\$\{\{ *([\w.-]+) *\}\}", self.document["outputs"][name]["value"])
        assert expression is not None
        return self.values.get(expression[1], "")

    def _run_step(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        assert step["shell"] == "bash" and "${{" not in step["run"], "expressions in a script would allow injection"
        environment = cli_environment(self.work_dir / "home")
        environ = {
            **environment, **{name: self._substitute(value) for name, value in step.get("env", {}).items()},
            "PATH": f"{self.programs}:{environment['PATH']}", "GITHUB_OUTPUT": str(self.output_file),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }  # fmt: skip
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]], env=environ, capture_output=True, text=True,
            cwd=self.work_dir, timeout=900,
        )  # fmt: skip

    def _substitute(self, text: str) -> str:
        return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda match: self.values[match[1]], text)

    def _outputs(self) -> dict[str, str]:
        lines = self.output_file.read_text().splitlines() if self.output_file.exists() else []
        return dict(line.split("=", 1) for line in lines)

    def _write_programs(self) -> None:
        refused = self.programs / "locked_python.py"
        refused.write_text(f"REFUSED = set({json.dumps(sorted(_modules_outside_the_lock()))})\n{LOCKED_PYTHON}")
        self._write_program(
            self.programs / "locked",
            f'case "$*" in *"pip install"*) exit 0 ;; esac; exec {sys.executable} {refused} {ROOT} "$@"',
        )
        self._write_program(
            self.programs / "python3",
            'case "$*" in *"pip install"*) exit 0 ;;\n'
            f'"-m venv "*) mkdir -p "$3/bin"; cp {self.programs}/locked "$3/bin/python"; exit 0 ;; esac\n'
            f'exec {sys.executable} "$@"',
        )

    def _write_program(self, path: Path, body: str) -> None:
        path.write_text(f'#!/bin/bash\necho "{path.name} $*" >> {self.calls}\n{body}\n')
        path.chmod(0o755)


@functools.cache
def _modules_outside_the_lock() -> set[str]:
    lock = (ROOT / "scripts/locks/sign.txt").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) | {"tcdeploy"}
    return {
        module
        for module, distributions in packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in distributions} & locked
    }
