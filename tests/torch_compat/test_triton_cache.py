"""Triton's own compiler, for a GPU that is not here: does it find again what it made, where the folder has moved?"""

from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.async_compile import AsyncCompile

from tcdeploy.torch_compat.triton_cache import RELOCATABLE_MANAGER
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

found = []
triton.knobs.compilation.listener = lambda **named: found.append((named["cache_hit"], named["metadata_group"]))
signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "block": "constexpr"}
made = triton.compile(ASTSource(double, signature, {"block": 64}), GPUTarget("cuda", 90, 32))
[(is_hit, files)] = found
manager = sys.modules.get("tcdeploy.torch_compat.triton_cache")
print(json.dumps([is_hit, len(made.kernel), sorted(files.values()), manager.kernels_compiled if manager else None]))
"""


BUILD = """
import sys
from tcdeploy.torch_compat.triton_platform_key import patch_platform_key
from triton.runtime.build import compile_module_from_src

if "by machine" in sys.argv:
    patch_platform_key()
source = '#include <Python.h>\\n'
source += 'static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};\\n'
source += 'PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }\\n'
print(compile_module_from_src(source, "launcher").__file__)
"""


POOL = """
import json

from torch._inductor import async_compile
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.runtime import compile_tasks
from tcdeploy.torch_compat.inductor_workers import patch_compile_workers
from tcdeploy.torch_compat.triton_platform_key import patch_platform_key
from triton.runtime import build

from kernel import Loaded

if __name__ == "__main__":
    patch_platform_key()
    patch_compile_workers()
    pool, keys = SubprocPool(1), [build.platform_key()]
    for function in (compile_tasks._worker_compile_triton, async_compile._worker_compile_triton):
        kernel, _ = pool.submit(function, Loaded, {}, {}).result()
        keys.append(kernel.platform_key)
    pool.shutdown()
    print(json.dumps(keys))
"""
LOADED = """
class Loaded:  # as a kernel of Inductor's
    def __init__(self):
        from triton.runtime import build
        self.platform_key = build.platform_key()

    def precompile(self, warm_cache_only): pass

    def prepare_for_pickle(self): pass
"""


def run(folder: Path, program: str, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with Triton's cache in the folder."""
    place = folder.parent / "source"
    place.mkdir(exist_ok=True)
    (place / "kernel.py").write_text(KERNEL + LOADED)
    (place / "main.py").write_text(program)
    known = {name: value for name, value in os.environ.items() if name != "CC"}
    environ = {**known, "PYTHONPATH": PACKAGES, "TRITON_CACHE_DIR": str(folder), **changed}
    command = [sys.executable, str(place / "main.py"), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def compile_in(folder: Path, manager: str = RELOCATABLE_MANAGER) -> tuple[bool, int, list[str]]:
    """Whether Triton found it, the bytes of the kernel, its files. What our manager counts is what Triton says."""
    done = run(folder, COMPILE, TRITON_CACHE_MANAGER=manager)
    assert done.returncode == 0, done.stderr
    was_hit, size, files, counted = json.loads(done.stdout)
    assert counted == (None if manager != RELOCATABLE_MANAGER else int(not was_hit))
    return was_hit, size, files


def test_a_kernel_is_found_where_the_folder_has_moved(tmp_path: Path) -> None:
    was_hit, size, files = compile_in(tmp_path / "here")
    assert not was_hit and size > 500
    assert compile_in(tmp_path / "here") == (True, size, files)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = [path.replace(f"{tmp_path}/here/", f"{tmp_path}/there/") for path in files]
    assert compile_in(tmp_path / "there") == (True, size, moved)


def test_a_pickled_configuration_forgets_that_a_descent_found_it() -> None:
    """When this fails, programs can be read back through Inductor's workers, and `programs.reading` can go."""
    config = triton.Config({"XBLOCK": 4})
    config.found_by_coordesc = True
    assert not hasattr(pickle.loads(pickle.dumps(config)), "found_by_coordesc")


def test_triton_s_own_manager_needs_ours(tmp_path: Path) -> None:
    """When this fails, Triton finds what was moved by itself, and kernel_cache.py can go."""
    stock = "triton.runtime.cache:FileCacheManager"
    compile_in(tmp_path / "here", stock)
    assert compile_in(tmp_path / "here", stock)[0]
    (tmp_path / "here").rename(tmp_path / "there")
    assert not compile_in(tmp_path / "there", stock)[0]


def test_a_list_of_triton_s_own_is_read_too(tmp_path: Path) -> None:
    compile_in(tmp_path / "here", "triton.runtime.cache:FileCacheManager")
    (tmp_path / "here").rename(tmp_path / "there")
    assert compile_in(tmp_path / "there")[0]


def test_no_file_of_a_kernel_tells_where_it_was_compiled(tmp_path: Path) -> None:
    """The binary alone is not the same bytes each time: ptxas writes a random name of its own into it."""
    for name in ("here", "there"):
        compile_in(tmp_path / name)
    here, there = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("here", "there")
    )
    assert {path.name for path in here if here[path] != there[path]} <= {"double.cubin"} and len(here) > 4
    assert not any(str(tmp_path / "here").encode() in content for content in here.values())


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"child_paths": 3}', '{"child_paths": {"gone.cubin": "x"}}'])
def test_a_list_that_cannot_be_read_is_a_miss_and_is_written_anew(tmp_path: Path, broken: str) -> None:
    first = compile_in(tmp_path / "here")
    (listed,) = (tmp_path / "here").rglob("__grp__*.json")
    whole = listed.read_text()
    listed.write_text(broken)
    assert not compile_in(tmp_path / "here")[0]
    assert listed.read_text() == whole and compile_in(tmp_path / "here") == (True, *first[1:])


