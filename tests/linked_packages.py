"""Virtual environments without pip: packages are links to those of the tests, as far as requirements name them."""

from __future__ import annotations

import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import ROOT


def create_environment(folder: Path, *extras: str) -> None:
    """A virtual environment with this package, and what it and its extras declare as their requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(text for extra in extras for text in project["optional-dependencies"][extra]),
    ]
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for required in find_required(declared):
        names = {file.parts[0] for file in required.files or ()} - {"..", "__pycache__"}
        for name in names:
            if not name.endswith(".pth"):
                (packages / name).symlink_to(required.locate_file(name))  # type: ignore[arg-type]
    (packages / "tcdeploy").symlink_to(ROOT / "tcdeploy")
    program = folder / "bin/tcdeploy"
    program.write_text('#!/bin/sh\nexec "${0%/*}/python" -m tcdeploy "$@"\n')
    program.chmod(0o755)


def find_required(declared: list[str]) -> list[Distribution]:
    """The installed packages that these requirements need, directly or through others."""
    waiting = [(Requirement(text), "") for text in declared]  # with the extra of the package that requires it
    done: set[tuple[str, str]] = set()
    found: dict[str, Distribution] = {}
    while waiting:
        requirement, condition = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": condition}):
            continue
        package = distribution(requirement.name)
        found[package.name] = package
        for extra in {"", *requirement.extras} - {extra for name, extra in done if name == package.name}:
            done.add((package.name, extra))
            waiting += [(Requirement(text), extra) for text in package.requires or ()]
    return list(found.values())
