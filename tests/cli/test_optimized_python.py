"""The CLI under `python -O`, which removes assertions, and `python -OO`, which removes docstrings too."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tcdeploy.host.python_source import parse_source
from tcdeploy.planning.keys import source_digests
from tests.conftest import PACKAGES, ROOT

SOURCES = sorted(path for path in (ROOT / "tcdeploy").rglob("*.py"))
# Functions that an assertion may call: they change nothing.
PURE_CALLS = {
    "all",
    "blocks_for",
    "count_symbolic",
    "id",
    "is_contiguous",
    "is_expert_parallel",
    "is_fusable",
    "is_summable",
    "items",
    "isdisjoint",
    "isinstance",
    "keys",
    "len",
    "list",
}
PURE_CALLS |= {"_is_fusable", "is_supported", "range", "set", "sorted", "stride", "tuple", "values"}


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": PACKAGES, "COLUMNS": "100", **environ},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "text"),
    [((), "Exit codes: 0 success"), (("warm",), "Safe to repeat and to run in parallel.")],
)
def test_help_is_complete_without_docstrings(command: tuple[str, ...], text: str) -> None:
    result = run("-OO", "-m", "tcdeploy", *command, "--help")
    assert result.returncode == 0 and text in result.stdout, result.stderr


def test_a_model_without_docstrings_is_refused_before_torch_is_imported() -> None:
    result = run("-X", "importtime", "-m", "tcdeploy", "warm", "builtin:tiny", "--dry-run", PYTHONOPTIMIZE="2")
    lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 2
    assert lines[0].startswith("error: Python runs with optimization level 2 (-OO or PYTHONOPTIMIZE), which removes")
    assert lines[1] == "hint: use PYTHONOPTIMIZE=1 or -O, which removes only assertions" and len(lines) == 2
    assert not any(line.endswith("| torch") for line in result.stderr.splitlines())


def test_cache_keys_do_not_depend_on_the_optimization_level() -> None:
    code = (
        "import json, pathlib, sys; from tcdeploy.planning.keys import source_digests\n"
        "print(json.dumps(source_digests(pathlib.Path(sys.argv[1]), map(pathlib.Path, sys.argv[2:]))))"
    )
    result = run("-OO", "-c", code, str(ROOT), *map(str, SOURCES))
    assert json.loads(result.stdout) == source_digests(ROOT, SOURCES)


def test_no_assertion_has_an_effect_that_is_lost_without_it() -> None:
    effects = [
        (path.relative_to(ROOT).as_posix(), *effect)
        for path in SOURCES
        for effect in effects_in_assertions(parse_source(path.read_text(encoding="utf-8")))
    ]
    assert not effects


def effects_in_assertions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls of functions outside PURE_CALLS, and assignments, with their lines."""
    asserts = (node.test for node in ast.walk(tree) if isinstance(node, ast.Assert))
    for node in (node for test in asserts for node in ast.walk(test)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            if name not in PURE_CALLS:
                yield name, node.lineno
        elif isinstance(node, ast.NamedExpr):
            yield ":=", node.lineno


def test_an_effect_in_an_assertion_is_found() -> None:
    assert list(effects_in_assertions(ast.parse("assert tokens.pop() == 0"))) == [("pop", 1)]
