"""Checks do not affect each other, and findings come first, those that stop a start before the others."""

from __future__ import annotations

import threading

import pytest

from tcdeploy.doctor.examination import CHECKS, examine
from tcdeploy.doctor.result import Request, Result, blocking, finding, note, ok
from tcdeploy.doctor.torch_probe import TorchProbe


def check_that_raises(request: Request) -> Result:
    raise RuntimeError("a bug")


def test_a_check_that_raises_or_hangs_does_not_end_the_others() -> None:
    release = threading.Event()

    def hang(request: Request) -> Result:
        release.wait()
        return ok("too late")

    checks = {"hangs": hang, "raises": check_that_raises, "works": lambda request: ok("fine")}
    results = examine(Request(), checks, limit_seconds=0.5)
    release.set()
    assert [(result.check, result.state) for result in results] == [
        ("hangs", "finding"), ("raises", "note"), ("works", "ok"),
    ]  # fmt: skip
    assert results[0].summary == "could not be checked: no result within 0 s"
    assert results[1].summary == "could not be checked: RuntimeError: a bug"


def test_results_are_sorted_by_how_bad_they_are() -> None:
    checks = {
        "fine": lambda request: ok(""),
        "interesting": lambda request: note(""),
        "slow": lambda request: finding("", "cure"),
        "broken": lambda request: [blocking("first", "cure"), blocking("second", "cure")],
    }
    results = examine(Request(), checks)
    assert [result.check for result in results] == ["broken", "broken", "slow", "interesting", "fine"]
    assert [result.summary for result in results[:2]] == ["first", "second"]


def test_the_probe_runs_once_for_all_checks() -> None:
    calls = []

    def run_probe() -> TorchProbe:
        calls.append(1)
        return TorchProbe({}, {}, "failed")

    checks = {str(number): lambda request: ok(request.probe.failure) for number in range(8)}
    results = examine(Request(run_probe=run_probe), checks)
    assert {result.summary for result in results} == {"failed"} and len(calls) == 1


def test_every_check_reports_something_without_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where Python cannot start another process: no check raises."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    results = examine(Request(run_probe=lambda: TorchProbe({}, {}, "Python cannot be started: no memory")))
    assert {result.check for result in results} == set(CHECKS)
    assert not [result for result in results if "Error" in result.summary]
    unchecked = {result.check for result in results if "Python cannot be started: no memory" in result.summary}
    assert {"torch", "GPU", "driver", "private names", "bytecode"} <= unchecked
