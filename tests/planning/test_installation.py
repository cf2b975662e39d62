"""The command that installs an extra, by the origin that pip or uv has recorded."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.planning import installation
from tcdeploy.planning.installation import install_command
from tests.conftest import ROOT

COMMIT = "3f2c8d1e" * 5
METADATA = """Metadata-Version: 2.4
Name: tcdeploy
Version: 1.0
Requires-Dist: torch>=2.11
Provides-Extra: serve
Requires-Dist: starlette>=0.41; extra == 'serve'
Requires-Dist: uvicorn<1,>=0.34; extra == 'serve'
Requires-Dist: uvloop>=0.21; (sys_platform != 'win32') and extra == 'serve'
Provides-Extra: server
Requires-Dist: other; extra == 'server'
"""
PACKAGES = "'starlette>=0.41' 'uvicorn<1,>=0.34' 'uvloop>=0.21; (sys_platform != '\"'\"'win32'\"'\"')'"


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in which `pip` is that of this process."""
    monkeypatch.setattr(shutil, "which", lambda name: f"{sys.prefix}/bin/{name}")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activated: None) -> Any:
    """Records an installation of tcdeploy with this direct_url.json."""

    def record(direct_url: str | None) -> None:
        folder = tmp_path / "tcdeploy-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA)
        if direct_url is not None:
            (folder / "direct_url.json").write_text(direct_url)
        distribution = importlib.metadata.PathDistribution(folder)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)

    return record


def git(**more: str) -> dict[str, Any]:
    vcs_info = {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT}
    return {"url": "https://git.example/tcdeploy", "vcs_info": vcs_info, **more}


@pytest.mark.parametrize(
    ("origin", "packages"),
    [
        ({"url": "file://{0}/my%20checkout", "dir_info": {"editable": True}}, "-e '{0}/my checkout[serve]'"),
        ({"url": "file://{0}/my%20checkout", "dir_info": {}}, "'{0}/my checkout[serve]'"),
        ({"url": "file://{0}/tcdeploy-1.0.whl", "archive_info": {}}, "'{0}/tcdeploy-1.0.whl[serve]'"),
        (git(), f"'tcdeploy[serve] @ git+https://git.example/tcdeploy@{COMMIT}'"),
        (git(subdirectory="python"),
         f"'tcdeploy[serve] @ git+https://git.example/tcdeploy@{COMMIT}#subdirectory=python'"),
        ({"url": "https://files.example/tcdeploy-1.0.whl", "archive_info": {}},
         "'tcdeploy[serve] @ https://files.example/tcdeploy-1.0.whl'"),
    ],
    ids=["editable", "folder", "wheel", "git", "git-subdirectory", "url"],
)  # fmt: skip
def test_an_extra_is_installed_from_the_origin_of_the_installation(
    install: Any, tmp_path: Path, origin: dict[str, Any], packages: str
) -> None:
    (tmp_path / "my checkout").mkdir()
    (tmp_path / "tcdeploy-1.0.whl").touch()
    install(json.dumps(origin).replace("{0}", str(tmp_path)))
    assert install_command("serve") == f"pip install {packages.replace('{0}', str(tmp_path))}"


@pytest.mark.parametrize(
    "direct_url",
    [None, "", "{", "[]", '{"url": "file:///gone/tcdeploy-1.0.whl", "archive_info": {}}'],
    ids=["index", "empty", "damaged", "list", "deleted-wheel"],
)
def test_without_an_origin_the_packages_of_the_extra_are_named(install: Any, direct_url: str | None) -> None:
    install(direct_url)
    assert install_command("serve") == f"pip install {PACKAGES}"


def test_a_checkout_that_is_not_installed_is_installed(activated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    assert install_command("otel") == f"pip install -e '{ROOT}[otel]'"
    monkeypatch.setattr(installation, "CHECKOUT", Path("/nowhere"))
    assert "the extra otel" in install_command("otel")


def test_the_pip_of_another_environment_is_not_used(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/elsewhere/bin/{name}")
    assert install_command("serve") == f"{sys.executable} -m pip install {PACKAGES}"
    # As in an environment that uv has made
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda name, path=None, target=None: None)
    assert install_command("serve") == f"uv pip install --python {sys.executable} {PACKAGES}"


def test_a_program_can_be_compiled_after_the_command_was_named() -> None:
    """setuptools, which Inductor imports, has an import hook that must not be asked for pip (Python before 3.12)."""
    script = (
        "from tcdeploy.planning.installation import install_command; print(install_command('serve')); import setuptools"
    )
    environment = {**os.environ, "PATH": os.defpath, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "-m pip install" in done.stdout
