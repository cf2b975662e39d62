"""The config of `tcdeploy deploy --ray`: what is refused, what Ray gets, and how a replica reads it. Starts no Ray."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application

from tcdeploy.bundle.fetch import EnvironmentMismatchError
from tcdeploy.cli.deploy import read_entry
from tcdeploy.errors import MismatchError, UsageError
from tcdeploy.scale.ray_config import (
    HAPROXY_VARIABLE,
    PREFIX_ROUTER,
    proxy_url,
    read_arguments,
    serve_config,
    use_haproxy,
    write_arguments,
)
from tcdeploy.scale.replica import ReplicaStartError, start_error
from tests.conftest import ROOT, TINY


def test_the_recipe_is_a_config_of_ray_serve(run_cli: Any) -> None:
    """The command validates it with Ray's schemas."""
    recipe = ROOT / "recipes" / "deploy" / "ray" / "models.yaml"
    done = run_cli("deploy", str(recipe), "--ray", "--dry-run")
    assert done.returncode == 0, done.stderr
    [application] = yaml.safe_load(done.stdout)["applications"]
    assert (application["name"], application["route_prefix"]) == ("llama", "/")
    assert application["args"]["recipe"]["batch_sizes"] == [1, 8, 32]
    assert application["args"]["cache"] == {"source": "s3://example-bundles/llama"}
    [options] = application["deployments"]
    assert options["max_ongoing_requests"] == 32 and options["ray_actor_options"]["num_gpus"] == 1
    assert options["autoscaling_config"]["max_replicas"] == 4 and options["autoscaling_config"]["upscale_delay_s"] == 3


def test_the_arguments_of_an_application_are_read_back_as_they_were(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    words = f"{TINY} --device cpu --batch-sizes 1,4 --max-queued 7 --chat-template {template} --api-key a --api-key b"
    file = {"models": [{"serve": f"{words} --cache-from /bundles --allow-unsigned --trusted-keys /keys"}]}
    entry = read_entry(Path("models.yaml"), file)
    written = json.loads(json.dumps(write_arguments(entry.replica)))
    assert read_arguments(written) == entry.replica
    assert entry.replica.server.api_keys == ("a", "b") and entry.replica.server.max_queued == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"api_keys": [""]}}, "the API key is empty"),
        ({"settings": {"api_keys": ["key", "k\u00e9y"]}}, "API key 2 of 2 has the character U+00E9 at position 2"),
        ({"settings": {"api_keys": "secret"}}, "settings.api_keys is invalid"),
        ({"settings": {"max_queued": "x"}}, "settings.max_queued is invalid"),
        ({"settings": {"start": "foo"}}, "settings.start is invalid"),
        ({"settings": {"port": 1}}, "settings.port has no effect"),
        ({"settings": {"ports": 1}}, "unknown field settings.ports"),
        ({"settings": "x"}, "settings is 'x'"),
        ({"cache": "s3://x"}, "cache is 's3://x'"),
        ({"cache": {"allow_unsigned": True}}, "cache.source is invalid"),
        ({"recipe": {"model": TINY, "batch_size": [1]}}, "batch_size"),
        ({"models": []}, "unknown argument models"),
    ],
)
def test_invalid_arguments_of_an_application_are_refused(arguments: dict[str, Any], message: str) -> None:
    """A config for Ray Serve may have been edited."""
    with pytest.raises(UsageError) as error:
        read_arguments({"recipe": {"model": TINY}, **arguments})
    assert message in error.value.message


def test_variables_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCDEPLOY_SSL_CERTFILE", "cert.pem")
    with pytest.raises(UsageError) as error:
        read_entry(Path("models.yaml"), {"models": [{"serve": TINY}]})
    assert error.value.message == "models.yaml: model: TCDEPLOY_SSL_CERTFILE has no effect on Ray Serve"


