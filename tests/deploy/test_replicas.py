"""What the recipes assume of a server: its routes, its metrics, and that replicas are replaced without failed requests.

The rolling update of the Kubernetes manifests is played with processes. `Service` routes requests as kube-proxy does.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.recipe_files import KUBERNETES, of_kind, query_metrics, read_documents, render
from tests.server.conftest import ServerProcess
from tests.server.test_faults import events, open_streams

HPA = KUBERNETES / "components/autoscale-hpa"
KEDA = KUBERNETES / "components/autoscale-keda"
KSERVE = KUBERNETES / "kserve"
PREFIX = "tcdeploy:"


@pytest.fixture(scope="module")
def metrics(server: ServerProcess) -> set[str]:
    text = httpx.get(f"{server.address}/metrics").text
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    return {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}


def test_the_metrics_of_the_autoscalers_exist(metrics: set[str]) -> None:
    [scaled] = read_documents(KEDA / "scaled-object.yaml")
    [served] = read_documents(KSERVE / "inference-service.yaml")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    queries += [item["external"]["metric"]["query"] for item in served["spec"]["predictor"]["autoScaling"]["metrics"]]
    used = [name for query in queries for name in query_metrics(query)]
    assert used == ["num_requests_waiting", "kv_cache_usage_perc", "num_requests_waiting"]
    assert set(used) <= metrics


def test_prometheus_adapter_makes_the_metrics_of_the_autoscaler_from_those_of_the_server(metrics: set[str]) -> None:
    [values] = read_documents(HPA / "prometheus-adapter-values.yaml")
    [autoscaler] = read_documents(HPA / "horizontal-pod-autoscaler.yaml")
    [rule] = values["rules"]["custom"]
    [selected] = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    name, replacement = rule["name"]["matches"], re.sub(r"\$\{(\d)\}", r"\\\1", rule["name"]["as"])
    made = {re.sub(name, replacement, PREFIX + metric) for metric in metrics if re.fullmatch(selected, PREFIX + metric)}
    assert made == {metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]}
    assert (
        {"namespace", "pod"} == set(rule["resources"]["overrides"]) == set(re.findall(r"(\w+)!=", rule["seriesQuery"]))
    )


def test_the_routes_of_the_probes_exist_and_return_200(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.address}/openapi.json").json()["paths"]
    containers = of_kind(render(KUBERNETES / "base"), "Deployment")["spec"]["template"]["spec"]["containers"]
    containers += of_kind(render(KSERVE), "ServingRuntime")["spec"]["containers"]
    for container in containers:
        probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
        for path in probes.values():
            assert "get" in paths[path] and httpx.get(server.address + path).status_code == 200


class Service:
    """Routes each request to one of the endpoints in turn, as a Service of Kubernetes does.

    Readiness probes add and remove an address. The address of a pod that is being deleted is removed DELAY_S later:
    Kubernetes changes the endpoints, and then the rules of each node.
    """

    DELAY_S, PROBE_S = 0.6, 0.1

    def __init__(self) -> None:
        self._deleted: dict[str, float] = {}  # address: time from which the pod gets no request
        self._routes: tuple[str, ...] = ()
        self._turn = itertools.count()
        self._lock, self._sending = threading.Lock(), Counter[str]()  # open requests by address
        self._stopped = threading.Event()
        self._prober = threading.Thread(target=self._probe_forever)

    def __enter__(self) -> Service:
        self._prober.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._prober.join()

    def add_pod(self, server: ServerProcess) -> None:
        self._deleted[server.address] = float("inf")

    def delete_pod(self, server: ServerProcess) -> None:
        self._deleted[server.address] = time.monotonic() + self.DELAY_S

    def wait_until_routed(self, server: ServerProcess) -> None:
        deadline = time.monotonic() + 60
        while server.address not in self._routes:
            assert time.monotonic() < deadline, "the pod is not ready"
            time.sleep(self.PROBE_S)

    @property
    def routes(self) -> list[str]:
        now = time.monotonic()
        return [address for address in self._routes if now < self._deleted[address]]

    @contextlib.contextmanager
    def request(self) -> Iterator[str]:
        """The address for a request that is sent in the block."""
        with self._lock:
            routes = self.routes
            address = routes[next(self._turn) % len(routes)]
            self._sending[address] += 1
        try:
            yield address
        finally:
            with self._lock:
                self._sending[address] -= 1

    def wait_until_answered(self, server: ServerProcess) -> None:
        """Until each request that was routed to the pod has its response. No more may be routed to it."""
        with self._lock:
            assert server.address not in self.routes
        deadline = time.monotonic() + 60
        while self._sending[server.address]:
            assert time.monotonic() < deadline, "a request has no response"
            time.sleep(0.02)

    def _probe_forever(self) -> None:
        while not self._stopped.wait(self.PROBE_S):
            now = time.monotonic()
            pods = [address for address, until in list(self._deleted.items()) if now < until]
            # A pod that is being deleted keeps its route until DELAY_S, whatever its probe says: the rules are old.
            self._routes = tuple(pod for pod in pods if self._deleted[pod] != float("inf") or is_ready(pod))


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ready", timeout=1, verify=False).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def sending_requests(service: Service) -> Iterator[Counter[tuple[str, str]]]:
    """Three clients that pause for 0.1 s before each request, on a new connection. Counts (address, outcome)."""
    outcomes: Counter[tuple[str, str]] = Counter()
    stopped = threading.Event()

    def send() -> None:
        while not stopped.wait(0.1):
            with service.request() as address:
                try:
                    body = {"prompt": [3, 4, 5], "max_tokens": 4}
                    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60, verify=False)
                    outcomes[address, str(answer.status_code)] += 1
                except httpx.TransportError as error:
                    outcomes[address, type(error).__name__] += 1

    with ThreadPoolExecutor(3) as clients:
        for _ in range(3):
            clients.submit(send)
        try:
            yield outcomes
        finally:
            stopped.set()


def replace_replica(serve: Callable[..., Any], pre_stop_s: float) -> tuple[str, str, Counter[tuple[str, str]]]:
    """Start a new server under load, and stop the old one as Kubernetes does. Returns both addresses and all outcomes.

    A stream that the old server has at SIGTERM must reach its end.
    """
    with Service() as service, serve("--drain-timeout", "60") as old, contextlib.ExitStack() as later:
        service.add_pod(old)
        service.wait_until_routed(old)
        with sending_requests(service) as outcomes:
            new = later.enter_context(serve())
            service.add_pod(new)
            service.wait_until_routed(new)
            [stream] = open_streams(old, 1)  # 900 tokens: it still runs at SIGTERM
            service.delete_pod(old)
            if pre_stop_s:
                time.sleep(pre_stop_s)
                service.wait_until_answered(old)  # a client of this busy process may send long after it was routed
            old.process.send_signal(signal.SIGTERM)
            *_, last, done = events(stream)
            assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
            assert old.process.wait(timeout=30) == 0
            time.sleep(Service.DELAY_S)
        return old.address, new.address, outcomes


def test_a_rolling_update_loses_no_request(serve: Callable[..., Any]) -> None:
    old, new, outcomes = replace_replica(serve, pre_stop_s=1.5 * Service.DELAY_S)
    assert {outcome for _, outcome in outcomes} == {"200"}, outcomes
    assert min(outcomes[old, "200"], outcomes[new, "200"]) >= 10, "both replicas had requests"


@pytest.mark.long  # checks the test above, with two more servers
def test_without_pre_stop_requests_are_lost_while_the_pod_still_has_routes(serve: Callable[..., Any]) -> None:
    """What the preStop of the manifests is for. If this passes without it, the test above proves nothing."""
    old, _, outcomes = replace_replica(serve, pre_stop_s=0)
    failed = {(address, outcome) for address, outcome in outcomes if outcome != "200"}
    assert (old, "503") in failed, outcomes
    assert {address for address, _ in failed} == {old}, outcomes
