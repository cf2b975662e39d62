"""Replicas of the embedded model on Ray Serve: clients, scaling under load, a killed replica, and invalid input."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tcdeploy.cache.trust.signing import generate_key, trust
from tcdeploy.scale.ray_config import PREFIX_ROUTER
from tests.conftest import TINY, RunCLI
from tests.deploy.refused_bundles import move_to_another_environment
from tests.hostile.ray_users import attack, find_target, make_folders
from tests.ports import free_port
from tests.scale.ray_deployment import (
    MESSAGES,
    Load,
    RayDeployment,
    model_entry,
    processes_of_home,
    ray_deployment,
    wait_for,
)

AUTOSCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 1, "downscale_delay_s": 4,
    "look_back_period_s": 2, "metrics_interval_s": 0.5,
}  # fmt: skip
NUM_CLIENTS = 8
REPORTED = {
    "generation_tokens_total", "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc",
    "time_to_first_token_seconds_sum", "time_to_first_token_seconds_bucket",
}  # fmt: skip


@pytest.fixture(scope="module")
def deployment(packages: Path) -> Iterator[RayDeployment]:
    """The model `tiny`, which has one or two replicas, behind an ingress with the prefix-aware router."""
    router = {"request_router_class": PREFIX_ROUTER}
    model = model_entry(
        packages, "tiny", autoscaling_config=AUTOSCALING, health_check_period_s=1, request_router_config=router
    )
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))  # of pytest, other users could not enter
        yield cleanup.enter_context(ray_deployment(make_folders(folder), model, route_prefix="/tiny"))


def test_the_openai_client_reaches_the_model(deployment: RayDeployment) -> None:
    with deployment.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        )
        chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(chunks) == chat.choices[0].message.content and len(chunks) > 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")
def test_another_user_gets_neither_the_token_nor_a_file_a_socket_or_a_procedure(deployment: RayDeployment) -> None:
    """Of the Ray that the command has started. `scripts/attack ray_users` attacks thousands of times."""
    target = find_target(deployment)
    assert len(target.sockets) >= 3 and len(target.ports) > 10 and len(target.files) > 30, target
    assert attack(random.Random(23), 120, target) == []


def test_errors_have_the_form_of_the_server_s_own(deployment: RayDeployment) -> None:
    response = httpx.post(f"{deployment.url}/v1/completions", json={"prompt": "a", "max_tokens": -1})
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{deployment.url}/ready").status_code == 200


def test_ray_reports_the_metrics_of_a_replica_with_its_labels(deployment: RayDeployment) -> None:
    """The model `tiny` still has one replica, so its own /metrics has the same values."""
    with deployment.client() as client:
        client.completions.create(model="tiny", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})

    def own() -> dict[str, list[float]]:
        families = text_string_to_metric_families(httpx.get(f"{deployment.url}/metrics").text)
        return {
            sample.name.removeprefix("tcdeploy:"): [sample.value]
            for family in families
            for sample in family.samples
            if sample.name.removeprefix("tcdeploy:") in REPORTED and sample.labels.get("le", "5.0") == "5.0"
        }

    def reported() -> dict[str, list[float]]:
        labels = {"application": "tiny", "deployment": "Model", "model_name": "tiny"}
        return {
            name: list(
                deployment.reported(
                    f"ray_tcdeploy_{name}", **labels, **({"le": "5.0"} if name.endswith("_bucket") else {})
                ).values()
            )
            for name in REPORTED
        }

    assert own().keys() == REPORTED and own()["generation_tokens_total"] >= [5]
    assert wait_for(lambda: reported() == own(), 60), (reported(), own())


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_request_is_lost_while_replicas_are_added_and_removed_except_those_of_a_killed_one(
    kills: bool, deployment: RayDeployment
) -> None:
    """A replica runs at most four requests, the rows of its decode bucket."""
    load = Load(deployment, pause_s=0.2)  # leaves CPU time to the start of the second replica
    assert wait_for(lambda: len(deployment.replica_pids("tiny")) == 1, 60), "one replica"
    before = deployment.replica_pids("tiny")
    with load.running(clients=NUM_CLIENTS):
        assert wait_for(lambda: len(deployment.replica_pids("tiny")) == 2, 90), "a second replica of tiny"
        assert wait_for(lambda: len(deployment.serving_replicas()) == 2, 90), "it serves"
        [added] = set(deployment.replica_pids("tiny")) - set(before)
        load.pause_s = 0
        time.sleep(2)

        def running() -> list[float]:
            return list(deployment.reported("ray_tcdeploy_num_requests_running", application="tiny").values())

        assert wait_for(lambda: len(found := running()) == 2 and all(found), 20), running()
        assert not load.errors
        killed_at = time.monotonic()
        if kills:
            os.kill(added, signal.SIGKILL)
            assert wait_for(lambda: len(pids := deployment.replica_pids("tiny")) == 2 and added not in pids, 90), (
                "it was not replaced"
            )
            time.sleep(6)
    assert 1 <= len(load.errors) < NUM_CLIENTS if kills else not load.errors, load.errors
    late = [start + seconds for start, seconds, error in load.outcomes if error and start + seconds > killed_at + 3]
    assert not late, (killed_at, load.outcomes)
    last = Load(deployment, pause_s=0.5)
    with last.running(clients=1):
        assert wait_for(lambda: len(deployment.replica_pids("tiny")) == 1, 120), "the second replica was not removed"
    assert not last.errors and len(load.outcomes + last.outcomes) > 20


@pytest.mark.parametrize(
    ("entry", "code", "message"),
    [
        pytest.param(
            f"serve: {TINY} --device cpu --cache-from /nowhere/x.tcb",
            3,
            "/nowhere/x.tcb does not exist",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "serve: /nowhere/model --device cpu", 2, "folder /nowhere/model does not exist", marks=pytest.mark.long
        ),
        (f"{{serve: {TINY} --device cpu, ray_actor_options: {{num_cpus: 999}}}}", 2, "need 999 of the resource CPU"),
    ],
)
def test_the_error_of_a_model_that_cannot_start_is_shown(
    run_cli_in: RunCLI, tmp_path: Path, entry: str, code: int, message: str
) -> None:
    """No process of Ray is left running."""
    file = tmp_path / "models.yaml"
    file.write_text(f"http_options: {{port: {free_port()}}}\nmodels:\n- {entry}\n")
    done = run_cli_in(tmp_path, "deploy", str(file), "--ray", timeout=300)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    assert wait_for(lambda: not processes_of_home(tmp_path), 30), processes_of_home(tmp_path)


@pytest.mark.long  # a cluster of its own
def test_a_bundle_of_another_machine_is_refused_by_the_replica(
    packages: Path, run_cli_in: RunCLI, tmp_path: Path
) -> None:
    generate_key(tmp_path / "ci")
    trust("ci", tmp_path / "ci.pub", tmp_path / "trusted")
    url = move_to_another_environment(tmp_path / "store", packages, tmp_path / "ci.key", torch="1.13.1")
    entry = model_entry(tmp_path / "cache", "tiny")
    entry["serve"] += f" --cache-from {url} --trusted-keys {tmp_path / 'trusted'}"
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"port": free_port()}, "models": [entry]}))
    done = run_cli_in(tmp_path, "deploy", str(file), "--ray", timeout=300)
    assert done.returncode == 3 and not done.stdout, done.stderr
    assert f"error: tiny cannot be served: the bundle {url} was made for another plan: torch\nhint: " in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "cache/manifests").exists()
    assert wait_for(lambda: not processes_of_home(tmp_path), 30), processes_of_home(tmp_path)
