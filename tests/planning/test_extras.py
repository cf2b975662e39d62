"""Missing extras are errors that name the package, the purpose and the command that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tcdeploy.errors import UsageError
from tcdeploy.planning import extras
from tcdeploy.planning.extras import EXTRA_MODULES, require_compile_extra, require_extra
from tcdeploy.planning.installation import install_command
from tests.conftest import ROOT, TINY, cli_environment

OPTIONAL = {"uvloop"}  # the server runs without it
SCRIPT = """
from tcdeploy.planning import extras

extras.is_installed = lambda name: name != "starlette"
from tcdeploy.cli.app import main

main()
"""


def test_the_modules_of_an_extra_are_those_of_its_packages() -> None:
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRA_MODULES.items():
        packages = {re.sub("-", "_", Requirement(item).name) for item in optional[extra]}
        assert packages - OPTIONAL == {module.replace(".", "_") for module in modules}, extra


def test_a_module_in_a_package_that_is_missing_is_not_installed() -> None:
    assert extras.is_installed("opentelemetry.sdk") and not extras.is_installed("no_such_package.part")


def test_installed_extras_are_accepted() -> None:
    require_extra("serve", "serve a model")
    require_compile_extra()


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ("serve", "starlette"),
        ("compile", "transformers"),
        ("otel", "opentelemetry.sdk"),
        ("structured", "llguidance"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    extra: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != missing)
    with pytest.raises(UsageError) as error:
        require_extra(extra, "test this")
    assert error.value.message == f"{missing} is not installed, and it is needed to test this"
    assert error.value.hint == install_command(extra)


@pytest.mark.parametrize("arguments", [("serve", TINY), ("bench", "serve")], ids=" ".join)
def test_commands_of_the_server_name_the_extra_before_they_import_it(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    failed = subprocess.run(command, capture_output=True, text=True, env=cli_environment(tmp_path))
    assert failed.returncode == 2, failed.stderr
    assert "error: starlette is not installed, and it is needed to s" in failed.stderr
    assert re.search(r"\nhint: .*install .*\[serve\]'?\n\Z", failed.stderr), failed.stderr
