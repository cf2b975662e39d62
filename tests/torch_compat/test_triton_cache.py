"""Triton finds compiled kernels and libraries in a moved cache folder. Compiles for a GPU that need not be present."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tcdeploy.torch_compat.triton.cache import RELOCATABLE_MANAGER
from tcdeploy.torch_compat.triton.intermediate_code import INTERMEDIATE_CODE
from tests.conftest import PACKAGES

triton = pytest.importorskip("triton")

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double(source, target, count, block: tl.constexpr):
    places = tl.arange(0, block)
    tl.store(target + places, 2 * tl.load(source + places, places < count), places < count)
"""
COMPILE = """
import json, os, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernel import double

events = []
triton.knobs.compilation.listener = lambda **event: events.append((event["cache_hit"], event["metadata_group"]))
signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "block": "constexpr"}
compilations, counted = [], 0
for folder in sys.argv[1:]:
    os.environ["TRITON_CACHE_DIR"] = folder
    compiled = triton.compile(ASTSource(double, signature, {"block": 64}), GPUTarget("cuda", 90, 32))
    is_hit, files = events.pop()
    manager = sys.modules.get("tcdeploy.torch_compat.triton.cache")
    before, counted = counted, manager.kernels_compiled if manager else None
    compilations.append([is_hit, len(compiled.kernel), sorted(files.values()), counted - before if manager else None])
print(json.dumps(compilations))
"""


BUILD = """
import sys
from tcdeploy.torch_compat.triton.platform_key import patch_platform_key
from triton.runtime.build import compile_module_from_src

if "patched" in sys.argv:
    patch_platform_key()
source = '#include <Python.h>\\n'
source += 'static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};\\n'
source += 'PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }\\n'
print(compile_module_from_src(source, "launcher").__file__)
"""


