"""Old flags, recipe keys and JSON keys keep working for one release."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tcdeploy.bench.floor import Rates
from tcdeploy.bench.throughput import ThroughputRow
from tcdeploy.bundle.compare import Comparison
from tcdeploy.bundle.unpack import UnpackResult
from tcdeploy.bundle.verify import BucketReplay, VerifiedPlan
from tcdeploy.bundle.why import Forecast
from tcdeploy.cache.inventory import CachedPlan, GcResult
from tcdeploy.cli.deprecated import RENAMED_JSON_KEYS, add_old_json_keys, replace_renamed_flags
from tcdeploy.planning.bucket_record import BucketRecord, GreedyTokens, Trial
from tcdeploy.planning.plan import Plan
from tcdeploy.remote.transfer import PushResult

REPORTED = (
    Plan, BucketRecord, GreedyTokens, Trial, Comparison, UnpackResult, PushResult, VerifiedPlan, BucketReplay, Forecast,
    CachedPlan, GcResult, ThroughputRow, Rates,
)  # fmt: skip
RunCli = Callable[..., subprocess.CompletedProcess[str]]


def field_names(reported: Any) -> set[str]:
    if dataclasses.is_dataclass(reported):
        return {item.name for item in dataclasses.fields(reported)}
    return set(reported._fields)


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        (["warm", "--prefill-burst", "2"], ["warm", "--max-consecutive-prefills", "2"]),
        (["warm", "--prefill-burst=2"], ["warm", "--max-consecutive-prefills=2"]),
    ],
)
def test_a_renamed_flag_is_replaced_with_a_warning(
    arguments: list[str], replaced: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replace_renamed_flags(arguments) == replaced
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("warning: --prefill-burst is deprecated")
    assert "--max-consecutive-prefills" in captured.err


def test_other_words_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "m", "--max-consecutive-prefills", "2", "--", "--prefill-burst"]
    assert replace_renamed_flags(arguments) == arguments
    assert capsys.readouterr().err == ""


def test_reports_hold_old_keys_beside_new_ones_at_any_depth() -> None:
    report = {"buckets": ({"variant": "default", "trials": [{"variant": "skinny"}]},), "command": "warm"}
    assert add_old_json_keys(report) == {
        "buckets": [
            {
                "candidate": "default",
                "variant": "default",
                "trials": [{"candidate": "skinny", "variant": "skinny"}],
            }
        ],
        "command": "warm",
    }


@pytest.mark.parametrize("reported", REPORTED, ids=lambda reported: reported.__name__)
def test_an_old_key_never_replaces_a_current_one(reported: Any) -> None:
    names = field_names(reported)
    assert not {RENAMED_JSON_KEYS[name] for name in names & RENAMED_JSON_KEYS.keys()} & names


def test_every_renamed_key_is_in_a_report() -> None:
    assert set(RENAMED_JSON_KEYS) <= set().union(*map(field_names, REPORTED))


def test_a_command_accepts_the_old_flag_and_reports_both_keys(run_cli: RunCli) -> None:
    completed = run_cli("warm", "builtin:tiny", "--dry-run", "--json", "--prefill-burst", "7")
    assert completed.returncode == 0, completed.stderr
    document = json.loads(completed.stdout)
    assert (document["schema"], document["plan"]["max_consecutive_prefills"]) == (2, 7)
    assert document["plan"]["prefill_burst"] == 7
    assert "warning: --prefill-burst is deprecated" in completed.stderr
