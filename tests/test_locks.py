"""The locks in scripts/locks agree with pyproject.toml, with each other and with the list of licences. No registry."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.test_scripts import load_script

LOCKS = sorted((ROOT / "scripts/locks").glob("*.txt"))
LICENSES = ROOT / "docs/licenses.md"
# Reviewed. A new licence, such as GPL-3.0, is added here on purpose or not at all.
ACCEPTED_LICENSES = {
    "0BSD", "Apache 2.0", "Apache 2.0 License", "Apache Software License", "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception", "BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC License", "LicenseRef-NVIDIA-Proprietary", "MIT", "MIT License", "MIT-0", "MPL-2.0",
    "NVIDIA Proprietary Software", "PSF-2.0", "Zlib",
}  # fmt: skip


def pins(path: Path) -> dict[str, set[str]]:
    """Versions by package name. A package may have another version for another Python."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-zA-Z0-9._-]+)==([^\s;]+)", path.read_text(), re.MULTILINE):
        versions.setdefault(normalized(name), set()).add(version)
    return versions


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def license_rows() -> dict[tuple[str, str], str]:
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([0-9]\S*) \| (.+) \|$", LICENSES.read_text(), re.MULTILINE)
    return {(name, version): license for name, version, license in rows}


def requirements_of(extras: Iterable[str], optional: dict[str, list[str]]) -> Iterator[Requirement]:
    """The packages of extras. An extra may name other extras of this package."""
    for item in map(Requirement, (text for extra in extras for text in optional[extra])):
        if item.name == "tcdeploy":
            yield from requirements_of(sorted(item.extras), optional)
        else:
            yield item


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_line_of_a_lock_is_an_exact_version_with_hashes(lock: Path) -> None:
    blocks = re.split(r"\n(?=[a-z0-9])", re.sub(r"^ *#.*\n?", "", lock.read_text(), flags=re.MULTILINE))
    entry = re.compile(r"[a-z0-9-]+==\S+( ;[^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\s*")
    assert len(blocks) > (1 if lock.stem == "cuda-headers" else 20)
    assert not [block for block in blocks if not entry.fullmatch(block)]
    assert not re.search(r"://|index-url|find-links|/tmp", lock.read_text()), "a lock names no registry and no folder"


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("runtime", ("compile", "serve", "s3", "oci", "structured")),
        ("serve", ("serve", "s3", "oci", "structured")),
        ("dev", ("dev",)),
    ],
    ids=["runtime", "serve", "dev"],
)
def test_the_locks_satisfy_the_lower_bounds_of_the_package(lock: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*map(Requirement, project["dependencies"]), *requirements_of(extras, optional)]
    locked = pins(ROOT / f"scripts/locks/{lock}.txt")
    for item in wanted:
        if (lock, item.name) != ("dev", "torch"):
            assert all(item.specifier.contains(version) for version in locked[normalized(item.name)]), item.name


def test_the_lock_of_the_image_that_only_serves_leaves_transformers_out() -> None:
    runtime, serving = pins(ROOT / "scripts/locks/runtime.txt"), pins(ROOT / "scripts/locks/serve.txt")
    assert "transformers" in runtime and "transformers" not in serving
    assert serving.keys() < runtime.keys(), "docs/licenses.md lists the packages of runtime.txt"


def test_the_lock_of_ci_leaves_torch_out_so_that_a_build_for_the_cpu_can_be_selected() -> None:
    assert not [name for name in pins(ROOT / "scripts/locks/dev.txt") if re.match(r"torch$|nvidia-|cuda-", name)]


def test_the_headers_of_cuda_are_those_of_the_locked_pytorch() -> None:
    """A build for the GPU of another machine includes them. Only CUDA builds of PyTorch depend on one of them."""
    runtime, headers = pins(ROOT / "scripts/locks/runtime.txt"), pins(ROOT / "scripts/locks/cuda-headers.txt")
    assert headers.keys() == {"nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-runtime"}
    assert headers.keys() & runtime.keys() == {"nvidia-cuda-runtime"}
    versions = {".".join(version.split(".")[:2]) for found in headers.values() for version in found}
    assert versions == {".".join(version.split(".")[:2]) for version in runtime["nvidia-cuda-runtime"]}


def test_all_locks_and_the_constraints_name_the_same_versions() -> None:
    runtime, constraints = pins(ROOT / "scripts/locks/runtime.txt"), pins(ROOT / "scripts/constraints.txt")
    for lock in LOCKS:
        for name, versions in pins(lock).items():
            assert versions == constraints.get(name, versions), f"{name} in {lock.name}: run scripts/lock"
            assert versions <= runtime.get(name, versions), f"{name} in {lock.name}: run scripts/lock"


def test_the_licences_of_all_locked_runtime_packages_are_listed_and_accepted() -> None:
    script = load_script("write-licenses")
    lock = ROOT / "scripts/locks/runtime.txt"
    expected = {pin for python in script.PYTHONS for pin in script.read_lock(lock, python)}
    rows = license_rows()
    assert {f"{name}=={version}" for name, version in rows} == expected, "run scripts/write-licenses"
    parts = {
        part
        for license in rows.values()
        for part in re.split(r" (?:AND|OR) ", license.replace("(", "").replace(")", ""))
    }
    assert parts - {"not declared"} <= ACCEPTED_LICENSES
    assert {name for (name, _), license in rows.items() if license == "not declared"} == {
        "cuda-toolkit"
    }  # has no files


def test_the_listed_licences_are_those_that_the_installed_packages_declare() -> None:
    script = load_script("write-licenses")
    compared = 0
    for (name, version), license in license_rows().items():
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # CUDA's libraries on a machine without a GPU
        if metadata["Version"].split("+")[0] == version and "+" not in metadata["Version"]:
            fields = {"license_expression": metadata["License-Expression"], "license": metadata["License"]}
            assert script.declared_license({**fields, "classifier": metadata.get_all("Classifier", [])}) == license, (
                name
            )
            compared += 1
    assert compared >= 50