def test_the_proxy_listens_on_this_machine_only_and_a_replica_has_a_gpu_by_default() -> None:
    config = config_of({"serve": TINY, "ray_actor_options": {"num_cpus": 4}})
    assert config["http_options"] == {"host": "127.0.0.1"}
    assert config["applications"][0]["deployments"][0]["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}


def config_of(model: dict[str, Any], **other: Any) -> dict[str, Any]:
    content = {"models": [model], **other}
    return serve_config(read_entry(Path("models.yaml"), content), content)


def test_a_model_is_served_at_the_path_of_the_file() -> None:
    [application] = config_of({"serve": f"{TINY} --served-model-name org/a"}, route_prefix="/a")["applications"]
    assert (application["name"], application["route_prefix"]) == ("a", "/a")
    assert application["args"]["settings"] == {"model": "org/a", "root_path": "/a"}
    assert read_arguments(application["args"]).server.root_path == "/a"


def test_the_url_of_the_proxy_is_that_for_requests_from_its_own_machine() -> None:
    assert proxy_url({"host": "::", "port": 80, "ssl_certfile": "c"}) == "https://[::1]:80"
    assert proxy_url({"host": "0.0.0.0"}) == proxy_url({}) == "http://127.0.0.1:8000"


def test_a_model_with_a_request_router_has_an_ingress_in_its_application() -> None:
    router = {"request_router_class": PREFIX_ROUTER}
    flags = f"{TINY} --batch-sizes 1,8 --drain-timeout 70"
    for model in ({"serve": flags}, {"serve": flags, "max_ongoing_requests": 64}):
        given = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 3}}
        [application] = config_of({**model, "request_router_config": router}, ingress=given)["applications"]
        assert application["route_prefix"] == "/" and application["import_path"].endswith(":build_routed")
        model_options, ingress = application["deployments"]
        assert (model_options["name"], ingress["name"]) == ("Model", "Ingress")
        kwargs = model_options["request_router_config"]["request_router_kwargs"]
        assert kwargs == {"imbalanced_threshold": model.get("max_ongoing_requests", 8) // 2}
        assert ingress["graceful_shutdown_timeout_s"] == 70 and ingress["num_replicas"] == 2
        assert ingress["ray_actor_options"] == {"num_cpus": 3, "num_gpus": 0}
    given = {**router, "request_router_kwargs": {"imbalanced_threshold": 5}}
    [application] = config_of({"serve": TINY, "request_router_config": given})["applications"]
    assert application["deployments"][0]["request_router_config"] == given


def test_ray_can_call_what_the_import_paths_of_a_config_name() -> None:
    """Ray accepts functions with exactly one parameter, the arguments of the application."""
    routed = {"request_router_config": {"request_router_class": PREFIX_ROUTER}}
    applications = [config_of({"serve": TINY, **options})["applications"][0] for options in ({}, routed)]
    assert len({item["import_path"] for item in applications}) == 2
    for application in applications:
        module, _, name = application["import_path"].partition(":")
        builder = getattr(importlib.import_module(module), name)
        assert len(inspect.signature(builder).parameters) == 1
        assert isinstance(builder(application["args"]), Application)


def test_a_config_of_an_earlier_version_for_several_models_names_the_other_ways() -> None:
    build_ingress = importlib.import_module("tcdeploy.scale.ray").build_ingress
    with pytest.raises(UsageError, match="build_ingress, was removed") as error:
        build_ingress({"models": {}, "proxy_url": "http://127.0.0.1:8000"})
    assert "route_prefix: /NAME" in error.value.hint


def test_the_cause_of_a_failed_start_is_read_from_its_traceback() -> None:
    differences = EnvironmentMismatchError("the bundle was made for another GPU", "rebuild it", ())
    for error, kind in ((differences, MismatchError), (UsageError("no: model\nhere", ""), UsageError)):
        raised = pickle.loads(pickle.dumps(ReplicaStartError.from_cause(error)))  # Ray sends it to the controller
        text = f"Traceback (most recent call last):\n  File\nReplicaStartError: {raised}\n"
        cause = start_error(text)
        assert type(cause) is kind and (cause.message, cause.hint) == (error.message, error.hint)
    assert start_error("Traceback: RuntimeError: no") is None


def test_the_proxy_is_haproxy_unless_its_address_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HAPROXY_VARIABLE, "")  # so that the variable is restored
    for host, expected in (("127.0.0.1", None), ("localhost", None), ("0.0.0.0", "1"), ("10.0.0.1", "1")):
        monkeypatch.delenv(HAPROXY_VARIABLE, raising=False)
        use_haproxy({"host": host})
        assert os.environ.get(HAPROXY_VARIABLE) == expected, host
    monkeypatch.setenv(HAPROXY_VARIABLE, "0")
    use_haproxy({"host": "0.0.0.0"})
    assert os.environ[HAPROXY_VARIABLE] == "0", "the environment decides"


