"""The command that adds an extra to this installation of tcdeploy. Imports no other package.

tcdeploy is not on PyPI: there, pip would fail or install another project's package. An extra is therefore installed
from where tcdeploy itself came from. pip and uv record that in `direct_url.json` (PEP 610): a folder, editable or not,
a revision of a Git repository, or an archive. If the origin is gone or not recorded, the command names the packages of
the extra instead.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "tcdeploy"
CHECKOUT = Path(__file__).resolve().parents[2]  # if this is not an installed copy


def install_command(extra: str) -> str:
    """The shell command, for the environment of this process."""
    try:
        distribution = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:  # tcdeploy is only on sys.path
        if not (CHECKOUT / "pyproject.toml").is_file():
            return f"install the packages of the extra {extra}, which tcdeploy's pyproject.toml lists"
        return f"{_pip_install()} {_editable(str(CHECKOUT), extra)}"
    packages = _from_origin(_origin(distribution), extra) or shlex.join(_packages(distribution, extra))
    return f"{_pip_install()} {packages}"


def _origin(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """The content of direct_url.json; empty without the file, as after an installation from an index."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) else {}


def _from_origin(origin: dict[str, Any], extra: str) -> str:
    """Empty if the origin is not known, or no longer on this machine."""
    url, subfolder = str(origin.get("url", "")), origin.get("subdirectory")
    fragment = f"#subdirectory={subfolder}" if subfolder else ""
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if path and not os.path.exists(path):
        return ""
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
        return shlex.quote(f"{NAME}[{extra}] @ {source}{fragment}")
    if path and not subfolder:
        is_editable = origin.get("dir_info", {}).get("editable")
        return _editable(path, extra) if is_editable else shlex.quote(f"{path}[{extra}]")
    return shlex.quote(f"{NAME}[{extra}] @ {url}{fragment}") if url else ""


def _editable(folder: str, extra: str) -> str:
    return f"-e {shlex.quote(f'{folder}[{extra}]')}"


def _packages(distribution: importlib.metadata.Distribution, extra: str) -> list[str]:
    """The requirements of an extra, without the marker that names it."""
    marker = re.compile(rf"""\s*;\s*(?:(.+)\s+and\s+)?extra\s*==\s*['"]{extra}['"]$""")
    found = ((marker.search(item), item) for item in distribution.requires or ())
    return [marker.sub(f"; {match[1]}" if match[1] else "", item) for match, item in found if match]


def _pip_install() -> str:
    """`pip install`, if the shell's pip installs into the environment of this process."""
    pip = shutil.which("pip")
    if pip is not None and os.path.dirname(os.path.realpath(os.path.dirname(pip))) == os.path.realpath(sys.prefix):
        return "pip install"
    # importlib.util.find_spec would also ask the import hook of setuptools. Asked for pip, the hook no longer replaces
    # distutils (Python before 3.12), so that Inductor cannot import setuptools in this process.
    if importlib.machinery.PathFinder.find_spec("pip") is not None:
        return f"{shlex.quote(sys.executable)} -m pip install"
    return f"uv pip install --python {shlex.quote(sys.executable)}"
