"""The import graph is the diagram: downward only, no cycles, torch only where torch is the work.

The rules are functions over a folder of sources, so that each is shown to find its offence in a small bad house
before it is trusted on ours.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tcdeploy"
LAYERS = (  # from the ground up; packages of one layer do not import each other
    {"errors", "gc_policy"},
    {"planning"},
    {"progress", "torch_compat"},
    {"models", "attention", "linear", "remote"},
    {"passes", "cache"},
    {"compiler"},
    {"engine"},
    {"pipeline"},
    {"bundle", "server", "bench"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
TORCH_FREE = (
    "errors", "gc_policy", "planning.recipe", "planning.environment", "planning.architecture", "planning.variants",
    "planning.capability", "planning.memory", "planning.plan", "planning.attention", "planning.backends",
    "planning.decision", "planning.sizes", "progress", "cache.contents", "cache.manifest", "cache.toolchain", "cache.folder", "engine.sequence",
    "engine.blocks", "engine.scheduler", "engine.constraint", "server.protocol", "server.validation", "server.admission",
    "remote.transfer", "bundle.container", "bundle.header", "bundle.signing", "bundle.pack", "bundle.unpack",
    "bundle.verify", "bundle.why", "cache.inventory", "bundle.compare", "cli.app", "cli.cache", "cli.options",
)  # fmt: skip
SLOW_IMPORTS = ("torch", "transformers", "rich")
RICH_IMPORTER = "cli.display"
HELP_SECONDS = 0.4
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}


class Import(NamedTuple):
    importer: str  # module path inside the package: attention.ops
    target: str  # absolute and dotted: tcdeploy.planning.plan.Plan, torch.nn
    line: int


@functools.cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Every module under root/tcdeploy by its path inside the package; "" is the package itself."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = parse(path.read_text())
    return found


def walk_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but not what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for kept in child.orelse:
                yield kept
                yield from walk_at_run_time(kept)
            continue
        yield child
        yield from walk_at_run_time(child)


def imports_of(root: Path) -> list[Import]:
    """All imports that can happen when the program runs, at the head of a module or inside a function."""
    modules = modules_of(root)
    packages = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)} | {""}
    found = []
    for name, tree in modules.items():
        for node in walk_at_run_time(tree):
            if isinstance(node, ast.Import):
                found += [Import(name, alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    parts = [PACKAGE, *name.split(".")] if name else [PACKAGE]
                    parts = parts[: len(parts) - node.level + (name in packages)]
                    source = ".".join([*parts, source] if source else parts)
                found += [Import(name, f"{source}.{alias.name}", node.lineno) for alias in node.names]
    return found


def inner_imports(root: Path) -> list[tuple[str, str, int]]:
    """(importer, imported module, line) inside the package; a name from a module counts as that module."""
    modules = modules_of(root)
    found = []
    for importer, target, line in imports_of(root):
        parts = target.split(".")
        if parts[0] != PACKAGE:
            continue
        while ".".join(parts[1:]) not in modules:
            parts.pop()
        found.append((importer, ".".join(parts[1:]), line))
    return found


def top_level_name(module: str) -> str:
    return module.partition(".")[0]


def upward_imports(root: Path) -> list[str]:
    return [
        f"{importer}:{line} imports {imported}"
        for importer, imported, line in inner_imports(root)
        if imported
        and top_level_name(importer) != top_level_name(imported)
        and LAYER_OF[top_level_name(imported)] >= LAYER_OF[top_level_name(importer)]
    ]


def cycles(root: Path) -> list[list[str]]:
    """Each cycle of modules that is met from its first module on; a module that imports itself is one."""
    graph: dict[str, set[str]] = {name: set() for name in modules_of(root)}
    for importer, imported, _ in inner_imports(root):
        graph[importer].add(imported)
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append([*trail[trail.index(name) :], name])
        elif name not in done:
            for imported in sorted(graph[name]):
                visit(imported, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


def importers_of(root: Path, distribution: str) -> set[str]:
    return {item.importer for item in imports_of(root) if item.target.split(".")[0] == distribution}


def modules_that_print(root: Path) -> list[str]:
    """Modules below cli/ that print, or write to stdout or stderr."""
    found = []
    for name, tree in modules_of(root).items():
        for node in ast.walk(tree):
            is_print = isinstance(node, ast.Name) and node.id == "print"
            is_stream = isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr")
            if top_level_name(name) != "cli" and (is_print or is_stream):
                found.append(f"{name}:{node.lineno}")
    return found


def bare_excepts(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for name, tree in modules_of(root).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def without_docstring(root: Path) -> list[str]:
    return [name for name, tree in modules_of(root).items() if not ast.get_docstring(tree)]


# The rules, on our house


def test_every_room_has_its_storey() -> None:
    unknown = {top_level_name(name) for name in modules_of(ROOT) if name} - set(LAYER_OF)
    assert not unknown, f"give {unknown} a place in ORDER, and in the design"
    assert len(modules_of(ROOT)) > 30


def test_imports_point_downward_only() -> None:
    assert upward_imports(ROOT) == []
    assert len(inner_imports(ROOT)) > 100


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(ROOT) == []


def test_models_and_attention_do_not_know_each_other() -> None:
    pairs = {(top_level_name(importer), top_level_name(imported)) for importer, imported, _ in inner_imports(ROOT)}
    assert not pairs & {("models", "attention"), ("attention", "models")}


def test_packages_import_nothing_when_one_of_their_modules_is_imported() -> None:
    packages = [path.relative_to(ROOT / PACKAGE).parent for path in (ROOT / PACKAGE).rglob("__init__.py")]
    names = {".".join(path.parts) for path in packages} - {""}
    assert [item for item in imports_of(ROOT) if item.importer in names] == []


def test_the_package_itself_imports_what_it_offers_only_when_asked() -> None:
    done = run("-c", f"import sys, {PACKAGE}; print(*[name for name in {SLOW_IMPORTS} if name in sys.modules])")
    assert (done.returncode, done.stdout.split()) == (0, [])
    done = run("-c", f"from {PACKAGE} import Engine, Recipe, SamplingParams, prepare; print(Engine.__module__)")
    assert (done.returncode, done.stdout.strip()) == (0, f"{PACKAGE}.engine.engine")
    assert run("-c", f"from {PACKAGE} import Motor").returncode == 1


def test_only_the_display_imports_rich() -> None:
    assert importers_of(ROOT, "rich") == {RICH_IMPORTER}


def test_nothing_below_the_cli_speaks() -> None:
    assert modules_that_print(ROOT) == []


def test_every_module_says_what_it_is_for() -> None:
    assert without_docstring(ROOT) == []


def test_no_except_is_bare() -> None:
    assert bare_excepts(ROOT) == []


def test_no_file_is_named_after_nothing() -> None:
    names = {part for path in (ROOT / PACKAGE).rglob("*") for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & VAGUE_NAMES
    assert "errors" in names


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TCDEPLOY_")}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)


def test_the_deciding_half_imports_no_torch() -> None:
    modules = ", ".join(f"{PACKAGE}.{name}" for name in TORCH_FREE)
    done = run("-c", f"import sys, {modules}; print(*[name for name in {SLOW_IMPORTS} if name in sys.modules])")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_the_server_binds_its_socket_before_it_imports_what_takes_long() -> None:
    slow = (*SLOW_IMPORTS, "numpy")
    done = run("-c", f"import sys, {PACKAGE}.server.run; print(*[name for name in {slow} if name in sys.modules])")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("warm", "--help"), ("recipes",), ("cache", "--help"), ("cache", "verify", "--help"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_answers_that_need_no_model_import_neither_torch_nor_transformers_nor_rich(arguments: tuple[str, ...]) -> None:
    imported = imported_by(*arguments)
    assert {PACKAGE, "typer", "yaml"} <= imported
    assert not imported & {*SLOW_IMPORTS, "numpy"}


@pytest.mark.parametrize("command", ["ls", "du", "gc"])
def test_looking_after_a_cache_imports_neither_torch_nor_transformers(command: str, tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()  # a cache folder, without a plan
    imported = imported_by("cache", command, str(tmp_path))
    assert {PACKAGE, "rich"} <= imported, "a table is drawn"
    assert not imported & {"torch", "transformers", "numpy", "cryptography", "zstandard"}


def imported_by(*arguments: str) -> set[str]:
    """The packages that a run of the command imports, which must succeed and say something."""
    done = run("-X", "importtime", "-m", PACKAGE, *arguments)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    return {match.strip().split(".")[0] for match in re.findall(r"^import time:.*\|(.*)$", done.stderr, re.M)}


def test_help_answers_in_a_blink() -> None:
    """The one assertion about time here, because it is a promise: in seconds of the processor, so that a busy machine
    can keep it, and the best of five."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("-m", PACKAGE, "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert "compile" in done.stdout
    assert min(seconds) < HELP_SECONDS


