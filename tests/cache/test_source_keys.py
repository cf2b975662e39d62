"""Which edits of the package's sources cause cache misses, tested by real starts of edited copies of the package.

One process imports torch and transformers, and forks for each start: a cold one that fills the cache folder, and then
one per edit, which runs `cache why` and then `warm` on a copy of that folder.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tcdeploy.host.python_source import parse_source
from tests.conftest import ROOT, TINY, cli_environment

BUCKETS = ("prefill:32", "decode:1")
RECIPE = (TINY, "--buckets", "32", "--batch-sizes", "1", "--programs", "jit")
RUN_STARTS = """
import contextlib, io, json, os, shutil, sys
import torch, transformers
import torch._inductor.compile_fx

sys.path.insert(0, sys.argv[2])
from tests.fork_server import prepare_compiler
del sys.path[0]
prepare_compiler()
assert not any(name.split(".")[0] == "tcdeploy" for name in sys.modules)

def run(arguments):
    from tcdeploy.cli.app import main
    sys.argv = ["tcdeploy", *arguments]
    stdout, code = io.StringIO(), 0
    with contextlib.redirect_stdout(stdout):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return code, stdout.getvalue()

for package, commands, report, copied in json.loads(sys.argv[1]):
    if copied:
        shutil.copytree(*copied)
    pid = os.fork()
    if pid == 0:
        sys.path.insert(0, package)
        os.environ["PYTHONPATH"] = package
        results = [run(command) for command in commands]
        assert sys.modules["tcdeploy"].__file__.startswith(package)
        with open(report, "w") as file:
            json.dump(results, file)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, package
"""


class Start(NamedTuple):
    why_exit_code: int
    why: dict[str, Any]
    outcomes: dict[str, str]

    @property
    def differing(self) -> set[str]:
        return {factor["name"] for factor in self.why["differences"]}


def reword_everything(package: Path) -> None:
    """Every line moves, every module's docstring and date change, and so does the release number."""
    for path in package.rglob("*.py"):
        text = re.sub('"""', '"""Reworded on 2030-01-01. ', path.read_text(), count=1)
        path.write_text(f"# A comment that moves every line below it.\n\n{text}\n# And a last one.\n")
    init = package / "__init__.py"
    text, replaced = re.subn(r'__version__ = "[^"]*"', '__version__ = "99.0.0"', init.read_text())
    assert replaced == 1
    init.write_text(text)
    kernel = package / "kernels" / "attention" / "decode_kernel.py"
    text, replaced = re.subn("@triton.jit\n", "@triton.jit  # moved\n", kernel.read_text())
    assert replaced
    kernel.write_text(text)


def insert_statement(path: Path, is_target: Callable[[ast.FunctionDef], bool]) -> None:
    """Put a statement at the end of the first function that fits."""
    text = path.read_text()
    functions = [node for node in ast.walk(parse_source(text)) if isinstance(node, ast.FunctionDef)]
    last = next(node for node in functions if is_target(node)).body[-1]
    lines = text.splitlines(keepends=True)
    lines.insert(last.lineno - 1, f"{' ' * last.col_offset}assert True\n")
    path.write_text("".join(lines))


def edit_op_body(package: Path) -> None:
    insert_statement(
        package / "kernels" / "attention" / "reference.py", lambda function: function.name == "paged_prefill"
    )


def edit_fake(package: Path) -> None:
    def is_fake(function: ast.FunctionDef) -> bool:
        return any(ast.unparse(item).endswith(".register_fake") for item in function.decorator_list)

    insert_statement(package / "kernels" / "attention" / "ops.py", is_fake)


def edit_pass(package: Path) -> None:
    insert_statement(package / "programs" / "passes" / "rms_norm.py", lambda function: function.name == "fuse_rms_norm")


def edit_tile_table(package: Path) -> None:
    path = package / "kernels" / "linear" / "tile_configs.py"
    text, replaced = re.subn(r'("n1_k1024", 1, 1024, )4\b', r"\g<1>8", path.read_text())
    assert replaced == 1
    path.write_text(text)


CODE_EDITS: dict[str, Callable[[Path], None]] = {
    "kernels/attention/reference.py": edit_op_body,
    "kernels/attention/ops.py": edit_fake,
    "kernels/linear/tile_configs.py": edit_tile_table,
    "programs/passes/rms_norm.py": edit_pass,
}
EDITS: dict[str, Callable[[Path], None]] = {"documentation": reword_everything, **CODE_EDITS}


def copy_package(target: Path, edit: Callable[[Path], None] | None = None) -> str:
    shutil.copytree(ROOT / "tcdeploy", target / "tcdeploy")  # with bytecode, which Python ignores for edited files
    if edit is not None:
        edit(target / "tcdeploy")
    return str(target)


def run_starts(home: Path, starts: list[tuple[str, list[list[str]], str, tuple[str, ...]]]) -> list[Any]:
    """The exit code and stdout of the commands of each start: (package, commands, report, (folder, copy of it))."""
    command = [sys.executable, "-c", RUN_STARTS, json.dumps(starts), str(ROOT)]
    environment = cli_environment(home, PYTHONPATH="")
    completed = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return [json.loads(Path(report).read_text()) for _, _, report, _ in starts]


def outcomes_of(warm: tuple[int, str]) -> dict[str, str]:
    code, stdout = warm
    assert code == 0, stdout
    return {record["bucket"]: record["outcome"] for record in json.loads(stdout)["buckets"]}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Start]:
    """Of the edits that a test of this run needs."""
    selected = {name for item in request.session.items for name in EDITS if item.nodeid.endswith(f"[{name}]")}
    edits = {name: edit for name, edit in EDITS.items() if name in {"documentation", *selected}}
    home = tmp_path_factory.mktemp("source_keys")
    filled = home / "filled"
    warm = [["warm", *RECIPE, "--cache-dir", str(filled), "--json"]]
    all_starts = [(copy_package(home / "original"), warm, str(home / "cold.json"), ())]
    for number, edit in enumerate(edits.values()):
        cache = str(home / f"cache{number}")
        commands = [
            ["cache", "why", str(filled), "--cache-dir", cache, "--json"],
            ["warm", *RECIPE, "--cache-dir", cache, "--json"],
        ]
        package = copy_package(home / f"edited{number}", edit)
        all_starts.append((package, commands, str(home / f"report{number}.json"), (str(filled), cache)))
    [cold], *results = run_starts(home, all_starts)
    assert outcomes_of(cold) == dict.fromkeys(BUCKETS, "miss")
    return {
        name: Start(why[0], json.loads(why[1]), outcomes_of(warm))
        for name, (why, warm) in zip(edits, results, strict=True)
    }


def test_every_bucket_hits_after_edits_of_comments_docstrings_dates_and_the_release(starts: dict[str, Start]) -> None:
    start = starts["documentation"]
    assert start.outcomes == dict.fromkeys(BUCKETS, "hit")
    assert (start.why_exit_code, start.differing) == (0, set())


@pytest.mark.long  # a cold start of each; programs/passes/test_post_grad.py tests the keys, bundle/test_why.py the name
@pytest.mark.parametrize("file", CODE_EDITS)
def test_every_bucket_misses_after_an_edit_of_code_and_why_names_the_file(starts: dict[str, Start], file: str) -> None:
    start = starts[file]
    assert start.outcomes == dict.fromkeys(BUCKETS, "miss")
    assert (start.why_exit_code, start.differing) == (3, {f"tcdeploy/{file}"})
    assert all(bucket["reasons"] == [f"tcdeploy/{file}"] for bucket in start.why["buckets"])
