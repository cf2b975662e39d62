"""`--no-compile`: a start uses what the cache folder holds, and fails at the first program that it does not hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.prepare import check_eager_start
from tests.conftest import PACKAGE_FLAGS, TINY, TINY_FLAGS, RunCLI


@pytest.fixture
def compiler_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which a g++ that is first on PATH appends the arguments of each call that writes a file."""
    calls, compiler = tmp_path / "calls", tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder).name != "compilers"]
    original = shutil.which("g++", path=os.pathsep.join(folders))  # tests/compilers/g++ would call this one again
    # Inductor's tests of CPU vector extensions are no programs.
    record = f'grep -qs _chk_kernel "$1" || echo "$*" >>{calls}'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) {record};; esac\nexec {original} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(compiler.parent), *folders]))
    return calls


def test_a_start_that_hits_is_as_without_the_flag(tmp_path: Path, filled_cache: Path, run_cli: RunCLI) -> None:
    folder = shutil.copytree(filled_cache, tmp_path / "cache")
    warm = ("warm", TINY, *TINY_FLAGS, "--cache-dir", str(folder), "--no-compile")
    done = run_cli(*warm, "--require-hit")
    assert done.returncode == 0 and "4 of 4 buckets were cache hits" in done.stdout, done.stderr
    packed = run_cli("cache", "pack", str(folder), "-o", str(tmp_path / "tiny.tcb"))
    assert packed.returncode == 0, packed.stderr


@pytest.mark.parametrize(
    ("flags", "missed"),
    [
        (("--buckets", "32,128", "--batch-sizes", "1,3"), "decode:3"),  # the others are in the cache
        pytest.param(
            ("--buckets", "32", "--batch-sizes", "1", "--dtype", "bfloat16"), "prefill:32", marks=pytest.mark.long
        ),
        (("--buckets", "32", "--batch-sizes", "1", "--programs", "aot"), "prefill:32"),
    ],
)
def test_the_first_miss_ends_the_start_and_nothing_is_compiled(
    tmp_path: Path, filled_cache: Path, run_cli: RunCLI, compiler_calls: Path, flags: tuple[str, ...], missed: str
) -> None:
    folder = Path(shutil.copytree(filled_cache, tmp_path / "cache"))
    manifests = sorted((folder / "manifests").iterdir())
    done = run_cli("warm", TINY, *flags, "--cache-dir", str(folder), "--require-hit", "--no-compile")
    assert done.returncode == 6, done.stderr
    assert f"error: {missed} needs a program that is not in the cache folder {folder}" in done.stderr
    assert f"tcdeploy cache why {folder} {TINY}" in done.stderr
    assert not compiler_calls.exists(), compiler_calls.read_text()
    assert sorted((folder / "manifests").iterdir()) == manifests


def test_an_empty_folder_is_refused_before_the_model_is_loaded(tmp_path: Path, run_cli: RunCLI) -> None:
    done = run_cli("generate", TINY, "hello", "--cache-dir", str(tmp_path / "cache"), "--no-compile")
    assert done.returncode == 6 and "needs a program that is not in the cache folder" in done.stderr, done.stderr
    assert "reference ..." not in done.stderr


def test_a_library_that_is_missing_is_not_compiled(
    tmp_path: Path, filled_cache: Path, run_cli: RunCLI, compiler_calls: Path
) -> None:
    """Inductor would find the graph in its cache, and compile the libraries of its kernels."""
    folder = Path(shutil.copytree(filled_cache, tmp_path / "cache"))
    for library in folder.glob("*/*.so"):
        library.unlink()
    # Another plan than the damaged one.
    flags = ("--buckets", "32,128", "--batch-sizes", "1", "--cache-dir", str(folder))
    done = run_cli("warm", TINY, *flags, "--no-compile")
    assert done.returncode == 6 and "error: prefill:128 needs a" in done.stderr, done.stderr
    assert not compiler_calls.exists(), compiler_calls.read_text()


def test_packages_start_without_compiling(tmp_path: Path, filled_packages: Path, run_cli: RunCLI) -> None:
    folder = shutil.copytree(filled_packages, tmp_path / "cache")
    done = run_cli("warm", TINY, *PACKAGE_FLAGS, "--cache-dir", str(folder), "--no-compile", "--require-hit")
    assert done.returncode == 0, done.stderr


def test_an_eager_start_excludes_it() -> None:
    recipe = build_recipe({"model": TINY, "compile": False}, environ={})
    with pytest.raises(UsageError, match="--no-compile"):
        check_eager_start(recipe)
