"""Packages are compiled by the same commands as torch's, in threads, and without a copy of its runtime."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from torch._inductor import codecache, cpp_builder, package
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import IndentedBuffer

from tcdeploy.torch_compat.inductor import package_builds


def compile_and_package(folder: Path, code: str) -> None:
    """As torch compiles a package: compile, link, delete the object file, and write the archive."""
    source = folder / "program.kernel.cpp"
    source.write_text(code)
    compile_only = cpp_builder.CppOptions(compile_only=True)
    builder = cpp_builder.CppBuilder("program.kernel", [str(source)], compile_only, str(folder))
    builder.build()
    link = cpp_builder.CppBuilder("program", [builder.get_target_file_path()], cpp_builder.CppOptions(), str(folder))
    link.build()
    os.remove(builder.get_target_file_path())
    package.package_aoti(str(folder / "program.pt2"), [link.get_target_file_path()])


def test_a_package_is_compiled_after_its_code_was_generated(tmp_path: Path) -> None:
    before = cpp_builder.CppBuilder.build, package.package_aoti, codecache.AotCodeCompiler.compile
    is_written: list[bool] = []

    def generate() -> None:
        compile_and_package(tmp_path, 'extern "C" int answer() { return 42; }')
        is_written.append((tmp_path / "program.pt2").exists() or (tmp_path / "program.so").exists())

    package_builds.start_build(generate).result()
    assert is_written == [False]
    assert ctypes.CDLL(str(tmp_path / "program.so")).answer() == 42
    assert (tmp_path / "program.pt2").is_file() and not list(tmp_path.glob("*.o"))
    assert before == (cpp_builder.CppBuilder.build, package.package_aoti, codecache.AotCodeCompiler.compile)


def test_a_compilation_that_fails_raises_torchs_error(tmp_path: Path) -> None:
    future = package_builds.start_build(lambda: compile_and_package(tmp_path, "this is not C++"))
    with pytest.raises(CppCompileError):
        future.result()
    assert not (tmp_path / "program.pt2").exists()


def test_the_runtime_is_found_in_the_code_that_torch_generates() -> None:
    code = IndentedBuffer()
    code.splice("#include <torch/csrc/inductor/aoti_include/cpu.h>")
    code.splice((Path(codecache.__file__).parent / package_builds.RUNTIME).read_text())
    code.splice("// the program")
    program, runtime = package_builds._split(code.getvaluewithlinemap().value)
    assert "AOTInductorModelContainerCreate(" in runtime and "AOTInductorModelContainerCreate(" not in program
    assert runtime.startswith("#include <torch/") and program.startswith("#include <torch/")
    assert "// the program" in program and "// the program" not in runtime
    assert package_builds._split("// other code") == ("// other code", "")
