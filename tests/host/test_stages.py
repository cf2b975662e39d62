"""Which packages an import takes its time in, and which modules have no bytecode."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path

import pytest

from tcdeploy.host import stages
from tcdeploy.host.stages import MANY_WITHOUT_BYTECODE, ImportTimer, describe_imports, describe_missing_bytecode
from tests.conftest import TINY, TINY_FLAGS, RunCLI

SLEEP = "import time\ntime.sleep(0.2)\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`outer` imports `inner.slow`, which sleeps for 0.2 s, and `failing`, which sleeps and raises ValueError."""
    sources = {
        "outer/__init__.py": "import inner.slow\nimport inner.fast\n",
        "inner/__init__.py": "", "inner/fast.py": "", "inner/slow.py": SLEEP,
        "failing.py": SLEEP + "raise ValueError\n",
    }  # fmt: skip
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("outer", "inner", "failing")]:
        del sys.modules[name]


def test_a_package_is_charged_for_its_own_modules_only(packages: Path) -> None:
    timer = ImportTimer()
    with timer.measure():
        importlib.import_module("outer")
    assert 0.2 <= timer.seconds["inner"] < 2
    assert 0 < timer.seconds["outer"] < 0.2


def test_frames_have_the_same_module_while_imports_are_measured() -> None:
    original, frame = inspect.getmodule, inspect.currentframe()
    code = "import inspect, types\nmodule = inspect.getmodule(inspect.currentframe())"
    without_module: dict[str, object] = {"__name__": "gone"}
    with ImportTimer().measure():
        assert inspect.getmodule is not original
        assert inspect.getmodule(frame) is sys.modules[__name__] and inspect.getmodule(ImportTimer) is stages
        assert inspect.getmodule(object=ImportTimer) is stages
        exec(compile(code, stages.__file__, "exec"), without_module)  # type: ignore[arg-type]
    assert without_module["module"] is stages, "by the file of its code"
    assert inspect.getmodule is original


def test_a_module_without_bytecode_is_counted_once_it_is_compiled(packages: Path) -> None:
    counts = []
    for _ in range(2):
        timer = ImportTimer()
        with timer.measure():
            importlib.import_module("outer")
        counts.append(dict(timer.without_bytecode))
        forget()
    assert counts == [{"outer": 1, "inner": 3}, {}]


def test_bytecode_that_python_writes_is_no_reason_for_a_warning(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each start would compile the modules again."""
    not_kept = []
    for is_kept in (False, True):
        monkeypatch.setattr(sys, "dont_write_bytecode", not is_kept)
        timer = ImportTimer()
        with timer.measure():
            importlib.import_module("outer")
        assert timer.without_bytecode.total() == 4
        not_kept.append(timer.not_kept.total())
        forget()
    assert not_kept == [4, 0]


def test_an_import_that_fails_is_measured_too(packages: Path) -> None:
    timer = ImportTimer()
    with timer.measure():
        with pytest.raises(ValueError):
            importlib.import_module("failing")
        importlib.import_module("outer")
    assert timer.seconds["failing"] >= 0.2 and timer.seconds["inner"] >= 0.2 > timer.seconds["outer"]


def test_imports_of_other_threads_are_not_measured(packages: Path) -> None:
    timer = ImportTimer()
    with timer.measure():
        thread = threading.Thread(target=importlib.import_module, args=("outer",))
        thread.start()
        thread.join()
    assert not timer.seconds and not timer.without_bytecode


def test_the_loaders_of_python_are_as_before(packages: Path) -> None:
    before = [dict(vars(loader)) for loader in (SourceFileLoader, ExtensionFileLoader)]
    timer = ImportTimer()
    with timer.measure():
        assert [dict(vars(loader)) for loader in (SourceFileLoader, ExtensionFileLoader)] != before
    assert [dict(vars(loader)) for loader in (SourceFileLoader, ExtensionFileLoader)] == before
    importlib.import_module("outer")
    assert not timer.seconds


def test_a_few_modules_without_bytecode_are_no_reason_for_a_warning() -> None:
    assert describe_missing_bytecode(Counter(tcdeploy=MANY_WITHOUT_BYTECODE - 1)) == ""
    warning = describe_missing_bytecode(Counter(a=1, torch=MANY_WITHOUT_BYTECODE, sympy=7, b=1))
    assert "209 modules from source (torch 200, sympy 7, a 1)" in warning and "compileall" in warning


def test_the_description_adds_up() -> None:
    seconds = {"b": 0.2, "torch": 2.0, "a": 0.2, "sympy": 1.0, "transformers": 0.5}
    assert describe_imports(seconds) == "torch 2.0 s, sympy 1.0 s, transformers 0.5 s, others 0.4 s"
    assert describe_imports({}) == "others 0.0 s"


def test_a_start_reports_the_packages_that_it_imported(run_cli: RunCLI, cache_dir: str) -> None:
    done = run_cli("warm", TINY, *TINY_FLAGS, "--programs", "jit", "--cache-dir", cache_dir, "--json", new=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    imports = document["import_seconds"]
    assert list(imports)[0] == "torch" and {"transformers", "tcdeploy"} < set(imports)
    assert imports["torch"] > 0.3
    assert sum(imports.values()) <= sum(document["stage_seconds"].values())
    assert "from source" not in done.stderr
