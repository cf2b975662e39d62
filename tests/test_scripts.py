"""Claims of the documentation about the repository, and the flags with which the benchmark scripts run."""

from __future__ import annotations

import json
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent


def test_the_python_files_that_the_documentation_names_exist() -> None:
    """Except templates (with NAME) and files marked as `(new)`. A name may be relative to tcdeploy/."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pattern = re.compile(r"`((?:\w+/)*(?!\w*NAME)\w+\.py)`(?! \(new\))")
    named = {name for page in pages for name in pattern.findall(page.read_text(encoding="utf-8"))}
    assert len(named) >= 30
    missing = [name for name in sorted(named) if not any((ROOT / base / name).is_file() for base in ("", "tcdeploy"))]
    assert missing == []


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
def test_the_flags_of_a_gpu_benchmark_make_a_plan(script: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Finds contradicting flags without a GPU."""
    from tcdeploy.cli.app import app

    config = json.loads((ROOT / "scripts/configs/llama-3.1-8b/config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | small))
    flags = [flag for part in parts for flag in getattr(load_script(script), part)]
    arguments = ["compile", str(tmp_path), "--load-format", "dummy", *flags, "--dry-run"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def load_script(script: str) -> ModuleType:
    loader = SourceFileLoader(script.replace("-", "_"), str(ROOT / "scripts" / script))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
