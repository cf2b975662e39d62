"""/metrics: series with known labels exist from the start, and dashboards for vLLM find their names and labels.

`rate()` misses the first increment of a new series, so series start at zero.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT, TINY
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, serving

# Names in the Grafana dashboards that vLLM publishes.
VLLM_NAMES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
    "prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_max_tokens_bucket",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "request_params_n_bucket",
    "request_time_per_output_token_seconds_bucket",
)  # fmt: skip
DASHBOARD = ROOT / "recipes/deploy/compose/grafana/dashboard.json"
WITHOUT_MODEL = ("http_", "process_", "python_")  # prefixes of names that have no label of the model


@pytest.fixture(scope="module")
def vllm_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, prepared_fork_server: ForkServer
) -> Iterator[ServerProcess]:
    flags = ("--metrics-prefix", "vllm:", "--log-requests", "text")
    home = tmp_path_factory.mktemp("home")
    with serving(home, warm_cache, *flags, fork_server=prepared_fork_server) as started:
        yield started


def scrape(server: ServerProcess) -> list[Any]:
    text = httpx.get(f"{server.address}/metrics").text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value_of(server: ServerProcess, name: str, **labels: str) -> float:
    [sample] = [sample for sample in scrape(server) if sample.name == name and labels.items() <= sample.labels.items()]
    return float(sample.value)


def test_names_and_labels_are_those_of_vllm_with_its_prefix(vllm_server: ServerProcess) -> None:
    samples = scrape(vllm_server)
    names = {sample.name for sample in samples}
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= names
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "http_requests_total"} <= names
    models = [sample.labels.get("model_name") for sample in samples if not sample.name.startswith(WITHOUT_MODEL)]
    assert set(models) == {TINY}


def test_a_finished_request_is_in_all_histograms(vllm_server: ServerProcess) -> None:
    before = value_of(vllm_server, "vllm:request_prompt_tokens_sum")
    vllm_server.client.completions.create(model=TINY, prompt=[3, 4, 5], max_tokens=7, temperature=0, n=2)
    assert value_of(vllm_server, "vllm:request_prompt_tokens_sum") == before + 3
    assert value_of(vllm_server, "vllm:request_params_n_sum") >= 2
    seconds = {
        name: value_of(vllm_server, f"vllm:{name}_sum")
        for name in (
            "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
            "request_inference_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds",
        )
    }  # fmt: skip
    assert all(value > 0 for value in seconds.values()), seconds
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert sum(seconds[part] for part in parts) == pytest.approx(seconds["e2e_request_latency_seconds"])


def test_prompt_tokens_in_the_prefix_cache_are_counted(vllm_server: ServerProcess) -> None:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    counts = []
    for _ in range(2):
        vllm_server.client.completions.create(model=TINY, prompt=[9] * 40, max_tokens=2)
        counts.append([value_of(vllm_server, name) for name in names])
    (queries, hits), (later_queries, later_hits) = counts
    assert later_queries - queries == 40
    assert later_hits - hits == 32, "two blocks of 16 tokens"


def test_a_client_that_disconnects_is_an_abort_and_its_log_line_has_its_tokens(vllm_server: ServerProcess) -> None:
    aborted = value_of(vllm_server, "vllm:request_success_total", finished_reason="abort")
    body = {"prompt": [3, 4, 5], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{vllm_server.address}/v1/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        next(response.iter_lines())
    deadline = time.monotonic() + 30
    while not (line := [line for line in vllm_server.stderr if request_id in line]):
        assert time.monotonic() < deadline, "the request is not in the log"
        time.sleep(0.05)
    assert re.search(
        r"POST /v1/completions 200 [\d.]+ ms, 3 prompt tokens, \d+ new tokens \(abort\), request ", line[0]
    )
    assert value_of(vllm_server, "vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_each_metric_and_label_of_the_grafana_dashboard_exists(vllm_server: ServerProcess) -> None:
    dashboard = json.loads((DASHBOARD).read_text())
    labels = {sample.name.replace("vllm:", "tcdeploy:"): set(sample.labels) for sample in scrape(vllm_server)}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"([a-z0-9_:]+)\{", expression)}
    assert len(used) > 20
    assert used - labels.keys() == set()
    for expression in expressions:
        names = re.findall(r"([a-z0-9_:]+)\{", expression)
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        selected = set(re.findall(r"[{ ]([a-z_]+)=~", expression)) - {"instance"}  # Prometheus adds the instance
        for name in names:
            assert grouped | selected <= labels[name], expression


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((DASHBOARD).read_text())
    cells = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
        for panel in dashboard["panels"]
        for column in range(panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(column for column, _ in cells) < 24


def own_labels(labels: dict[str, str]) -> list[str]:
    return [value for name, value in labels.items() if name != "model_name"]


def test_every_series_with_a_known_label_starts_at_zero(serve: Callable[..., Any]) -> None:
    def samples(server: ServerProcess) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(httpx.get(f"{server.address}/metrics").text)
        counters = [sample for family in families if family.type == "counter" for sample in family.samples]
        return {
            (sample.name, *own_labels(sample.labels)): sample.value
            for sample in counters
            if sample.name.endswith("_total")
        }

    with serve() as server:
        before = samples(server)
        server.client.completions.create(model="builtin:tiny", prompt="A list is a", max_tokens=3)
        after = samples(server)
    assert set(before) == set(after)
    assert before["tcdeploy:eager_fallbacks_total",] == 0
    for reason in ("loading", "queue_full", "draining", "dead"):
        assert before["tcdeploy:admission_rejections_total", reason] == 0
    for reason, count in {"stop": 0, "length": 1}.items():
        assert before["tcdeploy:request_success_total", reason] == 0
        assert after["tcdeploy:request_success_total", reason] == count
    assert {key[1] for key in before if key[0] == "tcdeploy:bucket_steps_total"} == {
        "prefill:32", "prefill:128", "decode:1", "decode:4",
    }  # fmt: skip
