"""Refuses compilation by Inductor, the C++ compiler and Triton in this process, for `--no-compile`.

torch has no public setting for it. Rejected: the stance fail_on_recompile, which refuses every program that Dynamo has
not traced, because a warm start must trace a program to find it in the cache. Instead, the function that Inductor calls
after a miss is patched. cache/files/usage.py refuses commands of the C++ compiler, and torch_compat/triton/cache.py
kernels that are missing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from tcdeploy.torch_compat.internal import find, find_code, internal, is_imported, mentions

COMPILE_FX = "torch._inductor.compile_fx"
FUNCTION = "fx_codegen_and_compile"

_is_refusing = False


class CompilationRefused(BaseException):  # noqa: N818 - not an Exception: torch would catch it, and try another way
    """`what`: what would have been compiled."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@internal("compile refusal", f"{COMPILE_FX}.{FUNCTION}", "--no-compile cannot be used")
def supported() -> bool:
    """Whether Inductor has this function, and calls it by its global name."""
    is_called = mentions(find_code(f"{COMPILE_FX}:_compile_fx_inner"), FUNCTION)
    return is_called and find_code(f"{COMPILE_FX}:{FUNCTION}") is not None


def check(what: str) -> None:
    """Call this before compiling `what`. Raises CompilationRefused within `refusing`."""
    if _is_refusing:
        raise CompilationRefused(what)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise CompilationRefused in place of each compilation of this process.

    If Inductor is not imported yet, as in a start from packages, it is not patched.
    """
    global _is_refusing
    if is_imported(COMPILE_FX):
        _patch_inductor()
    previous, _is_refusing = _is_refusing, True
    try:
        yield
    finally:
        _is_refusing = previous


@functools.cache
def _patch_inductor() -> None:
    compile_fx = find(COMPILE_FX)
    original = getattr(compile_fx, FUNCTION)

    @functools.wraps(original)
    def compile_unless_refused(*args: Any, **kwargs: Any) -> Any:
        check("a program")
        return original(*args, **kwargs)

    setattr(compile_fx, FUNCTION, compile_unless_refused)
