"""Refuses a C++ compiler whose ahead-of-time packages cannot be loaded.

A compiler may be configured to link libstdc++ statically. Then each package has a copy of it beside the one of torch,
and the two copies conflict: with torch 2.11 on an H100 machine, std::regex crashed the process; with torch 2.13 on a
CPU, loading failed without an error message. Programs of torch.compile are not affected.

The check links a library that needs a C++ runtime (libstdc++, or LLVM's libc++) and looks for its name in it, which
takes less than 0.1 s.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tcdeploy.errors import CompileError
from tcdeploy.torch_compat.inductor.compiler_queries import cpp_compiler

PROBE = 'extern "C" void probe() { throw 1; }\n'  # needs the C++ runtime, and no header
# In the table of strings, where the names of needed libraries are.
RUNTIME_NAMES = (b"\0libstdc++.so.", b"\0libc++.so.", b"\0libc++abi.so.")
PROBE_SECONDS = 60


def check_cxx_runtime() -> None:
    """Raise CompileError if Inductor's C++ compiler links libstdc++ statically. One that fails is left to torch."""
    compiler = cpp_compiler()
    if compiler and _probe_once(compiler).links_runtime_statically:
        raise CompileError(
            f"the C++ compiler {compiler} links libstdc++ statically, so the packages that it builds cannot be loaded",
            "set CXX to a compiler that links it dynamically, for example CXX=/usr/bin/g++, or use --programs jit",
        )


class CompilerProbe(NamedTuple):
    """failure: why the compiler could not link the probe; "" if it could."""

    failure: str
    links_runtime_statically: bool = False


def probe_compiler(compiler: str) -> CompilerProbe:
    """Link the probe with `compiler`. Raises OSError if there is no writable temporary folder, or no such program."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(PROBE)
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            linked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            return CompilerProbe(f"it did not finish within {PROBE_SECONDS} s")
        if linked.returncode:
            lines = linked.stderr.strip().splitlines() or [f"it exited with status {linked.returncode}"]
            return CompilerProbe(next((line for line in lines if "error" in line), lines[0]))
        return CompilerProbe("", not any(name in library.read_bytes() for name in RUNTIME_NAMES))


_probe_once = functools.cache(probe_compiler)  # for each package
