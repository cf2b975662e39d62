"""`warm` and `cache pack` free the memory of their start only if another process then starts the model again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.cli import warm
from tcdeploy.host.progress import NullProgress
from tcdeploy.start import deployment, package_build, prepare
from tcdeploy.start.package_build import PackageResult
from tests.machines import make_recipe


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("programs", "builds", "is_recorded", "calls"),
    [
        ("jit", True, True, []),
        ("aot", True, True, []),
        ("auto", False, True, ["find"]),
        ("auto", True, False, []),
        ("auto", True, True, ["release", "build"]),
    ],
)
def test_memory_is_released_before_another_start(
    programs: str, builds: bool, is_recorded: bool, calls: list[str], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def record(call: str) -> Any:
        def run(*_: Any) -> PackageResult:
            made.append(call)
            return PackageResult("", 0.0, 0)

        return run

    report = SimpleNamespace(is_recorded=is_recorded, planned=None, cache_dir="cache")
    monkeypatch.setattr(prepare, "prepare", lambda *_, **__: SimpleNamespace(report=lambda: report))
    monkeypatch.setattr(deployment, "release_memory", record("release"))
    monkeypatch.setattr(package_build, "build_packages", record("build"))
    monkeypatch.setattr(warm, "_find_packages", record("find"))
    warm.fill_cache(make_recipe(programs=programs), NullProgress(), builds=builds, is_packed=is_packed)
    released = ["release"] if is_packed and "release" not in calls else []
    assert made == [*released, *calls]
