"""Looking up a private name never raises, and returns the object if it exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tcdeploy.torch_compat.internal import find, find_code, has_parameters, mentions
from tcdeploy.torch_compat.registry import INTERNALS, missing_internals


class Cache:
    @classmethod
    def look_up(cls, key: str, *, local: bool = True) -> str:
        def count() -> str:
            return "cache_hit"

        return count() + key

    @staticmethod
    def store(path: str) -> None:
        raise KeyError(path.strip())


def test_a_name_is_found_by_module_and_attributes() -> None:
    assert find("os:path.join") is find("posixpath:join") is not None
    assert find("os") is not None


@pytest.mark.parametrize("path", ["no_such_module:x", "os:no_such_name", "os:path.no.such", "os.no_such_module"])
def test_a_missing_name_is_none(path: str) -> None:
    assert find(path) is None


def test_a_module_that_fails_to_import_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_on_import.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("broken_on_import:name") is None


def test_code_mentions_names_and_constants_of_nested_functions_and_of_all_methods() -> None:
    assert mentions(Cache, "cache_hit", "strip")
    assert mentions(Cache.look_up, "cache_hit") and not mentions(Cache.look_up, "strip")
    assert not mentions(None, "x") and not mentions(len, "x") and not mentions(Cache, "gone")


def test_parameters_are_compared_by_name() -> None:
    assert has_parameters(Cache.look_up, "key", "local")
    assert not has_parameters(Cache.look_up, "key", "remote") and not has_parameters(None, "key")


def test_the_installed_versions_lack_nothing() -> None:
    """Fails when an installed package moves a name: repair its file, or accept the loss and document it there."""
    assert missing_internals() == ()
    assert all(internal.consequence and not internal.consequence.endswith(".") for internal in INTERNALS)


def test_code_is_found_without_importing_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "raise RuntimeError\nclass Cache:\n    def look_up(self):\n        return 'cache_hit'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert mentions(find_code("slow_to_import:Cache"), "cache_hit", "look_up")
    assert mentions(find_code("slow_to_import:Cache.look_up"), "cache_hit")
    for path in ("slow_to_import:Cache.gone", "slow_to_import:gone", "no_such_module:x", "no_such_package.module:x"):
        assert find_code(path) is None and not mentions(find_code(path), "cache_hit")
    assert "slow_to_import" not in sys.modules


def test_the_checks_do_not_import_inductors_compiler() -> None:
    """It takes 0.7 s, and a start that loads packages and compiles nothing does without it."""
    code = (
        "import sys, tcdeploy.start.model_code; from tcdeploy.torch_compat.registry import missing_internals;"
        "assert missing_internals() == (); print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