# The rules, on bad houses


def build(root: Path, sources: dict[str, str]) -> Path:
    for name, source in sources.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    "source",
    [
        "from tcdeploy.pipeline import Plan",
        "from tcdeploy import pipeline",
        "import tcdeploy.pipeline",
        "import tcdeploy.pipeline as p",
        "from .pipeline import Plan",
        "from . import pipeline",
        "def f():\n    from tcdeploy.pipeline import Plan",
        "class C:\n    def f(self):\n        if True:\n            import tcdeploy.pipeline",
        "try:\n    import tcdeploy.pipeline\nexcept ImportError:\n    pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import tcdeploy.pipeline",
    ],
)
def test_an_upward_import_is_found_however_it_is_written(source: str, tmp_path: Path) -> None:
    package = build(tmp_path, {"__init__.py": "", "pipeline.py": "", "errors.py": source})
    [found] = upward_imports(package)
    assert found.startswith("errors:") and found.endswith("imports pipeline")


def test_an_upward_import_is_found_from_inside_a_package_too(tmp_path: Path) -> None:
    sources = {"__init__.py": "", "cli/__init__.py": "", "cli/app.py": "", "engine/__init__.py": ""}
    for importing in ("from ..cli import app", "from tcdeploy.cli.app import main"):
        package = build(tmp_path, {**sources, "engine/step.py": importing})
        assert upward_imports(package) == ["engine.step:1 imports cli.app"]


