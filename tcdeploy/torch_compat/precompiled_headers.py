"""Switch Inductor's precompiled C++ headers off for a warm start.

Inductor prepares the headers in a folder of its own, outside the cache, at every start that loads a C++ program, hit
or miss: 0.4 s, or 12 s on a machine that has none yet. They halve a cold start and do nothing for a warm one. The
public setting cannot be used, because it is part of the cache key and of program names, so a cold start would have to
do without headers too. The patch replaces the function that names the header by one that returns None.

Without it, a warm start prepares headers. tests/cache/test_toolchain.py fails when torch calls another function.
"""

from __future__ import annotations

from collections.abc import Callable

from tcdeploy.torch_compat.internal import Internal, find, mentions

CODECACHE = "torch._inductor.codecache"
_original_get_prefix_header: Callable[[str], str | None] | None = None  # Inductor's own


def supported() -> bool:
    return callable(find(f"{CODECACHE}:_get_cpp_prefix_header")) and mentions(
        find(f"{CODECACHE}:CppCodeCache"), "_get_cpp_prefix_header"
    )


INTERNAL = Internal(
    "precompiled headers",
    "torch",
    "codecache._get_cpp_prefix_header",
    "a warm start on a CPU prepares C++ headers that it does not use",
    supported,
)


def use_precompiled_headers(enabled: bool) -> None:
    """Set whether Inductor may prepare headers. Without headers, compiling a C++ kernel takes twice as long."""
    global _original_get_prefix_header
    if not supported():
        return
    codecache = find(CODECACHE)
    _original_get_prefix_header = _original_get_prefix_header or codecache._get_cpp_prefix_header
    codecache._get_cpp_prefix_header = _original_get_prefix_header if enabled else _no_header


def _no_header(device: str) -> str | None:
    return None
