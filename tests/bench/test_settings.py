"""Settings are validated on construction, and against the Plan; neither needs torch."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.settings import (
    DecodeSettings,
    PrefillSettings,
    StartupSettings,
    ThroughputSettings,
)
from tcdeploy.errors import UsageError
from tcdeploy.planning.installation import install_command
from tcdeploy.planning.plan import Plan, make_plan
from tests.machines import LAPTOP, LLAMA_8B, make_recipe


@pytest.fixture
def plan() -> Plan:
    return make_plan(make_recipe(context=1024), LAPTOP, LLAMA_8B)


@pytest.mark.parametrize(
    ("settings_class", "invalid"),
    [
        (DecodeSettings, {"context_length": 0}),
        (DecodeSettings, {"repeats": 0}),
        (DecodeSettings, {"steps": -1}),
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
def test_values_that_are_not_positive_are_refused(settings_class: Any, invalid: dict[str, Any]) -> None:
    [name] = invalid
    with pytest.raises(
        UsageError, match=f"{name.replace('_', ' ').split()[-1].rstrip('s')}.* must be above 0"
    ) as raised:
        settings_class(**invalid)
    assert raised.value.hint


@pytest.mark.parametrize(
    "make_settings", [ThroughputSettings, functools.partial(ServeSettings, url="http://127.0.0.1:1")]
)
def test_rate_and_concurrency_exclude_each_other(make_settings: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        make_settings(request_rate=3.0, concurrency=2)
    with pytest.raises(UsageError, match="concurrency is -1"):
        make_settings(concurrency=-1)


def test_an_unknown_baseline_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown baseline 'vllm'") as raised:
        DecodeSettings(baselines=("eager", "vllm"))
    assert "eager|generate|region" in raised.value.hint


def test_files_that_cannot_be_written_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        DecodeSettings(output=str(tmp_path))
    with pytest.raises(UsageError, match="does not exist"):
        DecodeSettings(output=str(tmp_path / "no" / "bench.json"))
    DecodeSettings(output=str(tmp_path / "bench.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_plot_needs_a_supported_suffix(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a supported plot format"):
        DecodeSettings(plot=str(tmp_path / "bench.txt"))


def test_a_plot_without_matplotlib_hints_at_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs matplotlib") as raised:
        DecodeSettings(plot=str(tmp_path / "bench.png"))
    assert raised.value.hint == install_command("plot")


@pytest.mark.parametrize(
    ("fits", "beyond"),
    [
        (DecodeSettings(context_length=1024), {"context_length": 1025}),
        (PrefillSettings(lengths=(8, 1022)), {"lengths": (8, 1023)}),
        (ThroughputSettings(input_length=1000, output_length=24), {"output_length": 25}),
    ],
)
def test_lengths_are_limited_to_the_context(plan: Plan, fits: Any, beyond: dict[str, Any]) -> None:
    fits.check_against_plan(plan)
    with pytest.raises(UsageError, match="the context is 1024"):
        replace(fits, **beyond).check_against_plan(plan)


def test_a_breakdown_needs_a_gpu(plan: Plan) -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        DecodeSettings(breakdown=True).check_against_plan(plan)
    DecodeSettings(breakdown=True).check_against_plan(replace(plan, device="cuda"))


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"trace": "t.jsonl", "requests": 3}, "--requests has no effect with --trace"),
        ({"sweep": (4.0,), "request_rate": 3.0}, "--request-rate has no effect with --sweep"),
        ({"sweep": (4.0,), "concurrency": 3}, "--concurrency has no effect with --sweep"),
        ({"duration": 5.0}, "--duration has no effect without --request-rate"),
        ({"duration": 5.0, "request_rate": 2.0, "requests": 9}, "--requests has no effect with --duration"),
        ({"ttft_limit": 1.0}, "--ttft-limit has no effect without --sweep"),
        ({"sweep": (4.0,), "compare": ("a.json",)}, "--compare has no effect without --plot"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(UsageError, match=fact) as raised:
        ServeSettings(url="http://127.0.0.1:1", **options)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"length_spread": 1.0}, "length spread is 1.0"),
        ({"length_spread": math.nan}, "length spread is nan"),
        ({"shared_prefix": -1}, "shared prefix is -1"),
        ({"sweep": (4.0, 0.0)}, "a rate of --sweep is 0.0"),
        ({"sweep": (math.inf,)}, "a rate of --sweep is inf, and must be finite"),
        ({"sweep": (4.0,), "duration": math.inf}, "duration is inf"),
        ({"sweep": (4.0,), "ttft_limit": math.inf}, "ttft limit is inf"),
        ({"slo": {"ttft": math.inf}}, "the limit of ttft is inf"),
        ({"sweep": (4.0,), "duration": 0.0}, "duration is 0.0"),
        ({"sweep": (4.0,), "tpot_limit": 0.0}, "tpot limit is 0.0"),
    ],
)
def test_loads_that_make_no_sense_are_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        ServeSettings(url="http://127.0.0.1:1", **options)


def test_the_load_of_one_rate_keeps_everything_but_the_sweep() -> None:
    settings = ServeSettings(url="http://x", sweep=(4.0, 8.0), duration=10.0, ttft_limit=9.0, seed=3)
    at_rate = settings.at_rate(8.0)
    assert (at_rate.request_rate, at_rate.num_requests, at_rate.seed) == (8.0, 80, 3)
