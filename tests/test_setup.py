"""scripts/setup and scripts/quickstart with programs that only record their arguments, in a copy of the scripts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT

HAS_NVIDIA_DRIVER = os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None
INSTALL = "-c scripts/constraints.txt -e .[compile,serve,structured"
RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n'


class Scripts:
    """A copy of the scripts, whose environment has the given settings of pip. uv exits with `uv_status`."""

    def __init__(self, folder: Path, settings: str = "", uv_status: int = 0) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.environ = {"PATH": f"{folder}/programs:{os.environ['PATH']}", "CALLS": str(self.calls), "HEARTBEAT_S": "9"}
        (folder / "scripts").mkdir()
        for name in ("setup", "quickstart", "heartbeat"):
            shutil.copy(ROOT / "scripts" / name, folder / "scripts")
        pip = f"case \"$*\" in *config*) cat <<'END'\n{settings}\nEND\nesac\n"
        self._write(
            "programs/uv", f'{RECORD}case "$*" in *--help) echo --system-certs; exit;; esac\nexit {uv_status}\n'
        )
        self._write(".venv/bin/python", RECORD + pip)
        self._write(".venv/bin/tcdeploy", RECORD)

    def _write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """stderr and stdout are one text, in order."""
        done = subprocess.run(
            [self.folder / "scripts" / command[0], *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=self.environ, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done

    def installs(self, program: str) -> list[str]:
        calls = self.calls.read_text().splitlines()
        return [call for call in calls if call.startswith(program) and " install " in call and "--help" not in call]


def test_setup_passes_the_indexes_of_pip_to_uv_and_installs_what_structured_output_needs(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, settings=":env:.find-links='/opt/wheels'\nglobal.extra-index-url='file:///a file:///b'")
    scripts.run("setup", "s3")
    [call] = scripts.installs("uv")
    assert "--index file:///a --index file:///b --find-links /opt/wheels" in call
    assert call.endswith(f"{INSTALL},s3]") and "--torch-backend" not in call
    assert scripts.installs("python") == []


def test_setup_takes_the_cpu_build_of_torch_where_no_driver_is(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    scripts.run("setup")
    [call] = scripts.installs("uv")
    assert ("--torch-backend cpu" in call) != HAS_NVIDIA_DRIVER
    assert call.endswith(f"{INSTALL}]")


def test_setup_installs_with_pip_if_uv_fails(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, uv_status=2)
    shown = scripts.run("setup").stdout
    [call] = scripts.installs("python")
    assert call.endswith(f"install {INSTALL}]") and " -q" not in call, "pip shows its progress"
    assert "setup: uv failed, so pip installs the packages" in shown


def test_a_heartbeat_ends_with_its_command_and_has_its_status(tmp_path: Path) -> None:
    command = [ROOT / "scripts/heartbeat", "name", "bash", "-c", "echo out; sleep 0.5; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HEARTBEAT_S": "0.1"})
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert re.fullmatch(r"(    name: \d s \.\.\.\n){2,}", done.stderr)


def test_quickstart_numbers_its_steps_and_ends_with_the_next_commands(tmp_path: Path) -> None:
    from tcdeploy.cli.app import app

    scripts = Scripts(tmp_path)
    shown = scripts.run("quickstart").stdout
    assert shown.splitlines()[1] == "[1/5] $ scripts/setup", "before anything is installed"
    assert [int(number) for number in re.findall(r"^\[(\d)/5\] took \d+ s$", shown, re.MULTILINE)] == [1, 2, 3, 4, 5]
    assert shown.index("They do not show the speed of a GPU") < shown.index("$ tcdeploy warm")
    assert [line for line in shown.splitlines() if len(line) > 80 and not line.startswith("[")] == []
    last = shown.partition("Next:")[2]
    order = ["source .venv/bin/activate", "tcdeploy serve --recipe tiny", "curl ", "GPU", "tcdeploy warm Qwen"]
    assert sorted(order, key=last.index) == order
    for line in [*re.findall(r"\$ (tcdeploy .*)", shown), *re.findall(r"^ +(tcdeploy .*)", last, re.MULTILINE)]:
        parsed = CliRunner().invoke(app, [*shlex.split(line)[1:], "--help"])  # fails for an unknown option
        assert parsed.exit_code == 0, (line, parsed.output)


@pytest.mark.parametrize("text", ["pip install tcdeploy", "pip install 'tcdeploy[serve]'", "the tcdeploy[serve] extra"])
def test_a_command_that_would_fetch_from_pypi_is_found(text: str) -> None:
    assert FROM_PYPI.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'tcdeploy[serve] @ git+https://git.example/tcdeploy'", "pip install -e '/path/tcdeploy[serve]'",
        "bin/pip install tcdeploy-1.0-py3-none-any.whl", "pip install -e . && tcdeploy serve", "pip install ./tcdeploy",
    ],
)  # fmt: skip
def test_a_command_that_installs_from_elsewhere_is_not_found(text: str) -> None:
    assert not FROM_PYPI.search(text)


# The name as a requirement, with or without extras, and neither a part of a path nor followed by an address.
INSTALL_COMMAND = r"\b(?:pip3?|pipx|uv|uv tool) (?:install|add) (?:-\S+ )*"
FROM_PYPI = re.compile(
    rf"""(?<![\w./-])tcdeploy\[[^\]\n]+\](?! @)|{INSTALL_COMMAND}['"]?tcdeploy['"]?(?![\w./\[-]| @)"""
)
EXCEPT = {"tests/test_setup.py"}


def test_no_file_installs_tcdeploy_from_pypi() -> None:
    """The project has no package on PyPI, so the name may belong to another one."""
    folders = ("tcdeploy", "docs", "scripts", "recipes", "tests", ".github")
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(errors="ignore") for path in files if is_text(path)}
    assert len(texts) > 500
    found = {name: FROM_PYPI.findall(text) for name, text in texts.items() if name not in EXCEPT}
    assert {name: commands for name, commands in found.items() if commands} == {}


def is_text(path: Path) -> bool:
    return "__pycache__" not in path.parts and path.suffix not in (".safetensors", ".pyc", ".png")
