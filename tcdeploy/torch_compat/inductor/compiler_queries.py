"""The C++ compiler that Inductor calls."""

from __future__ import annotations

from tcdeploy.torch_compat.internal import find, internal

BUILDER = "torch._inductor.cpp_builder"


@internal(
    "C++ compiler queries", "torch._inductor.cpp_builder.get_cpp_compiler",
    "a C++ compiler whose packages cannot be loaded is not refused before the first package is compiled",
)  # fmt: skip
def supported() -> bool:
    return callable(find(f"{BUILDER}:get_cpp_compiler"))


def cpp_compiler() -> str:
    """The C++ compiler that Inductor calls: CXX, or "g++". "" if it is missing, or if torch has no such function."""
    get_cpp_compiler = find(f"{BUILDER}:get_cpp_compiler")
    try:
        return str(get_cpp_compiler()) if callable(get_cpp_compiler) else ""
    except RuntimeError:  # torch's InvalidCxxCompiler; torch raises it again when it compiles
        return ""
