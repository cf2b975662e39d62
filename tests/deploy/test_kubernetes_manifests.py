"""recipes/deploy/kubernetes: the manifests render, are valid, agree with each other, and drain before they are killed.

The names of metrics and the paths of probes are compared with a running server in test_replicas.py.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.crd_schemas import SPECS, schema_of
from tests.deploy.recipe_files import KUBERNETES, Document, check_settings, of_kind, read_documents, render

KUBERNETES_VERSION = "1.32"
FOLDERS = ("base", "overlays/production", "overlays/cpu-trial", "kserve")
REPLICAS = ("base", "overlays/production", "overlays/cpu-trial")
HPA = KUBERNETES / "components/autoscale-hpa"
MARGIN_S = 10  # to end streams and the process after the drain
# Objects that a user creates; docs/deploy.md has the commands.
FROM_THE_USER = {"tcdeploy-api-keys", "tcdeploy-trusted-keys", "tcdeploy-model"}


def validate(document: Document) -> None:
    if (document["apiVersion"], document["kind"]) in SPECS:
        jsonschema.validate(document, schema_of(document))
        if document["kind"] == "ServingRuntime":
            pod = {key: document["spec"][key] for key in ("containers", "volumes")}
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, KUBERNETES_VERSION, True
            )
    else:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.fixture
def with_hpa(tmp_path: Path) -> tuple[Document, ...]:
    """The base with the component autoscale-hpa."""
    here = os.path.relpath(KUBERNETES, tmp_path)
    lines = [f"resources: [{here}/base]", f"components: [{here}/components/autoscale-hpa]"]
    (tmp_path / "kustomization.yaml").write_text("\n".join(lines))
    return render(tmp_path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_resource_follows_its_schema(folder: str) -> None:
    for document in render(KUBERNETES / folder):
        validate(document)


def test_the_schemas_find_a_wrong_field_in_each_kind(with_hpa: tuple[Document, ...]) -> None:
    kinds = {item["kind"]: item for folder in FOLDERS for item in render(KUBERNETES / folder)}
    kinds |= {item["kind"]: item for item in with_hpa}
    kinds.pop("ConfigMap"), kinds.pop("ServiceAccount")  # these have no spec
    assert len(kinds) == 9
    for document in kinds.values():
        validate(document)
        damaged = copy.deepcopy(document)
        damaged["spec"]["replica"] = 2
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            validate(damaged)


def test_every_manifest_is_part_of_a_kustomization() -> None:
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        [document] = read_documents(kustomization)
        patches = [patch.get("path") for patch in document.get("patches", [])]
        listed = {*document.get("resources", []), *patches}
        files = {path.name for path in kustomization.parent.glob("*.yaml")}
        assert files - {"kustomization.yaml", "prometheus-adapter-values.yaml"} <= listed, kustomization


@pytest.mark.parametrize("folder", REPLICAS)
def test_all_selectors_select_the_pods_of_the_deployment(folder: str) -> None:
    documents = render(KUBERNETES / folder)
    pod = of_kind(documents, "Deployment")["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    [spread] = pod["spec"]["topologySpreadConstraints"]
    selectors = [
        of_kind(documents, "Service")["spec"]["selector"],
        of_kind(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(documents, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
    ]
    if folder == "overlays/production":
        selectors.append(of_kind(documents, "PodMonitor")["spec"]["selector"]["matchLabels"])
    assert all(selector and selector.items() <= labels for selector in selectors)


def test_the_pods_of_kserve_are_scraped_too() -> None:
    documents = render(KUBERNETES / "kserve")
    selector = of_kind(documents, "PodMonitor")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= of_kind(documents, "ServingRuntime")["spec"]["labels"].items()


def settings_of(documents: tuple[Document, ...]) -> dict[str, str]:
    """The variables of the server's container that have a value."""
    [server] = of_kind(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    data: dict[str, str] = of_kind(documents, "ConfigMap")["data"]
    return data | {item["name"]: item["value"] for item in server["env"] if "value" in item}


@pytest.mark.parametrize("folder", REPLICAS)
def test_the_settings_are_accepted_and_the_ports_agree(folder: str) -> None:
    documents, settings = render(KUBERNETES / folder), settings_of(render(KUBERNETES / folder))
    pod = of_kind(documents, "Deployment")["spec"]["template"]["spec"]
    [server] = pod["containers"]
    assert server["command"] == ["tcdeploy", "serve"] and "TCDEPLOY_API_KEY" in {item["name"] for item in server["env"]}
    check_settings(server["args"], settings)
    [port] = server["ports"]
    assert port == {"name": "http", "containerPort": int(settings["TCDEPLOY_PORT"])}
    [service_port] = of_kind(documents, "Service")["spec"]["ports"]
    assert service_port["targetPort"] == "http"
    [ingress] = of_kind(documents, "NetworkPolicy")["spec"]["ingress"]
    assert [item["port"] for item in ingress["ports"]] == ["http"]
    if folder == "overlays/production":
        [endpoint] = of_kind(documents, "PodMonitor")["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_the_settings_of_the_serving_runtime_are_accepted_and_the_ports_agree() -> None:
    documents = render(KUBERNETES / "kserve")
    [server] = of_kind(documents, "ServingRuntime")["spec"]["containers"]
    assert server["command"] == ["tcdeploy", "serve"]
    check_settings(server["args"], {})
    [port] = server["ports"]
    assert f"--port={port['containerPort']}" in server["args"]
    probes = [server[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == [port["containerPort"]] * 3
    predictor = of_kind(documents, "InferenceService")["spec"]["predictor"]
    runtime = of_kind(documents, "ServingRuntime")
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["model"]["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]


def seconds_before_sigterm(container: Any) -> float:
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return float(seconds)


@pytest.mark.parametrize("folder", REPLICAS)
def test_a_pod_is_killed_later_than_it_drains(folder: str) -> None:
    documents = render(KUBERNETES / folder)
    pod = of_kind(documents, "Deployment")["spec"]["template"]["spec"]
    stopped_s = seconds_before_sigterm(pod["containers"][0]) + float(settings_of(documents)["TCDEPLOY_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] >= stopped_s + MARGIN_S


def test_a_pod_of_kserve_is_killed_later_than_it_drains() -> None:
    documents = render(KUBERNETES / "kserve")
    [server] = of_kind(documents, "ServingRuntime")["spec"]["containers"]
    [drain] = [item for item in server["args"] if item.startswith("--drain-timeout=")]
    stopped_s = seconds_before_sigterm(server) + float(drain.partition("=")[2])
    predictor = of_kind(documents, "InferenceService")["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] >= stopped_s + MARGIN_S
    assert predictor["deploymentStrategy"]["rollingUpdate"]["maxUnavailable"] == 0


@pytest.mark.parametrize("folder", REPLICAS)
def test_no_replica_is_missing_during_an_update(folder: str) -> None:
    documents = render(KUBERNETES / folder)
    assert of_kind(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert of_kind(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_containers_run_without_privileges_and_cannot_write_to_the_image(folder: str) -> None:
    """The fields of Kubernetes' restricted profile, and a read-only root file system."""
    documents = render(KUBERNETES / folder)
    if folder == "kserve":
        pod = of_kind(documents, "ServingRuntime")["spec"]
        context = pod["containers"][0]["securityContext"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    else:
        pod = of_kind(documents, "Deployment")["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, "starts write to TMPDIR"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_status_of_a_pod_shows_the_error_of_a_container_that_fails(folder: str) -> None:
    documents = render(KUBERNETES / folder)
    kind = "ServingRuntime" if folder == "kserve" else "Deployment"
    spec = of_kind(documents, kind)["spec"]
    pod = spec if folder == "kserve" else spec["template"]["spec"]
    policies = [item["terminationMessagePolicy"] for item in [*pod["containers"], *pod.get("initContainers", [])]]
    assert set(policies) == {"FallbackToLogsOnError"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_volume_secret_and_config_map_exists(folder: str) -> None:
    documents = render(KUBERNETES / folder)
    kind = "ServingRuntime" if folder == "kserve" else "Deployment"
    spec = of_kind(documents, kind)["spec"]
    pod = spec if folder == "kserve" else spec["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    mounts = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert mounts == volumes
    made = {document["metadata"]["name"] for document in documents} | FROM_THE_USER
    named = set(
        re.findall(r"'(?:secretKeyRef|configMapKeyRef|configMapRef|configMap)': {[^}]*'name': '([^']+)'", str(pod))
    )
    named |= set(re.findall(r"'claimName': '([^']+)'", str(pod)))
    assert named and named <= made


def test_a_gpu_is_requested_except_in_the_trial() -> None:
    for folder in REPLICAS:
        [server] = of_kind(render(KUBERNETES / folder), "Deployment")["spec"]["template"]["spec"]["containers"]
        assert ("nvidia.com/gpu" in server["resources"]["limits"]) == (folder != "overlays/cpu-trial")


def test_both_autoscalers_have_the_same_limits_and_own_the_number_of_replicas(with_hpa: tuple[Document, ...]) -> None:
    production = render(KUBERNETES / "overlays/production")
    keda, hpa = of_kind(production, "ScaledObject")["spec"], of_kind(with_hpa, "HorizontalPodAutoscaler")["spec"]
    for documents, scaler in ((production, keda), (with_hpa, hpa)):
        deployment = of_kind(documents, "Deployment")
        assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert "replicas" not in deployment["spec"], "an apply would reset it"
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in keda["triggers"]]
    targets = [parse_quantity(metric["pods"]["target"]["averageValue"]) for metric in hpa["metrics"]]
    assert thresholds == targets
    namespaces = set(re.findall(r'namespace="([^"]*)"', str(keda["triggers"])))
    assert namespaces == {of_kind(production, "Deployment")["metadata"]["namespace"]}


def parse_quantity(text: str) -> float:
    """A Kubernetes quantity: 8, or 800m for 0.8."""
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
