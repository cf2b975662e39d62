"""Replicas of the embedded model on Ray Serve: clients, scaling under load, a killed replica, and invalid input."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
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
REPORTED = {
    "generation_tokens_total", "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc",
    "time_to_first_token_seconds_sum", "time_to_first_token_seconds_bucket",
}  # fmt: skip


@pytest.fixture(scope="module")
def packages(filled_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the ahead-of-time packages of the embedded model."""
    return Path(shutil.copytree(filled_packages, tmp_path_factory.mktemp("packages") / "cache"))


@pytest.fixture(scope="module")
def deployment(packages: Path) -> Iterator[RayDeployment]:
    """Two models: `tiny` has one or two replicas, `other` has two, which Ray's prefix-aware request router chooses."""
    models = [
        model_entry(packages, "tiny", autoscaling_config=AUTOSCALING, health_check_period_s=1),
        model_entry(packages, "other", num_replicas=2, request_router_config={"request_router_class": PREFIX_ROUTER}),
    ]
    # Other users can enter the folder, unlike those of pytest.
    with tempfile.TemporaryDirectory() as folder, ray_deployment(make_folders(Path(folder)), models) as deployed:
        yield deployed


def test_the_openai_client_reaches_each_model_below_its_own_path(deployment: RayDeployment) -> None:
    for number, name in enumerate(("tiny", "other")):
        with deployment.client(number) as client:
            assert [model.id for model in client.models.list()] == [name]
            chat = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8, temperature=0)
            stream = client.chat.completions.create(
                model=name, messages=MESSAGES, max_tokens=8, temperature=0, stream=True
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
    url = deployment.models[0]["url"]
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": -1})
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{url}/ready").status_code == 200


def test_the_model_of_a_request_to_the_ingress_chooses_the_model(deployment: RayDeployment) -> None:
    with deployment.client(None) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "other"]
        for name in ("tiny", "other"):
            arguments: dict[str, Any] = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
            chat = client.chat.completions.create(**arguments)
            chunks = list(client.chat.completions.create(**arguments, stream=True))
            assert chat.model == name and {chunk.model for chunk in chunks} == {name}
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == chat.choices[0].message.content and len(chunks) > 3
            with pytest.raises(openai.BadRequestError) as invalid:
                client.completions.create(model=name, prompt="a", max_tokens=-1)
            assert invalid.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="unknown", prompt="a")
        assert unknown.value.code == "model_not_found"
    ready = httpx.get(f"{deployment.ingress_url}/ready")
    assert ready.status_code == 200 and len(ready.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_a_stream_that_a_client_of_the_ingress_leaves_is_aborted(deployment: RayDeployment, name: str) -> None:
    """A stream that is not aborted ends with the reason `length`. `other` is reached through a deployment handle."""
    with deployment.client(None) as client:
        stream = client.completions.create(
            model=name, prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    labels = {"application": name, "finished_reason": "abort"}
    assert wait_for(lambda: 1 in deployment.reported("ray_tcdeploy_request_success_total", **labels).values(), 20)


def test_requests_with_a_common_prefix_reach_the_same_replica(deployment: RayDeployment) -> None:
    """With routes at random, about half of the second requests would not find their prefix in the cache."""
    prefixes = [f"{number} {chr(97 + number) * 3} " + f"The prefix {number} of a prompt. " * 4 for number in range(8)]
    with deployment.client(None) as client:
        for ending in ("first", "second", "third"):
            for prefix in prefixes:
                done = client.completions.create(model="other", prompt=prefix + ending, max_tokens=1)
                assert done.usage is not None and done.usage.prompt_tokens_details is not None
                cached = done.usage.prompt_tokens_details.cached_tokens or 0
                assert cached == 0 if ending == "first" else cached > done.usage.prompt_tokens // 2


def test_a_load_of_one_prefix_reaches_both_replicas(deployment: RayDeployment) -> None:
    """The router prefers the replica with the prefix only up to a difference of two open requests."""
    metric, labels = "ray_tcdeploy_generation_tokens_total", {"application": "other"}
    assert wait_for(lambda: len(deployment.reported(metric, **labels)) == 2, 20)
    before = deployment.reported(metric, **labels)
    load = Load(deployment, model="other", number=None)
    with load.running(clients=8):
        time.sleep(4)
    assert not load.errors

    def added() -> list[float]:
        return [tokens - before[replica] for replica, tokens in deployment.reported(metric, **labels).items()]

    total = load.max_tokens * len(load.outcomes)  # tokens of the test before may be reported late
    assert wait_for(lambda: sum(added()) >= total, 20) and min(added()) > total / 5, (added(), total)


def test_ray_reports_the_metrics_of_a_replica_with_its_labels(deployment: RayDeployment) -> None:
    """The model `tiny` still has one replica, so its own /metrics has the same values."""
    with deployment.client() as client:
        client.completions.create(model="tiny", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})

    def own() -> dict[str, list[float]]:
        families = text_string_to_metric_families(httpx.get(f"{deployment.models[0]['url']}/metrics").text)
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


def test_only_requests_of_a_killed_replica_are_lost_while_replicas_are_added_replaced_and_removed(
    deployment: RayDeployment,
) -> None:
    """A replica runs at most four requests, the rows of its decode bucket."""
    load = Load(deployment)
    assert wait_for(lambda: len(deployment.replica_pids("tiny")) == 1, 60), "one replica"
    before = deployment.replica_pids("tiny")
    with load.running(clients=16):
        assert wait_for(lambda: len(deployment.serving_replicas(0)) == 2, 90), "a second replica of tiny"
        [added] = set(deployment.replica_pids("tiny")) - set(before)
        time.sleep(5)

        def running() -> list[float]:
            return list(deployment.reported("ray_tcdeploy_num_requests_running", application="tiny").values())

        assert wait_for(lambda: len(found := running()) == 2 and all(found), 20), running()
        assert not load.errors
        killed_at = time.monotonic()
        os.kill(added, signal.SIGKILL)
        assert wait_for(lambda: len(pids := deployment.replica_pids("tiny")) == 2 and added not in pids, 90), (
            "it was not replaced"
        )
        time.sleep(6)
    assert 1 <= len(load.errors) < 16, load.errors
    late = [start + seconds for start, seconds, error in load.outcomes if error and start + seconds > killed_at + 3]
    assert not late, (killed_at, load.outcomes)
    last = Load(deployment)
    with last.running(clients=1):
        assert wait_for(lambda: len(deployment.replica_pids("tiny")) == 1, 120), "the second replica was not removed"
    assert not last.errors and len(load.outcomes + last.outcomes) > 20


@pytest.mark.parametrize(
    ("entry", "code", "message"),
    [
        pytest.param(
            f"serve: {TINY} --device cpu --cache-from /nowhere/x.tcb",
            3,
            "/nowhere/x.tcb holds no bundle",
            marks=pytest.mark.long,
        ),
        ("serve: /nowhere/model --device cpu", 1, "folder /nowhere/model does not exist"),
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
