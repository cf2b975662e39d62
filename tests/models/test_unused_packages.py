"""Starts import transformers without packages that are not needed, and leave these to other code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tcdeploy.models import unused_packages
from tcdeploy.models.unused_packages import PACKAGES
from tcdeploy.torch_compat.transformers import fast_import as transformers_import
from tests.conftest import cli_environment

SCRIPT = """
import importlib, json, sys
from tcdeploy.models.unused_packages import enable_fast_transformers_import
if {skips}:
    enable_fast_transformers_import()
for name in sys.argv[2:]:
    importlib.import_module(name)
imported = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
import scipy.optimize
from transformers.utils import is_scipy_available
print(json.dumps([*imported, is_scipy_available()]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a scipy that has every name."""
    for name in ("scipy", "scipy/optimize"):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("def __getattr__(name): return object()\n")
    information = tmp_path / "packages" / "scipy-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: scipy\nVersion: 1.0\n")
    environ = cli_environment(tmp_path)
    environ["PYTHONPATH"] = f"{tmp_path / 'packages'}:{environ.get('PYTHONPATH', Path(__file__).parents[2])}"
    return environ


def imported_packages(environment: dict[str, str], *modules: str, skips: bool = True) -> list[str | bool]:
    """The packages that the modules import; at the end, whether transformers finds scipy afterwards."""
    command = [sys.executable, "-c", SCRIPT.format(skips=skips), json.dumps(PACKAGES), *modules]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names: list[str | bool] = json.loads(result.stdout)
    return names


def test_a_start_does_not_import_packages_for_other_uses_of_transformers(environment: dict[str, str]) -> None:
    assert imported_packages(environment, "tcdeploy.start.model_code") == [False]


@pytest.mark.long  # why the packages are hidden; if it fails, transformers no longer imports them
def test_transformers_alone_imports_such_a_package(environment: dict[str, str]) -> None:
    assert imported_packages(environment, "transformers.loss.loss_utils") == ["scipy", True]


@pytest.mark.long  # a process of its own; the last test covers the switch
def test_a_program_that_uses_the_library_is_not_affected(environment: dict[str, str]) -> None:
    assert imported_packages(environment, "tcdeploy.start.model_code", skips=False)[-1] is True


@pytest.mark.long  # a process of its own
def test_a_package_that_is_in_use_stays_imported(environment: dict[str, str]) -> None:
    assert imported_packages(environment, "scipy", "tcdeploy.start.model_code") == ["scipy", True]


@pytest.mark.parametrize("skips", [True, False])
def test_only_the_command_line_imports_transformers_with_fewer_reads(
    skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(transformers_import, "import_with_fewer_reads", lambda: calls.append("import"))
    monkeypatch.setattr(unused_packages, "IMPORTERS", ())
    monkeypatch.setattr(unused_packages, "_is_fast_import_enabled", skips)
    unused_packages.import_transformers()
    assert calls == ["import"] * skips
