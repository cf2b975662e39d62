"""Makes Triton's cache key of a kernel independent of comments, docstrings and the kernel's position in its file.

Triton hashes a kernel's source text and the line it starts on. A reworded comment anywhere above a kernel therefore
compiles it again on the GPU (seconds per kernel), beside a program that Inductor reports as a hit.

`ignore_comments` replaces the text by one that is generated from the syntax tree, and the line by 1. The kernel's code
does not change. Line numbers in Triton's compile errors and in profilers then refer to the generated text. Kernels that
Inductor generates are not affected.

Uses private attributes of `triton.runtime.jit.JITFunction`: `_src`, `raw_src`, `starting_line_number`, `hash` and
`_unsafe_update_src`. tests/torch_compat/test_triton_source.py fails when they move. Without them kernels keep Triton's
own key: after an edit of a comment, `cache why` predicts a hit, and the kernel is compiled again.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, TypeVar

from tcdeploy.host.python_source import parse_source
from tcdeploy.planning.extras import is_installed
from tcdeploy.planning.keys import drop_docstrings
from tcdeploy.torch_compat.internal import internal

KernelT = TypeVar("KernelT")


def ignore_comments(kernel: KernelT) -> KernelT:
    """Decorator, outside `@triton.jit`: computes the kernel's cache key from its code instead of its text.

    Triton's interpreter (TRITON_INTERPRET=1) makes functions of another type, which have no key and are returned as
    they are.
    """
    if is_installed("triton") and supported() and _has_source(kernel):
        _replace_source(kernel)
    return kernel


@internal(
    "kernel sources", "triton.runtime.jit.JITFunction._unsafe_update_src",
    "a changed comment in the source of a Triton kernel compiles the kernel again",
)  # fmt: skip
@functools.cache
def supported() -> bool:
    """Whether Triton keeps a kernel's source where this module expects it."""
    try:
        from triton.runtime.jit import JITFunction

        probe = JITFunction(_probe_kernel)
        if not _has_source(probe):
            return False
        _replace_source(probe)
        return str(probe.src).startswith("def _probe_kernel(") and isinstance(probe.cache_key, str)
    except Exception:  # a private interface may fail in any way; the kernels must still be importable
        return False


def _has_source(kernel: Any) -> bool:
    """Whether it is a JITFunction as Triton 3.6 and 3.7 make it, whose key has not been computed yet."""
    return (
        isinstance(getattr(kernel, "_src", None), str)
        and isinstance(getattr(kernel, "raw_src", None), list)
        and isinstance(getattr(kernel, "starting_line_number", None), int)
        and callable(getattr(kernel, "_unsafe_update_src", None))
        and getattr(kernel, "hash", "") is None
    )


def _replace_source(kernel: Any) -> None:
    source = _normalise(kernel.src)
    kernel._unsafe_update_src(source)
    kernel.raw_src = source.splitlines(keepends=True)
    kernel.starting_line_number = 1


def _normalise(source: str) -> str:
    """The same function without comments, docstring and formatting."""
    tree = parse_source(source)
    drop_docstrings(tree)
    return ast.unparse(tree)


def _probe_kernel(x):  # type: ignore[no-untyped-def]
    """Read by `supported`, never launched."""
    return x
