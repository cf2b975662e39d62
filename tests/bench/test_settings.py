"""What cannot be measured is refused by the record itself, or against the Plan; nothing here needs torch."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench.settings import (
    DecodeSettings,
    PrefillSettings,
    ServeSettings,
    StartupSettings,
    ThroughputSettings,
)
from tcdeploy.errors import UsageError
from tcdeploy.planning.plan import Plan, make_plan
from tests.machines import LAPTOP, LLAMA_8B, make_recipe


@pytest.fixture
def plan() -> Plan:
    return make_plan(make_recipe(context=1024), LAPTOP, LLAMA_8B)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (DecodeSettings, {"context_length": 0}),
        (DecodeSettings, {"repeats": 0}),
        (DecodeSettings, {"steps": -1}),
        (DecodeSettings, {"price_per_hour": 0.0}),
        (DecodeSettings, {"price_per_hour": math.nan}),
        (PrefillSettings, {"lengths": (128, 0)}),
        (PrefillSettings, {"repeats": 0}),
        (ThroughputSettings, {"requests": 0}),
        (ThroughputSettings, {"input_length": -5}),
        (ThroughputSettings, {"output_length": 0}),
        (ThroughputSettings, {"request_rate": 0.0}),
        (ThroughputSettings, {"request_rate": math.nan}),
        (StartupSettings, {"warm_runs": 0}),
        (StartupSettings, {"prompt_length": 0}),
    ],
)
def test_what_is_not_above_nothing_is_refused(kind: Any, given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(
        UsageError, match=f"{name.replace('_', ' ').split()[-1].rstrip('s')}.* must be above 0"
    ) as found:
        kind(**given)
    assert found.value.hint


@pytest.mark.parametrize("make", [ThroughputSettings, functools.partial(ServeSettings, url="http://127.0.0.1:1")])
def test_clients_wait_or_requests_arrive(make: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        make(request_rate=3.0, concurrency=2)
    with pytest.raises(UsageError, match="concurrency is -1"):
        make(concurrency=-1)


def test_an_unknown_baseline_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no baseline 'vllm'") as found:
        DecodeSettings(baselines=("eager", "vllm"))
    assert "eager|generate|region" in found.value.hint


def test_files_that_cannot_be_written_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        DecodeSettings(output=str(tmp_path))
    with pytest.raises(UsageError, match="does not exist"):
        DecodeSettings(output=str(tmp_path / "no" / "bench.json"))
    DecodeSettings(output=str(tmp_path / "bench.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no kind of picture"):
        DecodeSettings(plot=str(tmp_path / "bench.txt"))


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs matplotlib") as found:
        DecodeSettings(plot=str(tmp_path / "bench.png"))
    assert found.value.hint == "pip install 'tcdeploy[plot]'"


@pytest.mark.parametrize(
    ("fits", "beyond"),
    [
        (DecodeSettings(context_length=1024), {"context_length": 1025}),
        (PrefillSettings(lengths=(8, 1022)), {"lengths": (8, 1023)}),
        (ThroughputSettings(input_length=1000, output_length=24), {"output_length": 25}),
        (StartupSettings(prompt_length=1022), {"prompt_length": 1023}),
    ],
)
def test_lengths_end_at_the_context(plan: Plan, fits: Any, beyond: dict[str, Any]) -> None:
    fits.check_against_plan(plan)
    with pytest.raises(UsageError, match="the context is 1024"):
        replace(fits, **beyond).check_against_plan(plan)


def test_a_breakdown_needs_a_gpu(plan: Plan) -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        DecodeSettings(breakdown=True).check_against_plan(plan)
    DecodeSettings(breakdown=True).check_against_plan(replace(plan, device="cuda"))
