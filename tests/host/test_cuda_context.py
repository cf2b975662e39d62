"""The CUDA context of device 0 is created before torch is imported.

Failures are logged at debug level and do not stop the start.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tcdeploy.bundle import fetch as fetching
from tcdeploy.cli.remote_cache import fetch_cache
from tcdeploy.errors import TrustError, UsageError
from tcdeploy.host.cuda_context import start_context
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import CacheSource
from tcdeploy.start import model_code
from tcdeploy.start import prepare as start

# A driver that records its calls in `calls`: 1, 2 and 3, in order. `failing` is the call that fails.
DRIVER = """
int calls[8], count, failing, device = -1;
static int call(int number) { calls[count++] = number; return failing == number ? 100 : 0; }
int cuInit(unsigned flags) { return call(1) + (int)flags; }
int cuDeviceGet(int *result, int ordinal) { *result = 40 + ordinal; return call(2); }
int cuDevicePrimaryCtxRetain(void **context, int used) { device = used; *context = &count; return call(3); }
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def before_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """torch is not imported, but can be: returns its library folder, with the library of a build with CUDA."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    folder = tmp_path / "installed" / "torch" / "lib"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "libtorch_cuda.so").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    return folder


def create(driver: Path) -> None:
    thread = start_context(str(driver))
    assert thread is not None and not thread.daemon, "the interpreter waits for it"
    thread.join()


def calls_of(driver: Path) -> list[int]:
    library = ctypes.CDLL(str(driver))
    count = ctypes.c_int.in_dll(library, "count").value
    return list((ctypes.c_int * 8).in_dll(library, "calls"))[:count]


def test_the_context_of_the_first_device_is_created(driver: Path, before_torch: Path) -> None:
    create(driver)
    assert calls_of(driver) == [1, 2, 3]
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(driver)), "device").value == 40


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without records of asyncio, which logs objects of earlier tests when they are collected."""
    return [record for record in caplog.records if record.name.startswith("tcdeploy")]


@pytest.mark.parametrize(("failing", "name"), [(1, "cuInit"), (2, "cuDeviceGet"), (3, "cuDevicePrimaryCtxRetain")])
def test_an_error_of_the_driver_is_logged_and_ends_the_attempt(
    failing: int, name: str, driver: Path, before_torch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ctypes.c_int.in_dll(ctypes.CDLL(str(driver)), "failing").value = failing
    with caplog.at_level(logging.DEBUG):
        create(driver)
    assert calls_of(driver) == [1, 2, 3][:failing]
    assert [(record.levelno, f"{name} returned 100" in record.message) for record in own_records(caplog)] == [
        (logging.DEBUG, True)
    ]


def test_without_a_driver_nothing_happens(tmp_path: Path, before_torch: Path, caplog: pytest.LogCaptureFixture) -> None:
    other_library = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-o", other_library, "-x", "c", "/dev/null"], check=True)
    for driver in (tmp_path / "missing.so", other_library):
        with caplog.at_level(logging.DEBUG):
            create(driver)
    assert [record.levelno for record in own_records(caplog)] == [logging.DEBUG] * 2


def test_no_context_is_created_once_torch_is_imported(
    driver: Path, before_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert start_context(str(driver)) is None
    assert calls_of(driver) == []


def test_no_context_is_created_for_a_torch_without_cuda(driver: Path, before_torch: Path) -> None:
    (before_torch / "libtorch_cuda.so").unlink()
    assert start_context(str(driver)) is None
    assert calls_of(driver) == []


def test_a_start_on_a_cpu_creates_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(start, "start_context", lambda: events.append("context"))
    monkeypatch.setattr(model_code, "start_from_code", lambda request: events.append(request.recipe.device))
    for device in (None, "cuda", "cpu"):
        start.prepare(Recipe(model="builtin:tiny", device=device))
    assert events == ["context", None, "context", "cuda", "cpu"]


def test_a_refused_start_creates_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(start, "start_context", lambda: events.append("context"))
    with pytest.raises(UsageError):
        start.prepare(Recipe(model="builtin:tiny", programs="aot"), eager=True)
    assert events == []


def test_a_fetch_before_the_start_begins_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fetch` imports torch, and `start_context` does nothing after that."""
    events: list[Any] = []
    monkeypatch.setattr(start, "start_context", lambda: events.append("context"))
    monkeypatch.setattr(model_code, "start_from_code", lambda request: events.append("start"))
    monkeypatch.setattr(fetching, "fetch", lambda recipe, *_: events.append("fetch") or mock.Mock(url=""))
    recipe = Recipe(model="builtin:tiny")
    fetch_cache(recipe, CacheSource("bundles", True, False), None, NullProgress())
    start.prepare(recipe)
    assert events == ["context", "fetch", "start"]
    start.prepare(recipe)
    assert events[3:] == ["context", "start"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_fetch_initialises_the_gpu_while_it_unpacks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    planned = mock.Mock()
    planned.plan.device = device
    monkeypatch.setattr(fetching, "decide", lambda *_, **__: events.append("decide") or planned)
    monkeypatch.setattr(fetching, "start_initializing_gpu", lambda: events.append("gpu"))
    monkeypatch.setattr(fetching, "check_folder", mock.Mock(side_effect=TrustError("stop", "")))
    with pytest.raises(TrustError):
        fetching.fetch(Recipe(model="builtin:tiny"), CacheSource("bundles", True, False))
    assert events == ["decide", *["gpu"] * (device == "cuda")]
