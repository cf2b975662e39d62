"""A model on Ray Serve whose replicas Ray's prefix-aware request router chooses, behind an ingress and at a path."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tcdeploy.scale.ray_config import PREFIX_ROUTER
from tests.scale.ray_deployment import MESSAGES, Load, RayDeployment, model_entry, ray_deployment, wait_for

pytestmark = pytest.mark.long  # one replica with this router, behind an ingress, is deployed in test_ray.py


@pytest.fixture(scope="module")
def deployment(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayDeployment]:
    """The model `other`, with two replicas."""
    router = {"request_router_class": PREFIX_ROUTER}
    model = model_entry(packages, "other", num_replicas=2, request_router_config=router)
    with ray_deployment(tmp_path_factory.mktemp("home"), model, route_prefix="/other") as deployed:
        yield deployed


def test_the_openai_client_reaches_the_model_through_the_ingress(deployment: RayDeployment) -> None:
    assert deployment.url.endswith("/other")
    with deployment.client() as client:
        assert [model.id for model in client.models.list()] == ["other"]
        arguments: dict[str, Any] = {"model": "other", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        chat = client.chat.completions.create(**arguments)
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        assert chat.model == "other" and {chunk.model for chunk in chunks} == {"other"}
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == chat.choices[0].message.content and len(chunks) > 3
        with pytest.raises(openai.BadRequestError) as invalid:
            client.completions.create(model="other", prompt="a", max_tokens=-1)
        assert invalid.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="unknown", prompt="a")
        assert unknown.value.code == "model_not_found"
    ready = httpx.get(f"{deployment.url}/ready")
    assert ready.status_code == 200 and len(ready.headers.get_list("x-request-id")) == 1


def test_a_stream_that_a_client_of_the_ingress_leaves_is_aborted(deployment: RayDeployment) -> None:
    """A stream that is not aborted ends with the reason `length`."""
    with deployment.client() as client:
        stream = client.completions.create(
            model="other", prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    labels = {"application": "other", "finished_reason": "abort"}
    assert wait_for(lambda: 1 in deployment.reported("ray_tcdeploy_request_success_total", **labels).values(), 20)


def test_requests_with_a_common_prefix_reach_the_same_replica(deployment: RayDeployment) -> None:
    """With routes at random, about half of the second requests would not find their prefix in the cache."""
    prefixes = [f"{number} {chr(97 + number) * 3} " + f"The prefix {number} of a prompt. " * 4 for number in range(8)]
    with deployment.client() as client:
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
    load = Load(deployment, model="other")
    with load.running(clients=8):
        time.sleep(4)
    assert not load.errors

    def added() -> list[float]:
        return [tokens - before[replica] for replica, tokens in deployment.reported(metric, **labels).items()]

    total = load.max_tokens * len(load.outcomes)  # tokens of the test before may be reported late
    assert wait_for(lambda: sum(added()) >= total, 20) and min(added()) > total / 5, (added(), total)
