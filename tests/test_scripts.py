"""The scripts that people run: what they print is what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_check_prints_every_file_and_the_longest_functions() -> None:
    out = subprocess.run(
        [sys.executable, ROOT / "scripts" / "check"], capture_output=True, text=True, check=True
    ).stdout
    for path in (ROOT / "tcdeploy").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").count("\n")
        assert re.search(rf"^ *{lines}  {path.relative_to(ROOT)}$", out, re.MULTILINE), path
    assert re.search(r"^\d+ lines in \d+ files; \d+ functions, median \d+ lines", out, re.MULTILINE)
    functions = re.findall(r"^ *(\d+)  \S+\.py:\d+ \w+$", out, re.MULTILINE)
    assert len(functions) == 15 and functions == sorted(functions, key=int, reverse=True)


def test_the_readme_leads_from_prepare_to_a_token() -> None:
    """Every file of the reading order is there, and prepare() comes first."""
    order = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("## Reading the code")[2]
        .partition("`scripts/check`")[0]
    )
    named = re.findall(r"`((?:tcdeploy/)?(?:\w+/)?\w+\.py)`", order)
    assert named[0] == "tcdeploy/pipeline.py" and "prepare()" in order.splitlines()[4]
    known = {path.name for path in (ROOT / "tcdeploy").rglob("*.py")}
    assert len(named) >= 20
    assert {Path(name).name for name in named} <= known


def test_the_console_script_of_the_readme_is_declared() -> None:
    assert 'tcdeploy = "tcdeploy.cli.app:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
