"""The questions that Inductor puts to the C++ compiler at a warm start.

The answers are part of the names of compiled CPU programs. cache/toolchain.py stores them, and a stand-in for g++
repeats them on a machine without a compiler. A query that is not listed here fails there, so a warm start without a
compiler is lost when torch adds one. tests/cache/test_toolchain.py compares the list with what a warm start runs.
"""

from __future__ import annotations

from tcdeploy.torch_compat.internal import Internal, find, mentions

COMPILER_QUERIES = ("--version", "-v", "-dumpfullversion -dumpversion")
BUILDER = "torch._inductor.cpp_builder"


def supported() -> bool:
    """Whether the functions that ask are where they were, and ask the same."""
    return (
        mentions(find(f"{BUILDER}:get_compiler_version_info"), "-v", "--version")
        and mentions(find(f"{BUILDER}:_is_apple_clang"), "--version")
        and callable(find(f"{BUILDER}:get_cpp_compiler"))
    )


INTERNAL = Internal(
    "C++ compiler queries",
    "torch",
    "torch._inductor.cpp_builder.get_compiler_version_info",
    "a warm start on a CPU machine without a C++ compiler may fail",
    supported,
)
