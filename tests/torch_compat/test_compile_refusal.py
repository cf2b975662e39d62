"""Within `refusing`, neither Inductor nor the C++ compiler nor Triton compiles, and what is in a cache still runs."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpu_vec_isa

from tcdeploy.cache.files import usage
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.dynamo.compile_refusal import CompilationRefused, refusing
from tcdeploy.torch_compat.inductor.custom_graph_pass import import_compiler
from tcdeploy.torch_compat.inductor.vector_tests import FUNCTION_SUFFIX

import_compiler()  # as a start with jit programs does


def test_inductor_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that this process has is still called, and the next block compiles again."""
    lowered: list[str] = []
    monkeypatch.setattr(
        "torch._inductor.graph.GraphLowering.run", lambda *_: lowered.append("") or pytest.fail("Inductor compiles")
    )
    compiled = torch.compile(lambda value: value * 3 + 1, fullgraph=True)
    with refusing(), pytest.raises(CompilationRefused, match="a program"):
        compiled(torch.ones(4))
    assert lowered == []
    compile_refusal.check("anything")


def test_the_cpp_compiler_is_refused_before_it_runs(tmp_path: Path) -> None:
    source, library, elsewhere = tmp_path / "a.cpp", tmp_path / "cache" / "a.so", tmp_path / "b.so"
    source.write_text("int f() { return 1; }\n")
    library.parent.mkdir()
    command = ["g++", "-shared", "-fPIC", str(source), "-o"]
    with FileAccessTracker(library.parent).track():
        with refusing(), pytest.raises(CompilationRefused, match="C\\+\\+ library"):
            subprocess.run([*command, str(library)], check=True)
        assert not library.exists()
        with refusing():  # another program's library, or a query of the compiler's version
            subprocess.run([*command, str(elsewhere)], check=True)
        subprocess.run([*command, str(library)], check=True)
    assert library.exists() and elsewhere.exists()


def test_a_test_of_vector_extensions_is_neither_refused_nor_counted_as_a_program(tmp_path: Path) -> None:
    """On a CPU with AMX, Inductor runs some that are among the files of no plan."""
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text('extern "C" int __amx_chk_kernel() { return 1; }\n')
    with FileAccessTracker(tmp_path).track(), refusing():
        counted = usage.libraries_compiled
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert library.exists() and usage.libraries_compiled == counted


def test_all_tests_of_vector_extensions_are_recognised() -> None:
    codes = [
        code
        for extension in vars(cpu_vec_isa).values()
        if isinstance(extension, type) and issubclass(extension, cpu_vec_isa.VecISA)
        for code in vars(extension).values()
        if isinstance(code, str) and 'extern "C"' in code
    ]
    assert len(codes) >= 4 and all(FUNCTION_SUFFIX.decode() in code for code in codes)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_that_is_not_in_tritons_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tcdeploy.torch_compat.triton.cache import RelocatableCacheManager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cached: Any = RelocatableCacheManager("0" * 64)
    cached.put_group("kernel.json", {"kernel.cubin": cached.put(b"code", "kernel.cubin")})
    cached.put(b"code", "launcher.so")
    with refusing():
        assert set(cached.get_group("kernel.json")) == {"kernel.cubin"}
        assert cached.get_file("launcher.so") and cached.get_file("other.txt") is None
        with pytest.raises(CompilationRefused, match="kernel.ttir of Triton"):
            cached.put(b"code", "kernel.ttir")
        with pytest.raises(CompilationRefused, match="the Triton kernel other"):
            cached.get_group("other.json")
        with pytest.raises(CompilationRefused, match=r"other\.so"):
            cached.get_file("other.so")
    assert cached.get_group("other.json") is None and cached.get_file("other.so") is None