def test_neighbours_in_one_storey_may_not_import_each_other_but_rooms_of_one_package_may(tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {
            "models/load.py": "import tcdeploy.attention.ops",
            "attention/ops.py": "from tcdeploy.attention import kernels",
            "attention/kernels.py": "from tcdeploy.errors import SpaceError",
            "errors.py": "",
        },
    )
    assert upward_imports(package) == ["models.load:1 imports attention.ops"]


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_what_only_a_type_checker_imports_does_not_count(test: str, tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {"errors.py": f"if {test}:\n    from tcdeploy.pipeline import Plan\n    import rich", "pipeline.py": ""},
    )
    assert (upward_imports(package), importers_of(package, "rich")) == ([], set())


def test_a_circle_is_found_even_through_a_function(tmp_path: Path) -> None:
    sources = {
        "a.py": "import tcdeploy.b",
        "b.py": "def f():\n    from tcdeploy.c import g",
        "c.py": "from tcdeploy import a",
        "d.py": "import tcdeploy.a",
    }
    assert cycles(build(tmp_path, sources)) == [["a", "b", "c", "a"]]
    assert cycles(build(tmp_path, {"c.py": ""})) == []


def test_other_offences_are_found(tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {
            "cli/display.py": "'Draws.'\nimport rich\nprint(1)",
            "cli/warm.py": "def f():\n    from rich.table import Table",
            "pipeline.py": "import sys\ntry:\n    print(1)\nexcept:\n    sys.stderr.write('x')",
        },
    )
    assert importers_of(package, "rich") == {"cli.display", "cli.warm"}
    assert modules_that_print(package) == ["pipeline:3", "pipeline:5"]
    assert bare_excepts(package) == ["pipeline:4"]
    assert without_docstring(package) == ["cli.warm", "pipeline"]