def run(folder: Path, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a new process, with Triton's cache in the folder."""
    source_dir = folder.parent / "source"
    source_dir.mkdir(exist_ok=True)
    (source_dir / "kernel.py").write_text(KERNEL)
    (source_dir / "main.py").write_text(program)
    inherited = {name: value for name, value in os.environ.items() if name != "CC"}
    environ = {**inherited, "PYTHONPATH": PACKAGES, "TRITON_CACHE_DIR": str(folder), **variables}
    command = [sys.executable, str(source_dir / "main.py"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


class Compilation(NamedTuple):
    was_hit: bool
    size: int  # bytes of the kernel
    files: list[str]


def compile_in(folder: Path, manager: str = RELOCATABLE_MANAGER) -> Compilation:
    """Compile in a new process."""
    [compilation] = compile_in_each([folder], manager)
    return compilation


def compile_in_each(folders: Sequence[Path], manager: str = RELOCATABLE_MANAGER) -> list[Compilation]:
    """Compile in each folder, in one new process. Our manager's counts must agree with Triton's events."""
    result = run(folders[0], COMPILE, *map(str, folders), TRITON_CACHE_MANAGER=manager)
    assert result.returncode == 0, result.stderr
    compilations = []
    for was_hit, size, files, counted in json.loads(result.stdout):
        assert counted == (None if manager != RELOCATABLE_MANAGER else int(not was_hit))
        compilations.append(Compilation(was_hit, size, files))
    return compilations


def test_a_kernel_is_found_after_the_folder_has_moved(tmp_path: Path) -> None:
    was_hit, size, files = compile_in(tmp_path / "here")
    assert not was_hit and size > 500
    assert compile_in(tmp_path / "here") == (True, size, files)  # in another process
    (tmp_path / "here").rename(tmp_path / "there")
    moved_files = [path.replace(f"{tmp_path}/here/", f"{tmp_path}/there/") for path in files]
    assert compile_in(tmp_path / "there") == (True, size, moved_files)


def test_pickling_a_config_drops_the_mark_of_coordinate_descent() -> None:
    """If this fails, Inductor's workers can load cached programs: delete torch_compat/dynamo/compile_threads.py."""
    config = triton.Config({"XBLOCK": 4})
    config.found_by_coordesc = True
    assert not hasattr(pickle.loads(pickle.dumps(config)), "found_by_coordesc")


def test_triton_s_own_manager_misses_in_a_moved_folder(tmp_path: Path) -> None:
    """If this fails, Triton's cache is relocatable, and torch_compat/triton/cache.py can be deleted."""
    stock = "triton.runtime.cache:FileCacheManager"
    assert [compilation.was_hit for compilation in compile_in_each([tmp_path / "here"] * 2, stock)] == [False, True]
    (tmp_path / "here").rename(tmp_path / "there")
    assert not compile_in(tmp_path / "there", stock).was_hit


def test_a_list_that_triton_s_own_manager_wrote_is_read(tmp_path: Path) -> None:
    compile_in(tmp_path / "here", "triton.runtime.cache:FileCacheManager")
    (tmp_path / "here").rename(tmp_path / "there")
    assert compile_in(tmp_path / "there").was_hit


def test_no_file_of_a_kernel_contains_the_folder_s_path(tmp_path: Path) -> None:
    """Only the binary differs between two compilations: ptxas writes a random name into it."""
    compile_in_each([tmp_path / "here", tmp_path / "there"])
    here, there = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("here", "there")
    )
    assert {path.name for path in here if here[path] != there[path]} <= {"double.cubin"} and len(here) > 4
    assert not any(str(tmp_path / "here").encode() in content for content in here.values())


BROKEN_LISTS = ("", "[]", "{}", '{"child_paths": 3}', '{"child_paths": {"gone.cubin": "x"}}')
FILES = ("cubin", "json", "ptx", *(suffix[1:] for suffix in INTERMEDIATE_CODE))


class Damaged(NamedTuple):
    folder: Path
    first: Compilation
    second: Compilation
    third: Compilation


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Damaged]:
    """For each case: compile the kernel into a folder of its own, damage one file, and compile twice more."""
    base = tmp_path_factory.mktemp("damaged")
    folders = {name: base / str(i) for i, name in enumerate((*BROKEN_LISTS, *FILES))}
    first = compile_in_each(list(folders.values()))
    for name, folder in folders.items():
        kind = f"double.{name}" if name in FILES else "__grp__*.json"
        (file,) = folder.rglob(kind)
        file.rename(base / f"{folder.name}.original")
        if name in BROKEN_LISTS:
            file.write_text(name)
    again = compile_in_each([folder for folder in folders.values() for _ in range(2)])
    rows = zip(folders.values(), first, again[::2], again[1::2], strict=True)
    return {name: Damaged(*row) for name, row in zip(folders, rows, strict=True)}


@pytest.mark.parametrize("broken", BROKEN_LISTS)
def test_an_unreadable_list_is_a_miss_and_is_rewritten(damaged: dict[str, Damaged], broken: str) -> None:
    folder, first, second, third = damaged[broken]
    (list_file,) = folder.rglob("__grp__*.json")
    original = folder.with_suffix(".original").read_text()
    assert not first.was_hit and not second.was_hit
    assert list_file.read_text() == original and third == (True, *first[1:])


@pytest.mark.parametrize("kind", FILES[:3])
def test_a_kernel_with_a_missing_file_is_compiled_again(damaged: dict[str, Damaged], kind: str) -> None:
    """Triton checks the metadata only, and fails if the binary is missing."""
    _, first, second, third = damaged[kind]
    assert not first.was_hit and not second.was_hit
    assert third == (True, *first[1:])


@pytest.mark.parametrize("kind", FILES[3:])
def test_a_kernel_without_intermediate_code_is_a_hit(damaged: dict[str, Damaged], kind: str) -> None:
    _, first, second, third = damaged[kind]
    assert not first.was_hit and second.was_hit and second == third and second.size == first.size


@pytest.fixture
def with_file(tmp_path: Path) -> str:
    """A PATH that has a `file` command."""
    command = tmp_path / "bin" / "file"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho ELF 64-bit LSB executable\n")
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


def test_a_library_is_found_without_compiler_and_without_the_file_command(tmp_path: Path, with_file: str) -> None:
    built = run(tmp_path / "here", BUILD, "patched", PATH=with_file)
    assert built.returncode == 0, built.stderr
    (tmp_path / "here").rename(tmp_path / "there")
    moved = run(tmp_path / "there", BUILD, "patched", PATH=str(tmp_path))
    assert moved.stdout == built.stdout.replace("/here/", "/there/"), moved.stderr


def test_without_the_patch_triton_does_not_find_a_library(tmp_path: Path, with_file: str) -> None:
    """If this fails, torch_compat/triton/platform_key.py can be deleted."""
    assert run(tmp_path / "here", BUILD, PATH=with_file).returncode == 0
    result = run(tmp_path / "here", BUILD, PATH=str(tmp_path))
    assert result.returncode == 1 and "C compiler" in result.stderr
