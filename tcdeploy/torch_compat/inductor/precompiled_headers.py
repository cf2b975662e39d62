"""Place Inductor's precompiled C++ headers in the cache folder, and switch them off for a warm start.

Inductor prepares the headers in a folder below TMPDIR, 156 MB for each set of compiler options, at every start that
loads a C++ program, hit or miss: 0.4 s, or 12 s on a machine without headers. They halve the time of a cold start, and
have no effect on a warm one. The public setting is part of the cache key and of program names, so a cold start would
have no headers either. In TMPDIR, `cache du` and `cache gc` would not find them. tests/cache/test_compiler.py fails
when torch calls another function.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tcdeploy.torch_compat.internal import find, internal, mentions

CODECACHE = "torch._inductor.codecache"
_original_get_prefix_header: Callable[[str], str | None] | None = None  # Inductor's own


@internal("precompiled headers", "torch._inductor.codecache._get_cpp_prefix_header",
          "a warm start on a CPU prepares C++ headers that it does not use, and writes them below TMPDIR")  # fmt: skip
def supported() -> bool:
    return (
        callable(find(f"{CODECACHE}:_get_cpp_prefix_header"))
        and mentions(find(f"{CODECACHE}:CppCodeCache"), "_get_cpp_prefix_header")
        and mentions(find(f"{CODECACHE}:_precompile_header"), "_HEADER_DIR", "_HEADER_LOCK_DIR")
    )


def use_precompiled_headers(enabled: bool, folder: str | None = None) -> None:
    """Set whether Inductor may prepare headers, and in which folder (None: leave it unchanged).

    Headers that this process has prepared before stay in use.
    """
    global _original_get_prefix_header
    if not supported():
        return
    codecache = find(CODECACHE)
    if folder is not None:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = folder, os.path.join(folder, "locks")
    _original_get_prefix_header = _original_get_prefix_header or codecache._get_cpp_prefix_header
    codecache._get_cpp_prefix_header = _original_get_prefix_header if enabled else _no_header


def _no_header(device: str) -> str | None:
    return None
