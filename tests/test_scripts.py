"""The scripts that people run: what they print is what the README says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

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


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("bench-serve", ("COMMON_FLAGS", "FULL_BUCKETS")),
        ("bench-serve", ("COMMON_FLAGS", "BUCKETS_2048")),
        ("bench-serve", ("COMMON_FLAGS", "BUCKETS_512")),
        ("bench-speed", ("LARGE",)),
        ("bench-speed", ("SMALL",)),
    ],
)
def test_what_a_benchmark_asks_of_a_gpu_is_a_plan(script: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Flags that contradict each other are found here, and not by whoever has paid for the GPU."""
    from tcdeploy.cli.app import app

    config = json.loads((ROOT / "scripts/configs/llama-3.1-8b/config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | small))
    flags = [flag for part in parts for flag in getattr(loaded(script), part)]
    words = ["compile", str(tmp_path), "--load-format", "dummy", *flags, "--dry-run"]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output


def loaded(script: str) -> ModuleType:
    loader = SourceFileLoader(script.replace("-", "_"), str(ROOT / "scripts" / script))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
