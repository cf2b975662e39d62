"""The config of `tcdeploy deploy --ray`: what is refused, what Ray gets, and how a replica reads it. Starts no Ray."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tcdeploy.cli.deploy import read_entries
from tcdeploy.scale.ray_config import HAPROXY_VARIABLE, read_arguments, use_haproxy, write_arguments
from tests.conftest import ROOT, TINY


def test_the_recipe_is_a_config_of_ray_serve(run_cli: Any) -> None:
    """The command validates it with Ray's schemas."""
    recipe = ROOT / "recipes" / "deploy" / "ray" / "models.yaml"
    done = run_cli("deploy", str(recipe), "--ray", "--dry-run")
    assert done.returncode == 0, done.stderr
    applications = yaml.safe_load(done.stdout)["applications"]
    assert [(item["name"], item["route_prefix"]) for item in applications] == [("llama", "/llama"), ("qwen", "/qwen")]
    assert applications[0]["args"]["recipe"]["batch_sizes"] == [1, 8, 32]
    assert applications[0]["args"]["cache"] == {"source": "s3://example-bundles/llama"}
    [options] = applications[0]["deployments"]
    assert options["max_ongoing_requests"] == 32 and options["ray_actor_options"]["num_gpus"] == 1
    assert options["autoscaling_config"]["max_replicas"] == 4 and options["autoscaling_config"]["upscale_delay_s"] == 3


def test_the_arguments_of_an_application_are_read_back_as_they_were(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    words = f"{TINY} --device cpu --batch-sizes 1,4 --max-queued 7 --chat-template {template} --api-key a --api-key b"
    file = {"models": [{"serve": f"{words} --cache-from /bundles --allow-unsigned --trusted-keys /keys"}]}
    [entry] = read_entries(Path("models.yaml"), file)
    written = json.loads(json.dumps(write_arguments(entry.replica)))
    assert read_arguments(written) == entry.replica
    assert entry.replica.server.api_keys == ("a", "b") and entry.replica.server.max_queued == 7


def test_the_proxy_is_haproxy_unless_its_address_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, expected in (("127.0.0.1", None), ("localhost", None), ("0.0.0.0", "1"), ("10.0.0.1", "1")):
        monkeypatch.delenv(HAPROXY_VARIABLE, raising=False)
        use_haproxy({"host": host})
        assert os.environ.get(HAPROXY_VARIABLE) == expected, host
    monkeypatch.setenv(HAPROXY_VARIABLE, "0")
    use_haproxy({"host": "0.0.0.0"})
    assert os.environ[HAPROXY_VARIABLE] == "0", "the environment decides"


def config(text: str, tmp_path: Path) -> str:
    (tmp_path / "models.yaml").write_text(text)
    return str(tmp_path / "models.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []\n", "has no list `models`"),
        ("models:\n- {num_replicas: 2}\n", "model 1 has no text `serve`"),
        ("models: [{serve: builtin:tiny}]\napplications: []\n", "has `applications`"),
        ("models: [{serve: builtin:tiny --port 80}]\n", "--port has no effect on Ray Serve"),
        ("models: [{serve: builtin:tiny --max-queued x}]\n", "model 1: Invalid value for '--max-queued'"),
        ("models: [{serve: builtin:tiny --unknown}]\n", "model 1: No such option: --unknown"),
        ("models: [{serve: builtin:tiny --budget 3s}]\n", "--budget has no effect"),
        ("models: [{serve: builtin:tiny, replicas: 2}]\n", "no field replicas in DeploymentSchema"),
        ("http_option: {port: 1}\nmodels: [{serve: builtin:tiny}]\n", "no field http_option"),
        ("models: [{serve: builtin:tiny, num_replicas: two}]\n", "Ray Serve rejects the config"),
        ("models: [{serve: builtin:tiny}, {serve: builtin:tiny}]\n", "two models have the name builtin-tiny"),
        ("{", "cannot be read"),
    ],
)
def test_an_invalid_config_is_refused_before_ray_starts(run_cli: Any, tmp_path: Path, text: str, message: str) -> None:
    done = run_cli("deploy", config(text, tmp_path), "--ray", "--dry-run")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
