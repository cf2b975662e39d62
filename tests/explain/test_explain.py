"""`tcdeploy explain` on models with planted defects, on a healthy one, and on the embedded model with step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS, TINY_FLAGS
from tests.explain.planted_models import DEFECTS, line_of, save_planted

REGIONS_FAIL = "has a graph break with --region layer"


def arguments(model: str, tmp_path: Path, *more: str) -> list[str]:
    flags = ("--load-format", "dummy", "--buckets", "32", "--batch-sizes", "1", "--cache-dir", str(tmp_path / "cache"))
    return [model, *flags, *more]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_with_its_line_cost_and_cure(name: str, run_cli: Any, tmp_path: Path) -> None:
    """The model with `print` is also compiled, which fails; the others are only traced, which is faster."""
    defect = DEFECTS[name]
    model = save_planted(tmp_path / "planted", defect)
    flags = ("--trust-remote-code", "--json", *(() if name == "print" else ("--no-measure",)))
    done = run_cli("explain", *arguments(model, tmp_path, *flags))
    assert done.returncode == 6, done.stderr
    assert f"error: 1 finding in {model}" in done.stderr
    document = json.loads(done.stdout)
    [finding] = document["findings"]
    assert (finding["kind"], finding["cause"], finding["is_blocking"]) == (
        defect.kind, defect.cause, defect.is_blocking
    )  # fmt: skip
    location = finding["location"]
    assert (location["file"], location["line"]) == (f"{model}/modeling_planted.py", line_of(model, defect.code))
    assert location["code"] == defect.code
    assert finding["module"] == ("model.layers.0" if defect.is_in_layer else "model.layers.0.mlp")
    assert defect.cure in finding["cure"] and finding["meaning"] and finding["torch_reason"]
    assert bool(finding["costs"]) == defect.is_blocking
    for cost in finding["costs"]:
        assert 0 < cost["module_ms"] < cost["region_ms"] <= cost["step_ms"]
        assert 0 < cost["module_share"] < cost["region_share"] <= 1
    if name == "branch":  # refused before there is a plan
        assert document["regions"] == [] and document["not_measured"] == "the model cannot be started"
    else:
        [region] = document["regions"]
        assert (region["kind"], region["modules"]) == ("layer/0", 2) and region["guards"]["decode"] > 0
        assert (region["graphs"]["prefill"] > 1) == (finding["kind"] == "graph break")
        assert region["recompilations"] == {"prefill": int(name == "length"), "decode": 0}
    if name == "print":
        assert document["not_measured"] == "the model cannot be compiled"
        assert {cost["bucket"] for cost in finding["costs"]} == {"prefill:32", "decode:1"}


def test_a_healthy_model_has_one_graph_per_region(run_cli: Any, tmp_path: Path) -> None:
    model = save_planted(tmp_path / "healthy", None)
    done = run_cli("explain", *arguments(model, tmp_path, "--trust-remote-code", "--no-measure"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no graph breaks, no recompilations: 2 regions of 1 kind, one graph each\n")
    assert "not requested (--no-measure)" in done.stdout
    assert list(tmp_path.glob("cache/manifests/*.json")) == [], "nothing was compiled"


def test_the_error_of_a_start_names_explain(run_cli: Any, tmp_path: Path) -> None:
    defect = DEFECTS["c-function"]
    model = save_planted(tmp_path / "planted", defect)
    failed = run_cli("compile", *arguments(model, tmp_path, "--trust-remote-code"))
    assert failed.returncode == 1
    assert REGIONS_FAIL in failed.stderr and "hint: tcdeploy explain MODEL" in failed.stderr


def test_modelling_code_of_a_model_runs_only_if_trusted(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("explain", *arguments(save_planted(tmp_path / "healthy", None), tmp_path, "--no-measure"))
    assert result.returncode == 1
    assert "requires modelling code from its repository" in result.stderr and "--trust-remote-code" in result.stderr


def test_the_embedded_model_is_timed_profiled_and_traced(cache_dir: str, run_cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    flags = (*TINY_FLAGS, "--cache-dir", cache_dir, "--kernels", "--trace", str(folder), "--json")
    done = run_cli("explain", TINY, *flags)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    buckets = [f"prefill:{size}" for size in TINY_BUCKETS] + [f"decode:{size}" for size in TINY_BATCH_SIZES]
    assert document["findings"] == [] and document["not_measured"] == ""
    assert [region["graphs"] for region in document["regions"]] == [{"prefill": 1, "decode": 1}]
    payoffs = document["payoff"]["buckets"]
    assert [payoff["bucket"] for payoff in payoffs] == buckets
    assert all(payoff["cold_seconds"] > payoff["warm_seconds"] > 0 for payoff in payoffs)
    assert document["payoff"]["request"]["prompt_tokens"] == 128
    assert [kernels["bucket"] for kernels in document["kernels"]] == buckets
    for kernels in document["kernels"]:
        rows = kernels["kernels"]
        names = {row["name"] for row in rows}
        assert "aten::mm" in names and any(name.startswith("cpp_fused_") for name in names)
        assert [row["us"] for row in rows] == sorted((row["us"] for row in rows), reverse=True)
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert sum(row["us"] for row in rows) == pytest.approx(kernels["step_us"])
    [trace] = folder.iterdir()
    assert document["trace"] == {"path": str(trace), "omitted_records": 0}
    assert "dynamo_output_graph" in trace.read_text()