@pytest.mark.parametrize("kind", ["cubin", "json", "ptx", "ttir", "source"])
def test_a_kernel_without_one_of_its_files_is_compiled_again(tmp_path: Path, kind: str) -> None:
    """Triton asks for the metadata alone, and breaks where the binary is gone."""
    first = compile_in(tmp_path / "here")
    (file,) = (tmp_path / "here").rglob(f"double.{kind}")
    file.unlink()
    assert not compile_in(tmp_path / "here")[0]
    assert compile_in(tmp_path / "here") == (True, *first[1:])


@pytest.fixture
def with_file(tmp_path: Path) -> str:
    """A PATH on which there is a `file` command."""
    command = tmp_path / "bin" / "file"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho ELF 64-bit LSB executable\n")
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


def test_a_library_is_found_without_compiler_and_without_the_file_command(tmp_path: Path, with_file: str) -> None:
    built = run(tmp_path / "here", BUILD, "by machine", PATH=with_file)
    assert built.returncode == 0, built.stderr
    (tmp_path / "here").rename(tmp_path / "there")
    found = run(tmp_path / "there", BUILD, "by machine", PATH=str(tmp_path))
    assert found.stdout == built.stdout.replace("/here/", "/there/"), found.stderr


def test_inductor_s_workers_name_libraries_alike(tmp_path: Path, with_file: str) -> None:
    done = run(tmp_path / "here", POOL, PATH=with_file)
    assert done.returncode == 0, done.stderr
    here, alone, ours = json.loads(done.stdout)
    assert here == ours == f"{platform.machine()},{platform.system()}"
    assert "ELF" in alone, "torch's own function names them as we do: `compile_in_worker` can go"
    assert "_worker_compile_triton" in AsyncCompile.triton.__code__.co_names, "torch calls it by another name"


def test_triton_alone_does_not_find_it(tmp_path: Path, with_file: str) -> None:
    """When this fails, `patch_platform_key` can go."""
    assert run(tmp_path / "here", BUILD, PATH=with_file).returncode == 0
    alone = run(tmp_path / "here", BUILD, PATH=str(tmp_path))
    assert alone.returncode == 1 and "C compiler" in alone.stderr
