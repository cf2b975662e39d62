"""Parses Python source without a garbage collection in the middle."""

from __future__ import annotations

import ast
import gc
import threading

# Reentrant, because an object that is freed during the parsing may parse too.
_LOCK = threading.RLock()


def parse_source(source: str | bytes) -> ast.Module:
    """`ast.parse(source)`, with the garbage collector off. Raises SyntaxError and ValueError.

    Python before 3.11.8 and 3.12.2 keeps the depth of the tree that it builds in a variable of the whole interpreter
    (python/cpython#106905). A finalizer that a collection runs may parse other source, or let another thread do so;
    the interrupted call then fails with "SystemError: AST constructor recursion depth mismatch".
    """
    with _LOCK:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source)
        finally:
            if collects:
                gc.enable()
