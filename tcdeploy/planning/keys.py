"""The parts of a cache key that cover tcdeploy's own code. Does not import torch.

A key holds what changes programs or tokens, and nothing else. Source files therefore enter it as syntax trees without
docstrings, comments and positions (about 0.2 s for 90 files): with a hash of their bytes, a reworded comment would
recompile every program. The release number does not enter at all. Code that no hashed file covers is represented by
CACHE_EPOCH, which is raised by hand.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tcdeploy.host.python_source import parse_source

# Raise by one with every change that alters programs or tokens without altering a hashed source
# (programs/passes/post_grad.py lists them), a setting of torch or a shape. Examples: a region is traced in another way,
# weights are packed in another layout, sampling draws other random numbers.
CACHE_EPOCH = 3

DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """The digest of each file, by its path relative to `root`, in sorted order. Raises OSError and SyntaxError."""
    return {path.relative_to(root).as_posix(): _digest(path.read_bytes()) for path in sorted(paths)}


@functools.cache
def _digest(source: bytes) -> str:
    return hashlib.sha256(describe_code(parse_source(source)).encode()).hexdigest()


def describe_code(node: ast.AST) -> str:
    """The text of `ast.dump` in Python 3.11 and 3.12 after `drop_docstrings`, in less than half of its time."""
    kind, parts = type(node), []
    for name, is_optional in _fields(kind):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(node, name)
        if isinstance(value, ast.AST):
            text = describe_code(value)
        elif isinstance(value, list):
            if name == "body" and kind in DOCUMENTED_NODES and value and _is_docstring(value[0]):
                value = value[1:]
            items = [describe_code(item) if isinstance(item, ast.AST) else repr(item) for item in value]
            text = f"[{', '.join(items)}]"
        elif value is None and is_optional:
            continue
        else:
            text = repr(value)
        parts.append(f"{name}={text}")
    return f"{kind.__name__}({', '.join(parts)})"


@functools.cache
def _fields(kind: type[ast.AST]) -> tuple[tuple[str, bool], ...]:
    """The field names of a class of nodes, each with whether `ast.dump` omits the field if it is None."""
    return tuple((name, getattr(kind, name, ...) is None) for name in kind._fields)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def combined_digest(digests: Mapping[str, str]) -> str:
    """One sha256, in hex, over the names and digests of several files."""
    text = "".join(f"{path} {digest}\n" for path, digest in digests.items())
    return hashlib.sha256(text.encode()).hexdigest()


def drop_docstrings(tree: ast.AST) -> None:
    """Remove the docstrings of a module, class or function, and of all that are defined in it, in place.

    The body of a function that holds nothing else is empty afterwards.
    """
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED_NODES) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
