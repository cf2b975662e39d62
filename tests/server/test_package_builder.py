"""`serve --build-packages`: when a build begins, pauses, continues and ends, with a build that runs nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.cache.folder.layout import LEASES_DIR
from tcdeploy.cache.folder.leases import build_lock, folder_lock
from tcdeploy.errors import UsageError
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.server import package_builder
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.package_builder import PackageBuilder
from tcdeploy.server.settings import ServerSettings, check_package_build
from tcdeploy.start import package_build
from tcdeploy.start.package_build import PackageResult
from tests.machines import LAPTOP, LLAMA_8B, make_recipe


class Build:
    """Records what happens to it. It runs until a test ends it."""

    def __init__(self, recipe: Recipe, cache_dir: str, is_background: bool) -> None:
        self.recipe, self.is_running, self.events = recipe, True, ["start"]
        self.result = PackageResult("key", 60.0, 1)
        assert is_background

    def pause(self) -> None:
        self.events.append("pause")

    def resume(self) -> None:
        self.events.append("resume")

    def stop(self) -> None:
        self.is_running = False
        self.events.append("stop")

    def wait(self) -> PackageResult:
        return self.result


class Server:
    """A builder with a loaded jit deployment, whose requests are counted by hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        (folder / LEASES_DIR).mkdir(exist_ok=True)
        recipe = make_recipe(device="cpu", cache_dir=str(folder), context=512, **fields)
        plan = make_plan(recipe, LAPTOP, LLAMA_8B)
        planned = SimpleNamespace(recipe=recipe, plan=plan, environment=LAPTOP)
        self.deployment: Any = SimpleNamespace(planned=planned, plan=plan, cache_dir=str(folder), swaps=None)
        self.admission = Admission(8)
        self.admission.open(max_running=4)
        self.builds: list[Build] = []
        self.builder = PackageBuilder(self.deployment, self.admission)
        monkeypatch.setattr(package_builder, "POLL_S", 0.001)
        monkeypatch.setattr(package_builder, "IDLE_S", 0.003)
        monkeypatch.setattr(package_build, "PackageBuild", self._start)

    def _start(self, *arguments: Any, **more: Any) -> Build:
        self.builds.append(Build(*arguments, **more))
        return self.builds[-1]

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the condition was never true")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path, monkeypatch)


def test_a_build_begins_when_no_request_is_open_and_pauses_while_one_is(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server.admission.num_admitted = 1
        task = asyncio.create_task(server.builder.run())
        await asyncio.sleep(0.05)
        assert not server.builds
        server.admission.num_admitted = 0
        await server.until(lambda: server.builds)
        (build,) = server.builds
        server.admission.num_admitted = 1
        await server.until(lambda: build.events == ["start", "pause"])
        await asyncio.sleep(0.05)
        assert build.events == ["start", "pause"]
        server.admission.num_admitted = 0
        await server.until(lambda: build.events == ["start", "pause", "resume"])
        build.is_running = False
        await task

    with caplog.at_level(logging.INFO, "tcdeploy.server"):
        asyncio.run(scenario())
    (record,) = caplog.records
    assert "were built in 60 s" in record.getMessage() and record.levelno == logging.INFO
    assert server.builds[0].recipe == server.deployment.planned.recipe, "so the start record fits later starts"


def test_a_build_that_may_hold_the_lock_of_the_folder_is_not_stopped(server: Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(server.builder.run())
        await server.until(lambda: server.builds)
        (build,) = server.builds
        with folder_lock(tmp_path):
            server.admission.num_admitted = 1
            await server.until(lambda: len(build.events) > 4)
            assert build.events[1:5] == ["pause", "resume"] * 2
        await server.until(lambda: build.events[-2:] == ["resume", "pause"])
        server.builder.stop()
        server.admission.num_admitted = 0
        await task
        assert "stop" in build.events

    asyncio.run(scenario())


def test_a_failure_is_one_warning(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(server.builder.run())
        await server.until(lambda: server.builds)
        server.builds[0].result = PackageResult("", 5.0, 0, "the model does not fit")
        server.builds[0].is_running = False
        await task

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "packages were not built, so later starts use jit programs: the model does not fit"
    ]


def test_nothing_is_built_where_another_replica_builds_or_packages_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with build_lock(tmp_path, server.deployment.plan.key):
        asyncio.run(server.builder.run())
    packaged = Server(tmp_path, monkeypatch, programs="aot")
    asyncio.run(packaged.builder.run())
    assert not server.builds and not packaged.builds and not caplog.records
    server.deployment.cache_dir = "/private/copy"
    with build_lock(tmp_path, server.deployment.plan.key):  # as in a folder where no lock can be made
        asyncio.run(server.builder.run())
    assert not server.builds and "cannot be written" in caplog.records[0].getMessage()


def test_an_eager_start_ends_first(server: Server) -> None:
    server.deployment.swaps = swaps = SimpleNamespace(is_finished=False)

    async def scenario() -> None:
        task = asyncio.create_task(server.builder.run())
        await asyncio.sleep(0.05)
        assert not server.builds
        swaps.is_finished = True
        await server.until(lambda: server.builds)
        server.builds[0].is_running = False
        await task

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "fields", [{"programs": "jit"}, {"programs": "aot"}, {"compile": False}, {"require_signed": True}]
)
def test_a_recipe_that_builds_nothing_is_refused(fields: dict[str, Any]) -> None:
    settings = ServerSettings(build_packages=True)
    check_package_build(settings, make_recipe())
    check_package_build(dataclasses.replace(settings, build_packages=False), make_recipe(**fields))
    with pytest.raises(UsageError, match="--build-packages excludes"):
        check_package_build(settings, make_recipe(**fields))