ROUTED = f"models: [{{serve: builtin:tiny, request_router_config: {{request_router_class: {PREFIX_ROUTER}}}}}]\n"


def config(text: str, tmp_path: Path) -> str:
    (tmp_path / "models.yaml").write_text(text)
    return str(tmp_path / "models.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []\n", "has no list `models`"),
        ("models:\n- {num_replicas: 2}\n", "the model has no text `serve`"),
        ("models: [{serve: builtin:tiny}]\napplications: []\n", "has the unknown field applications; known: models"),
        ("models: [{serve: builtin:tiny, name: llama}]\n", "name it with --served-model-name"),
        ("models: [{serve: builtin:tiny, ray_actor_options: {num_gpu: 1}}]\n", "no field num_gpu"),
        ("models: [{serve: builtin:tiny, autoscaling_config: {max_replica: 8}}]\n", "no field max_replica"),
        ("models: [{serve: builtin:tiny, autoscaling_config: auto}]\n", "autoscaling_config must be a mapping"),
        ("models: [{serve: builtin:tiny}]\nhttp_options: {prt: 1}\n", "no field prt"),
        ("models: [{serve: builtin:tiny}]\nhttp_options: 8000\n", "http_options must be a mapping"),
        ("models: [{serve: builtin:tiny --port 80}]\n", "--port has no effect on Ray Serve"),
        ("models: [{serve: \"builtin:tiny --api-key 'a b'\"}]\n", "the character U+0020 at position 2"),
        ("models: [{serve: builtin:tiny --max-queued x}]\n", "model: Invalid value for '--max-queued'"),
        ("models: [{serve: builtin:tiny --unknown}]\n", "model: No such option: --unknown"),
        ("models: [{serve: builtin:tiny --budget 3s}]\n", "--budget has no effect"),
        ("models: [{serve: builtin:tiny, replicas: 2}]\n", "no field replicas in DeploymentSchema"),
        ("http_option: {port: 1}\nmodels: [{serve: builtin:tiny}]\n", "has the unknown field http_option;"),
        ("models: [{serve: builtin:tiny, num_replicas: two}]\n", "Ray Serve rejects the config"),
        ("models: [{serve: builtin:tiny}, {serve: builtin:tiny}]\n", "names 2 models, and a deployment has one"),
        ("ingress: false\nmodels: [{serve: builtin:tiny}, {serve: builtin:tiny}]\n", "names 2 models"),
        ("route_prefix: 2\nmodels: [{serve: builtin:tiny}]\n", "route_prefix must begin with /"),
        ("route_prefix: llama\nmodels: [{serve: builtin:tiny}]\n", "route_prefix must begin with /"),
        ("{", "cannot be read"),
        (
            "ingress: {num_replicas: 2}\nmodels: [{serve: builtin:tiny}]\n",
            "ingress has no effect without request_router",
        ),
        ("ingress: false\nmodels: [{serve: builtin:tiny}]\n", "ingress has no effect without request_router"),
        (f"ingress: 2\n{ROUTED}", "ingress must be a mapping"),
        (f"ingress: {{replicas: 2}}\n{ROUTED}", "no field replicas"),
        (f"ingress: {{name: front}}\n{ROUTED}", "ingress has a name"),
        (f"ingress: {{autoscaling_config: 5}}\n{ROUTED}", "ingress: autoscaling_config must be a mapping"),
        (
            "models: [{serve: builtin:tiny, request_router_config: {request_router_class: no.X}}]\n",
            "No module named 'no'",
        ),
        ("models: [{serve: builtin:tiny, request_router_config: {router_class: a.B}}]\n", "no field router_class"),
    ],
)
def test_an_invalid_config_is_refused_before_ray_starts(run_cli: Any, tmp_path: Path, text: str, message: str) -> None:
    done = run_cli("deploy", config(text, tmp_path), "--ray", "--dry-run")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_with_several_models_names_the_other_ways(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("deploy", config("models: [{serve: a}, {serve: b}]\n", tmp_path), "--ray", "--dry-run")
    assert done.returncode == 2
    assert "route_prefix: /NAME" in done.stderr and "gateway, such as LiteLLM" in done.stderr
