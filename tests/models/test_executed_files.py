"""The source files that a computation executes are recorded, with sys.monitoring where Python has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tcdeploy.models import sources
from tcdeploy.models.sources import record_executed_files

HAS_MONITORING = hasattr(sys, "monitoring")


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Imports a module with two functions: `call` calls `helper`."""

    def make(name: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text("def helper():\n    return 1\n\n\ndef call():\n    return helper()\n")
        made = ModuleType(name)
        exec(compile(path.read_text(), str(path), "exec"), vars(made))
        return made

    return make


@pytest.mark.parametrize("free_tools", [sources.FREE_TOOLS, ()])
def test_files_are_recorded_in_each_block_and_not_after_it(
    module: Callable[[str], ModuleType], tmp_path: Path, free_tools: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FREE_TOOLS", free_tools)
    first, second = module("first"), module("second")
    for _ in range(2):  # the second block records functions that the first one has seen
        files: set[str] = set()
        with record_executed_files(files):
            first.call()
        second.call()
        assert {path for path in files if path.startswith(str(tmp_path))} == {str(tmp_path / "first.py")}


@pytest.mark.skipif(not HAS_MONITORING, reason="Python 3.12 has sys.monitoring")
def test_a_function_is_reported_once_and_the_tool_is_free_afterwards(module: Callable[[str], ModuleType]) -> None:
    class Files(set[str]):
        additions = 0

        def add(self, name: str) -> None:
            self.additions += name.endswith("called.py")
            super().add(name)

    called, files = module("called"), Files()
    with pytest.raises(ZeroDivisionError), record_executed_files(files):
        for _ in range(100):
            called.call()
        _ = 1 / 0
    assert files.additions == 2
    assert all(sys.monitoring.get_tool(number) is None for number in sources.FREE_TOOLS)  # type: ignore[attr-defined]
