"""The rooms of the cache stand in an order: each imports only those before it, also for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tcdeploy.host.python_source import parse_source
from tests.conftest import ROOT

CACHE = ROOT / "tcdeploy" / "cache"
ROOMS = ("trust", "folder", "files", "record", "staging", "inventory")


def imported_rooms(room: str) -> Iterator[tuple[str, str]]:
    """(file, room) of each import of a module of the cache."""
    files = [CACHE / f"{room}.py", *(CACHE / room).glob("*.py")]
    for path in (path for path in files if path.is_file()):
        for node in ast.walk(parse_source(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tcdeploy.cache"):
                names = [*(node.module or "").split(".")[2:], node.names[0].name]
                yield path.name, names[0]


def test_each_room_imports_only_those_before_it() -> None:
    order = {room: number for number, room in enumerate(ROOMS)}
    imports = [(room, *found) for room in ROOMS for found in imported_rooms(room)]
    assert [item for item in imports if order[item[2]] > order[item[0]]] == []
    assert len(imports) > 40


def test_every_module_is_in_a_room() -> None:
    names = {path.relative_to(CACHE).parts[0].removesuffix(".py") for path in CACHE.rglob("*.py")}
    assert names == {*ROOMS, "__init__"}
