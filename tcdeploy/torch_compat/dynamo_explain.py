"""List the graph breaks of a function by `torch._dynamo.explain`, which has no public equivalent up to torch 2.13.

Without it, `--explain-breaks` is an error that says so; all other commands are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcdeploy.errors import CompileError
from tcdeploy.torch_compat.internal import Internal, find

EXPLAIN = "torch._dynamo:explain"


def supported() -> bool:
    return callable(find(EXPLAIN))


INTERNAL = Internal(
    "graph break report", "torch", "torch._dynamo.explain", "--explain-breaks is not available", supported
)


def break_reasons(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """torch's records of the breaks, with `reason` and `user_stack`. Raises CompileError if torch has no explain."""
    if not supported():
        raise CompileError(
            "this version of torch has no torch._dynamo.explain", "leave out --explain-breaks, or install torch 2.13"
        )
    return list(find(EXPLAIN)(function)(*args, **kwargs).break_reasons)
