"""The C++ compiler in warm starts: which queries it gets, and what a start without it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tests.conftest import TINY, RunCLI, remove_headers

pytestmark = pytest.mark.usefixtures("with_instruction_probes")
QUERIES = {"--version", "-v", "-dumpfullversion -dumpversion"}


def recipe_arguments(cache: Path, prefill: str = "16") -> list[str]:
    return [TINY, "--buckets", prefill, "--batch-sizes", "1", "--cache-dir", str(cache)]


def warm(cache: Path, *more: str, prefill: str = "16") -> list[str]:
    return ["warm", *recipe_arguments(cache, prefill), "--programs", "jit", "--json", *more]


def outcomes(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [record["outcome"] for record in json.loads(result.stdout)["buckets"]]


@pytest.fixture(scope="module")
def logging_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a g++ that logs its arguments and then runs the real compiler; and the log.

    It runs as `g++` and with the original PATH: both are in the output of `g++ -v`, and so in the names of programs.
    """
    real = shutil.which("g++")
    if real is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("logging")
    log, script = folder / "log", folder / "g++"
    path = os.environ["PATH"]
    script.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$*\" >> '{log}'\nPATH='{path}' exec -a g++ '{real}' \"$@\"\n")
    script.chmod(0o755)
    return folder, log


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory, logging_compiler: tuple[Path, Path], run_cli_in: RunCLI) -> Path:
    """A folder that a cold start filled with the logging compiler, and that a warm start has used."""
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("filled") / "cache"
    folder, log = logging_compiler
    cold = run_cli_in(home, *warm(cache), PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert outcomes(cold) == ["miss", "miss"]
    assert [line for line in log.read_text().splitlines() if " -o " in line], "the log holds its compilations"
    after_cold = manifest_of(cache)
    assert not after_cold.was_warm
    second = run_cli_in(home, *warm(cache))
    assert outcomes(second) == ["hit", "hit"]
    assert manifest_of(cache).was_warm
    assert set(manifest_of(cache).files) <= set(after_cold.files), "the cold start knew which files a start needs"
    remove_headers(cache)
    return cache


def manifest_of(cache: Path) -> Manifest:
    [path] = (cache / "manifests").glob("*.json")
    manifest = read_manifest(path)
    assert manifest is not None
    return manifest


@pytest.fixture
def listed_files_only(warmed: Path, tmp_path: Path) -> Path:
    """A copy of the manifest and the files that it lists, without any other file."""
    cache = tmp_path / "deep" / "er" / "cache"
    for name in [file.path for file in manifest_of(warmed).files] + ["manifests/" + manifest_name(warmed)]:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(warmed / name, cache / name)
    return cache


def manifest_name(cache: Path) -> str:
    [path] = (cache / "manifests").glob("*.json")
    return path.name


@pytest.fixture
def empty_path(tmp_path: Path) -> str:
    """A PATH without programs."""
    (tmp_path / "nothing").mkdir()
    return str(tmp_path / "nothing")


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_listed_files_are_enough_for_hits(run_cli: Any, listed_files_only: Path, tmp_path: Path) -> None:
    """In another process and folder, with another HOME and working directory."""
    before = files_in(listed_files_only)
    assert before == {file.path for file in manifest_of(listed_files_only).files} | {
        f"manifests/{manifest_name(listed_files_only)}"
    }
    (tmp_path / "tmp").mkdir()
    command = warm(listed_files_only, "--require-hit")
    result = run_cli(*command, cwd=str(tmp_path / "tmp"), TMPDIR=str(tmp_path / "tmp"))
    assert outcomes(result) == ["hit", "hit"]
    new = files_in(listed_files_only) - before
    assert {name.partition("/")[0] for name in new} <= {"locks", "leases", ".lock"}, "no missing file was made again"
    assert f"leases/{Path(manifest_name(listed_files_only)).stem}" in new
    assert manifest_of(listed_files_only).was_warm
    assert [file.path for file in manifest_of(listed_files_only).files] == sorted(
        before - {f"manifests/{manifest_name(listed_files_only)}"}
    )


@pytest.mark.parametrize("is_warm", [False, True])
def test_without_a_compiler_the_error_names_it_and_the_packages_that_need_none(
    run_cli: Any, listed_files_only: Path, empty_path: str, tmp_path: Path, is_warm: bool
) -> None:
    cache = listed_files_only if is_warm else tmp_path / "cache"
    result = run_cli(*warm(cache), PATH=empty_path)
    assert result.returncode == 1
    assert "there is no C++ compiler" in result.stderr and "hint: install g++" in result.stderr
    assert "--programs aot" in result.stderr and "Traceback" not in result.stderr
    if is_warm:
        assert outcomes(run_cli(*warm(cache, "--require-hit"))) == ["hit", "hit"], "the cache is intact"


def test_a_warm_start_queries_the_compiler_and_compiles_nothing(
    run_cli: Any, listed_files_only: Path, logging_compiler: tuple[Path, Path], tmp_path: Path
) -> None:
    """TMPDIR is empty, so a precompiled header would be compiled if it were needed."""
    folder, log = logging_compiler
    log.write_text("")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    (tmp_path / "tmp").mkdir()
    result = run_cli(*warm(listed_files_only, "--require-hit"), PATH=path, TMPDIR=str(tmp_path / "tmp"))
    assert outcomes(result) == ["hit", "hit"]
    assert "--version" in log.read_text()
    assert set(log.read_text().splitlines()) <= QUERIES


def test_inductor_s_own_headers_are_back_after_a_warm_start() -> None:
    """The patched function of torch must be the one that Inductor calls, and is restored."""
    from torch._inductor import codecache

    from tcdeploy.torch_compat.inductor.precompiled_headers import use_precompiled_headers

    use_precompiled_headers(True)
    own = codecache._get_cpp_prefix_header
    assert own("cpu") == "torch/csrc/inductor/cpp_prefix.h"
    use_precompiled_headers(False)
    use_precompiled_headers(False)
    assert codecache._get_cpp_prefix_header("cpu") is None
    use_precompiled_headers(True)
    assert codecache._get_cpp_prefix_header is own
