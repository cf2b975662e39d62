"""The C++ compiler queries that Inductor runs at a warm start.

Their output is part of the names of compiled CPU programs. record/toolchain.py stores it, and a stub of g++ replays it
on a machine without a compiler, and fails for other queries. tests/cache/test_toolchain.py compares this list with what
a warm start runs.
"""

from __future__ import annotations

from tcdeploy.torch_compat.internal import find, internal, mentions

COMPILER_QUERIES = ("--version", "-v", "-dumpfullversion -dumpversion")
BUILDER = "torch._inductor.cpp_builder"


@internal("C++ compiler queries", "torch._inductor.cpp_builder.get_compiler_version_info",
          "a warm start on a CPU machine without a C++ compiler may fail")  # fmt: skip
def supported() -> bool:
    """Whether torch's functions that run the queries still exist and run these."""
    return (
        mentions(find(f"{BUILDER}:get_compiler_version_info"), "-v", "--version")
        and mentions(find(f"{BUILDER}:_is_apple_clang"), "--version")
        and callable(find(f"{BUILDER}:get_cpp_compiler"))
    )


def cpp_compiler() -> str:
    """The C++ compiler that Inductor calls: CXX, or "g++". "" if it is missing, or if torch has no such function."""
    get_cpp_compiler = find(f"{BUILDER}:get_cpp_compiler")
    try:
        return str(get_cpp_compiler()) if callable(get_cpp_compiler) else ""
    except RuntimeError:  # torch's InvalidCxxCompiler; torch raises it again when it compiles
        return ""
