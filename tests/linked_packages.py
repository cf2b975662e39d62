"""Virtual environments without pip: packages are links to those of the tests, as far as requirements name them."""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import ROOT


def create_environment(folder: Path, *extras: str, packages: tuple[str, ...] = ()) -> None:
    """A virtual environment with this package, what it and its extras declare as requirements, and `packages`."""
    venv.create(folder, symlinks=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    for path in (*paths_to_link(extras, packages), ROOT / "tcdeploy"):
        (site_packages / path.name).symlink_to(path)
    program = folder / "bin/tcdeploy"
    program.write_text('#!/bin/sh\nexec "${0%/*}/python" -m tcdeploy "$@"\n')
    program.chmod(0o755)


@functools.cache
def paths_to_link(extras: tuple[str, ...], more: tuple[str, ...]) -> tuple[Path, ...]:
    """The files and folders in site-packages of all packages that pyproject.toml requires, and of `more`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = itertools.chain(*(project["optional-dependencies"][extra] for extra in extras))
    paths = set[Path]()
    for package in find_required([*project["dependencies"], *optional, *more]):
        names = {re.split("[/,]", line)[0] for line in (package.read_text("RECORD") or "").splitlines()}
        paths |= {Path(str(package.locate_file(name))) for name in names - {"", "..", "__pycache__"}}
    return tuple(path for path in paths if path.suffix != ".pth")


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
