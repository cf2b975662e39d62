"""A C++ compiler that links libstdc++ statically is refused before it compiles a package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tcdeploy.cache.folder.layout import AOT_DIR
from tcdeploy.errors import CompileError
from tcdeploy.programs import cxx_runtime
from tests.conftest import TINY, RunCLI

FLAGS = ("--buckets", "32", "--batch-sizes", "4", "--programs", "aot")


def make_compiler(folder: Path, script: str) -> str:
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


@pytest.fixture
def static_compiler(tmp_path: Path) -> str:
    return make_compiler(tmp_path, 'exec g++ -static-libstdc++ "$@"')


def test_the_systems_compiler_is_accepted() -> None:
    assert shutil.which("g++"), "the other tests need it too"
    assert not cxx_runtime.probe_compiler("g++").links_runtime_statically
    cxx_runtime.check_cxx_runtime()


def test_a_compiler_that_links_its_runtime_statically_is_refused(
    static_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cxx_runtime, "cpp_compiler", lambda: static_compiler)
    with pytest.raises(CompileError, match=f"{static_compiler} links libstdc\\+\\+ statically") as error:
        cxx_runtime.check_cxx_runtime()
    assert "set CXX to a compiler" in error.value.hint


def test_a_compiler_that_fails_is_left_to_torchs_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for script in ("exit 1", "echo broken >&2; kill -9 $$"):
        assert not cxx_runtime.probe_compiler(make_compiler(tmp_path, script)).links_runtime_statically
    monkeypatch.setattr(cxx_runtime, "cpp_compiler", lambda: "")
    cxx_runtime.check_cxx_runtime()


def test_a_start_with_such_a_compiler_ends_before_the_first_package(
    static_compiler: str, tmp_path: Path, run_cli: RunCLI
) -> None:
    failed = run_cli("warm", TINY, *FLAGS, "--cache-dir", str(tmp_path / "cache"), new=True, CXX=static_compiler)
    assert failed.returncode == 1, failed.stdout
    assert f"error: the C++ compiler {static_compiler} links libstdc++ statically" in failed.stderr
    assert "hint: set CXX to a compiler" in failed.stderr and "Traceback" not in failed.stderr
    assert not list((tmp_path / "cache").glob(f"**/{AOT_DIR}/*/*.pt2"))
