"""The import graph: layers import downward only, without cycles, and torch only where it is needed.

The rules are functions of a folder of sources. Each is applied to this package, and to a small package that violates
it.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tcdeploy
from tcdeploy.host.python_source import parse_source
from tcdeploy.torch_compat.registry import MODULES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tcdeploy"
LAYERS = (  # from the bottom up; packages of one layer do not import each other
    {"errors"},
    {"host"},
    {"planning"},
    {"torch_compat"},
    {"kernels", "models", "remote"},
    {"text", "cache"},
    {"programs"},
    {"engine"},
    {"start"},
    {"llm", "server", "bundle", "bench", "doctor"},
    {"scale", "explain"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
TORCH_FREE = (
    "host.cuda_context", "errors", "host.regular_file", "host.typed_json",
    "host.gc_policy", "planning.recipe", "planning.environment", "planning.architecture",
    "planning.variants", "planning.memory", "planning.keys", "planning.plan", "planning.tested_versions",
    "planning.attention", "planning.backends", "planning.decision", "planning.sizes", "planning.schemes",
    "planning.quantize_request", "planning.gpu_description",
    "host.plain_progress",
    "host.progress", "host.stages",
    "start.blind.process", "torch_compat.blind.cubin", "torch_compat.blind.linker",
    "start.planned", "start.prepare", "start.record.factors", "start.record.record",
    "torch_compat.internal", "torch_compat.inductor.compiler_queries", "torch_compat.transformers.fast_import",
    "start.record.lookup", "cache.files.records", "cache.record.manifest",
    "cache.staging.activate", "engine.schedule.sequence", "engine.schedule.blocks", "engine.schedule.scheduler",
    "engine.schedule.slots", "engine.schedule.snapshots", "engine.schedule.prefix_reuse", "engine.schedule.step_batch",
    "engine.schedule.step_costs", "engine.schedule.step_size",
    "engine.step.launch_timer", "kernels.attention.splits",
    "engine.schedule.constraint", "server.apis.openai.protocol", "server.apis.openai.validation",
    "server.generate.admission", "remote.transfer", "cache.record.bundle_header",
    "cache.trust.signing", "cache.record.provenance", "cache.staging.restore", "host.temporary_files",
    "bundle.container", "bundle.pack", "bundle.unpack", "bench.client", "bench.loads", "bench.plot",
    "bench.quality_settings", "bench.serve_settings", "bench.serving", "bench.settings", "bench.stats",
    "bench.token_windows",
    "cli.bench", "bundle.verify", "bundle.why", "cache.inventory", "cli.app",
    "cli.options", "doctor.examination", "doctor.report", "host.resources",
    "llm.llm", "llm.async_llm", "cli.doctor", "explain.findings", "explain.source_line",
    "explain.break_even", "cli.explain", "cli.explain_display",
)  # fmt: skip
SLOW_IMPORTS = ("torch", "transformers", "rich")
RICH_IMPORTER = "cli.display"
# Of `prepare()` in a terminal, which commands use too, and of a long batch.
PRINTERS = {"host.plain_progress", "llm.progress_bar"}
HELP_SECONDS = 0.4
PRIVATE_PACKAGE = "torch_compat"
PRIVATE_OWNERS = ("torch", "triton", "transformers", "uvicorn", "starlette")
# Names with an underscore that other packages document. No module of PRIVATE_OWNERS is allowed.
DOCUMENTED_NAMES = {
    "_replace": "typing.NamedTuple",
    "_asdict": "typing.NamedTuple",
    "_fields": "typing.NamedTuple",
    "_exit": "os",
    "_strip_protocol": "fsspec.AbstractFileSystem, which fsspec's guide for developers names",
}
ATTRIBUTE_FUNCTIONS = ("getattr", "setattr", "hasattr", "delattr")
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}


class Import(NamedTuple):
    importer: str  # module path inside the package: attention.ops
    target: str  # absolute and dotted: tcdeploy.planning.plan.Plan, torch.nn
    line: int


@functools.cache
def parse(source: str) -> ast.Module:
    return parse_source(source)


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Every module under root/tcdeploy by its path inside the package; "" is the package itself."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = parse(path.read_text())
    return modules


def walk_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, without the blocks that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield statement
                yield from walk_at_run_time(statement)
            continue
        yield child
        yield from walk_at_run_time(child)


def imports_of(root: Path) -> list[Import]:
    """All imports that may run, at the top of a module or inside a function."""
    modules = modules_of(root)
    packages = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)} | {""}
    imports = []
    for name, tree in modules.items():
        for node in walk_at_run_time(tree):
            if isinstance(node, ast.Import):
                imports += [Import(name, alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    parts = [PACKAGE, *name.split(".")] if name else [PACKAGE]
                    parts = parts[: len(parts) - node.level + (name in packages)]
                    source = ".".join([*parts, source] if source else parts)
                imports += [Import(name, f"{source}.{alias.name}", node.lineno) for alias in node.names]
    return imports


def inner_imports(root: Path) -> list[tuple[str, str, int]]:
    """(importer, imported module, line) inside the package; a name from a module counts as that module."""
    modules = modules_of(root)
    imports = []
    for importer, target, line in imports_of(root):
        parts = target.split(".")
        if parts[0] != PACKAGE:
            continue
        while ".".join(parts[1:]) not in modules:
            parts.pop()
        imports.append((importer, ".".join(parts[1:]), line))
    return imports


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
    """The import cycles, each as a list that starts and ends with the same module. A module that imports itself is a
    cycle."""
    graph: dict[str, set[str]] = {name: set() for name in modules_of(root)}
    for importer, imported, _ in inner_imports(root):
        graph[importer].add(imported)
    all_cycles: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            all_cycles.append([*trail[trail.index(name) :], name])
        elif name not in done:
            for imported in sorted(graph[name]):
                visit(imported, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return all_cycles


def importers_of(root: Path, distribution: str) -> set[str]:
    return {item.importer for item in imports_of(root) if item.target.split(".")[0] == distribution}


def modules_that_print(root: Path) -> list[str]:
    """Places that print, or write to stdout or stderr, outside of cli/ and PRINTERS."""
    places = []
    for name, tree in modules_of(root).items():
        for node in ast.walk(tree):
            is_print = isinstance(node, ast.Name) and node.id == "print"
            is_stream = isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr")
            if top_level_name(name) != "cli" and name not in PRINTERS and (is_print or is_stream):
                places.append(f"{name}:{node.lineno}")
    return places


def bare_excepts(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for name, tree in modules_of(root).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def without_docstring(root: Path) -> list[str]:
    return [name for name, tree in modules_of(root).items() if not ast.get_docstring(tree)]


def private_names(root: Path) -> list[str]:
    """Uses of private names of other packages outside torch_compat: imports, attributes, getattr and dotted strings.

    An attribute counts as ours if some module of the package defines a name like it, unless it is reached from an
    imported module of PRIVATE_OWNERS.
    """
    modules = modules_of(root)
    ours = {name for tree in modules.values() for name in defined_private_names(tree)} | set(DOCUMENTED_NAMES)
    violations = []
    for module, tree in modules.items():
        if top_level_name(module) == PRIVATE_PACKAGE:
            continue
        foreign = foreign_names(tree)
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 0)
            violations += [f"{module}:{line} {name}" for name in private_names_of(node, foreign, ours)]
    return sorted(set(violations))


def private_names_of(node: ast.AST, foreign: set[str], ours: set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases if has_private_part(alias.name))
        case ast.ImportFrom(module=str(source), names=aliases, level=0):
            yield from (name for alias in aliases if has_private_part(name := f"{source}.{alias.name}"))
        case ast.Attribute(attr=name) if is_private(name):
            if name not in ours or ast.unparse(node).partition(".")[0] in foreign:
                yield ast.unparse(node)
        case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
            if function in ATTRIBUTE_FUNCTIONS and is_private(name) and name not in ours:
                yield name
        case ast.Constant(value=str(text)) if re.fullmatch(r"[a-z]+(\.\w+)+", text) and has_private_part(text):
            yield repr(text)


def has_private_part(dotted: str) -> bool:
    owner, *parts = dotted.split(".")
    return owner in PRIVATE_OWNERS and any(map(is_private, parts))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def foreign_names(tree: ast.Module) -> set[str]:
    """The local names of everything that a module imports from PRIVATE_OWNERS."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if top_level_name(alias.name) in PRIVATE_OWNERS]
            names |= {alias.asname or alias.name for alias in aliases}
        elif isinstance(node, ast.ImportFrom) and top_level_name(node.module or "") in PRIVATE_OWNERS:
            names |= {alias.asname or alias.name for alias in node.names}
    return {name.partition(".")[0] for name in names}


