"""/metrics and /status show the same figures, because both read one ServerFigures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tcdeploy.engine.schedule.scheduler import SchedulerStats
from tcdeploy.engine.schedule.step_costs import StepTotals
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.status import ModelFigures, RecentStats, ServerFigures, status_json

PARITY = SimpleNamespace(max_difference=0.25, eager_max_difference=0.375, kl=0.5, eager_kl=0.75)
RECORD: Any = SimpleNamespace(bucket="decode:4", outcome="hit", variant="default", parity=PARITY)
FIGURES = ServerFigures(
    model_name="tiny", state="ready", uptime_seconds=3.0,
    scheduler=SchedulerStats(waiting=5, prefilling=1, running=2, used_blocks=8, preemptions=7),
    rejections={"queue_full": 2, "loading": 1},
    model=ModelFigures(
        kv_cache_usage=0.5, step_counts={"decode:4": 11}, computed_tokens={"decode:4": 44},
        padding_tokens={"decode:4": 13}, uncaptured_runs=1, late_captures=3, longest_late_capture_seconds=0.25,
        step_totals={"mixed": StepTotals(6, 0.25, 0.5)}, step_corrections={"mixed": 1.5}, late_launches=4,
        missed_shapes={"prefill:256": 3}, recompiles=0, stage_seconds={"load": 1.5}, import_seconds={"torch": 0.5},
        weights_gb_per_second=24.5, generation_defaults={"top_k": 20},
        records=(RECORD,), tier="eager", num_buckets=4, failed_buckets=1,
    ),
)  # fmt: skip


def _own_labels(labels: dict[str, str]) -> list[str]:
    return [value for name, value in labels.items() if name != "model_name"]


def samples(figures: ServerFigures) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    metrics.register_figures(lambda: figures)
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name.removeprefix("tcdeploy:"), *_own_labels(sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_and_status_show_the_same_figures() -> None:
    values, status = samples(FIGURES), status_json(FIGURES, RecentStats())
    [bucket] = status["buckets"]
    assert values["num_requests_running",] == status["running"] == 3
    assert values["num_requests_waiting",] == status["waiting"] == 5
    assert values["kv_cache_usage_perc",] == status["kv_cache_usage"] == 0.5
    assert values["bucket_steps_total", "decode:4"] == bucket["steps"] == 11
    assert values["bucket_padding_tokens_total", "decode:4"] == bucket["padding_tokens"] == 13
    assert values["bucket_tokens_total", "decode:4"] == 44
    assert (values["graph_captures_total",], values["longest_graph_capture_seconds",]) == (3, 0.25)
    assert values["recompiles_total",] == status["recompiles"] == 0
    assert values["startup_seconds", "load"] == status["stage_seconds"]["load"] == 1.5
    assert values["startup_import_seconds", "torch"] == status["import_seconds"]["torch"] == 0.5
    assert values["weights_read_gb_per_second",] == status["weights_gb_per_second"] == 24.5
    assert status["tier"] == "eager" and (values["start_tier", "eager"], values["start_tier", "warm"]) == (1, 0)
    assert [values["buckets", state] for state in ("compiled", "eager", "failed")] == [1, 2, 1]
    assert (len(status["buckets"]), status["num_buckets"]) == (1, 4)
    assert status["generation_defaults"] == {"top_k": 20}
    assert status["rejections"] == 3 and values["admission_rejections_total", "queue_full"] == 2
    assert values["num_preemptions_total",] == 7 and values["missed_shapes_total", "prefill:256"] == 3


def test_predicted_and_measured_times_of_steps_stand_side_by_side() -> None:
    values = samples(FIGURES)
    assert (values["step_predicted_seconds_total", "mixed"], values["step_seconds_total", "mixed"]) == (0.25, 0.5)
    assert (values["steps_measured_total", "mixed"], values["step_correction", "mixed"]) == (6, 1.5)
    assert values["late_launches_total",] == 4


def test_while_loading_there_are_no_figures_of_the_model() -> None:
    loading = ServerFigures("tiny", "loading", 1.0, SchedulerStats(0, 0, 0, 0, 0), {"loading": 0}, None)
    values, status = samples(loading), status_json(loading, RecentStats())
    assert ("kv_cache_usage_perc",) not in values and values["admission_rejections_total", "loading"] == 0
    assert (status["state"], status["buckets"], status["kv_cache_usage"]) == ("loading", [], 0.0)


def test_the_latencies_of_the_status_are_percentiles_of_the_recent_ones() -> None:
    recent = RecentStats()
    recent.time_to_first_token.extend(float(value) for value in range(100, -1, -1))
    loading = ServerFigures("tiny", "loading", 1.0, SchedulerStats(0, 0, 0, 0, 0), {"loading": 0}, None)
    assert status_json(loading, recent)["latency"] == [
        {"name": "first token", "count": 101, "p50": 50.0, "p90": 90.0, "p99": 99.0},
        {"name": "between tokens", "count": 0, "p50": None, "p90": None, "p99": None},
    ]