def defined_private_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, assigned names and attributes of `self` and `cls` that begin with an underscore."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined = name
            case ast.Name(id=name, ctx=ast.Store()):
                defined = name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                defined = name
            case _:
                continue
        if is_private(defined):
            yield defined


# The rules, applied to this package


def test_every_package_has_a_layer() -> None:
    unknown = {top_level_name(name) for name in modules_of(ROOT) if name} - set(LAYER_OF)
    assert not unknown, f"give {unknown} a place in LAYERS, and in the docs"
    assert len(modules_of(ROOT)) > 30


def test_imports_point_downward_only() -> None:
    assert upward_imports(ROOT) == []
    assert len(inner_imports(ROOT)) > 100


def test_no_modules_import_each_other_in_a_cycle() -> None:
    assert cycles(ROOT) == []


def test_at_the_top_of_the_package_stand_folders_and_the_errors() -> None:
    assert {path.name for path in (ROOT / PACKAGE).glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_the_init_file_of_a_package_imports_nothing() -> None:
    packages = [path.relative_to(ROOT / PACKAGE).parent for path in (ROOT / PACKAGE).rglob("__init__.py")]
    names = {".".join(path.parts) for path in packages} - {""}
    assert [item for item in imports_of(ROOT) if item.importer in names] == []


def test_the_package_imports_its_public_names_lazily() -> None:
    slow = (*SLOW_IMPORTS, "pydantic", "starlette")
    library = "from tcdeploy import LLM, AsyncLLM, SamplingParams"
    done = run(
        "-c", f"import sys, {PACKAGE}; dir({PACKAGE}); {library}; print(*[n for n in {slow} if n in sys.modules])"
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")
    assert set(tcdeploy.__all__) == tcdeploy.LAZY_EXPORTS.keys() <= set(dir(tcdeploy))
    modules = {name: getattr(tcdeploy, name).__module__ for name in tcdeploy.__all__}
    assert modules == tcdeploy.LAZY_EXPORTS
    with pytest.raises(ImportError):
        from tcdeploy import Motor  # noqa: F401


def test_only_the_display_imports_rich() -> None:
    assert importers_of(ROOT, "rich") == {RICH_IMPORTER}


def test_only_the_cli_and_the_plain_displays_print() -> None:
    assert modules_that_print(ROOT) == []


def test_every_module_has_a_docstring() -> None:
    assert without_docstring(ROOT) == []


def test_no_except_is_bare() -> None:
    assert bare_excepts(ROOT) == []


def test_only_torch_compat_uses_private_names_of_other_packages() -> None:
    assert private_names(ROOT) == []


def test_every_file_of_torch_compat_that_holds_a_private_name_is_in_the_registry() -> None:
    """A file without `supported` only helps the others, and is exempt."""
    modules = {name: tree for name, tree in modules_of(ROOT).items() if top_level_name(name) == PRIVATE_PACKAGE}
    holders = {
        name
        for name, tree in modules.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "supported" for node in tree.body)
    }
    assert holders == {f"{PRIVATE_PACKAGE}.{module}" for module in MODULES}
    assert len(holders) > 20


def test_no_file_has_a_vague_name() -> None:
    names = {part for path in (ROOT / PACKAGE).rglob("*") for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & VAGUE_NAMES
    assert "errors" in names


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TCDEPLOY_")}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)


def test_planning_and_other_torch_free_modules_do_not_import_torch() -> None:
    modules = ", ".join(f"{PACKAGE}.{name}" for name in TORCH_FREE)
    done = run("-c", f"import sys, {modules}; print(*[name for name in {SLOW_IMPORTS} if name in sys.modules])")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_the_runner_imports_no_object_of_the_scheduler() -> None:
    """It gets a StepBatch only, so it can run in another process."""
    importers = {f"engine.step.{name}" for name in ("advance", "batch", "rows", "runner", "sampling", "step_graphs")}
    objects = {"sequence.Sequence", "sequence.Chunk", "sequence.SchedulerOutput", "scheduler.Scheduler"}
    targets = {f"{PACKAGE}.engine.schedule.{name}" for name in objects}
    assert importers <= set(modules_of(ROOT))
    assert not [found for found in imports_of(ROOT) if found.importer in importers and found.target in targets]


def test_the_server_binds_its_socket_before_slow_imports() -> None:
    slow = (*SLOW_IMPORTS, "numpy")
    done = run("-c", f"import sys, {PACKAGE}.server.run; print(*[name for name in {slow} if name in sys.modules])")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


COMMANDS_WITHOUT_A_MODEL = ("--help", "warm --help", "recipes", "cache --help", "cache verify --help")
MAINTENANCE = ("ls", "du", "gc")
FORK_PER_COMMAND = """
import contextlib, io, json, os, sys, traceback
from tcdeploy.cli import app as cli
for command in json.loads(sys.argv[1]):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    sys.argv = ["tcdeploy", *command.split()]
    output, code = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            cli.main()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
    finally:
        packages = sorted({name.partition(".")[0] for name in sys.modules})
        print(json.dumps([command, code, bool(output.getvalue()), packages]), flush=True)
        os._exit(0)
"""


@pytest.fixture(scope="module")
def imported_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The packages that each command imports. Every run is a fork of one process that has imported the CLI."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "manifests").mkdir()  # a cache folder, without a plan
    commands = [*COMMANDS_WITHOUT_A_MODEL, *(f"cache {command} {folder}" for command in MAINTENANCE)]
    done = run("-c", FORK_PER_COMMAND, json.dumps(commands))
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result[:3] for result in results] == [[command, 0, True] for command in commands], done.stderr
    return {command.removesuffix(f" {folder}"): set(packages) for command, _, _, packages in results}


@pytest.mark.parametrize("command", COMMANDS_WITHOUT_A_MODEL)
def test_commands_without_a_model_import_neither_torch_nor_transformers_nor_rich(
    command: str, imported_by: dict[str, set[str]]
) -> None:
    assert {PACKAGE, "typer", "yaml"} <= imported_by[command]
    assert not imported_by[command] & {*SLOW_IMPORTS, "numpy"}


@pytest.mark.parametrize("command", MAINTENANCE)
def test_cache_maintenance_imports_neither_torch_nor_transformers(
    command: str, imported_by: dict[str, set[str]]
) -> None:
    imported = imported_by[f"cache {command}"]
    assert PACKAGE in imported and ("rich" in imported) == (command == "du"), "without plans, ls and gc draw no table"
    assert not imported & {"torch", "transformers", "numpy", "cryptography", "zstandard"}


def test_help_takes_less_than_its_time_limit() -> None:
    """CPU seconds of the fastest of up to five runs, so that a busy machine passes."""
    seconds = []
    while len(seconds) < 5 and min(seconds, default=HELP_SECONDS) >= HELP_SECONDS:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("-m", PACKAGE, "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert "compile" in done.stdout
    assert min(seconds) < HELP_SECONDS


# The rules, applied to packages that violate them


def build(root: Path, sources: dict[str, str]) -> Path:
    for name, source in sources.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    "source",
    [
        "from tcdeploy.start import Plan",
        "from tcdeploy import start",
        "import tcdeploy.start",
        "import tcdeploy.start as p",
        "from .start import Plan",
        "from . import start",
        "def f():\n    from tcdeploy.start import Plan",
        "class C:\n    def f(self):\n        if True:\n            import tcdeploy.start",
        "try:\n    import tcdeploy.start\nexcept ImportError:\n    pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import tcdeploy.start",
    ],
)
def test_every_form_of_an_upward_import_is_detected(source: str, tmp_path: Path) -> None:
    package = build(tmp_path, {"__init__.py": "", "start.py": "", "errors.py": source})
    [violation] = upward_imports(package)
    assert violation.startswith("errors:") and violation.endswith("imports start")


def test_an_upward_import_inside_a_package_is_detected(tmp_path: Path) -> None:
    sources = {"__init__.py": "", "cli/__init__.py": "", "cli/app.py": "", "engine/__init__.py": ""}
    for importing in ("from ..cli import app", "from tcdeploy.cli.app import main"):
        package = build(tmp_path, {**sources, "engine/runner.py": importing})
        assert upward_imports(package) == ["engine.runner:1 imports cli.app"]


def test_packages_of_one_layer_may_not_import_each_other_but_modules_of_one_package_may(tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {
            "models/load.py": "import tcdeploy.kernels.ops",
            "kernels/ops.py": "from tcdeploy.kernels import decode",
            "kernels/decode.py": "from tcdeploy.errors import SpaceError",
            "errors.py": "",
        },
    )
    assert upward_imports(package) == ["models.load:1 imports kernels.ops"]


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_imports_for_type_checkers_are_ignored(test: str, tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {"errors.py": f"if {test}:\n    from tcdeploy.start import Plan\n    import rich", "start.py": ""},
    )
    assert (upward_imports(package), importers_of(package, "rich")) == ([], set())


def test_a_cycle_through_a_function_is_detected(tmp_path: Path) -> None:
    sources = {
        "a.py": "import tcdeploy.b",
        "b.py": "def f():\n    from tcdeploy.c import g",
        "c.py": "from tcdeploy import a",
        "d.py": "import tcdeploy.a",
    }
    assert cycles(build(tmp_path, sources)) == [["a", "b", "c", "a"]]
    assert cycles(build(tmp_path, {"c.py": ""})) == []


def test_violations_of_the_other_rules_are_detected(tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {
            "cli/display.py": "'Draws.'\nimport rich\nprint(1)",
            "cli/warm.py": "def f():\n    from rich.table import Table",
            "start.py": "import sys\ntry:\n    print(1)\nexcept:\n    sys.stderr.write('x')",
        },
    )
    assert importers_of(package, "rich") == {"cli.display", "cli.warm"}
    assert modules_that_print(package) == ["start:3", "start:5"]
    assert bare_excepts(package) == ["start:4"]
    assert without_docstring(package) == ["cli.warm", "start"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._inductor.config as inductor", "torch._inductor.config"),
        ("def f():\n    from torch._inductor import codecache", "torch._inductor.codecache"),
        ("from torch.nn.modules import _functions", "torch.nn.modules._functions"),
        ("import torch\ntorch._dynamo.reset()", "torch._dynamo"),
        ("import torch as t\nt.ops.aten._flash_attention_forward()", "t.ops.aten._flash_attention_forward"),
        ("from transformers import AttentionInterface\nAttentionInterface._global_mapping.clear()",
         "AttentionInterface._global_mapping"),
        ("def f(region):\n    region._compiled_call_impl = print", "region._compiled_call_impl"),
        ("def f(region):\n    return getattr(region, '_compiled_call_impl', None)", "_compiled_call_impl"),
        ("import logging\nlogging.getLogger('torch._subclasses.fake_tensor')", "'torch._subclasses.fake_tensor'"),
        ("import torch\ntorch._mine()\ndef _mine(): pass", "torch._mine"),
    ],
)  # fmt: skip
def test_every_form_of_a_private_name_is_detected(source: str, name: str, tmp_path: Path) -> None:
    package = build(tmp_path, {"engine/runner.py": source, "torch_compat/compiled_call.py": source})
    [violation] = private_names(package)
    assert violation.startswith("engine.runner:") and violation.endswith(f" {name}")


def test_private_names_of_this_package_and_documented_names_are_allowed(tmp_path: Path) -> None:
    source = """
import os
from typing import NamedTuple
class Point(NamedTuple):
    x: int
class Runner:
    def __init__(self): self._rows = 1
    def _step(self): return self._rows
def f(runner):
    os._exit(Point(1)._replace(x=runner._rows).x + runner._step())
    return type(runner).__name__, "torch.compile", "see torch._dynamo for more"
"""
    assert private_names(build(tmp_path, {"engine/runner.py": source})) == []
