"""JSON schemas of the fields that our manifests of other projects use. Other fields are errors.

Kubernetes' schemas do not contain custom resources, and their own schemas are not packaged for Python. These are the
parts that we use of PodMonitor (Prometheus operator), ScaledObject (KEDA 2), ServingRuntime and InferenceService
(KServe 0.15 and newer). Containers and volumes are validated as those of a pod.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
ANY_OBJECT: Schema = {"type": "object"}


def fields(required: dict[str, Schema], **optional: Schema) -> Schema:
    properties = required | optional
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def items(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = fields({"name": TEXT}, namespace=TEXT, labels=LABELS, annotations=LABELS)
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
METRIC_TYPE: Schema = {"enum": ["AverageValue", "Value"]}
SCALING_RULES = fields(
    {"policies": items(fields({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT}))},
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
)
BEHAVIOR = fields({}, scaleUp=SCALING_RULES, scaleDown=SCALING_RULES)

POD_MONITOR = fields(
    {"selector": fields({"matchLabels": LABELS}),
     "podMetricsEndpoints": items(fields(
         {"port": TEXT, "path": TEXT}, interval=DURATION,
         authorization=fields({"credentials": fields({"name": TEXT, "key": TEXT})}),
     ))},
)  # fmt: skip
SCALED_OBJECT = fields(
    {"scaleTargetRef": fields({"name": TEXT}, apiVersion=TEXT, kind=TEXT),
     "triggers": items(fields(
         {"type": {"const": "prometheus"},
          # KEDA's metadata are strings. It needs all of these.
          "metadata": fields({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT})},
         metricType=METRIC_TYPE,
     ))},
    minReplicaCount={"type": "integer", "minimum": 0}, maxReplicaCount=COUNT, pollingInterval=COUNT,
    fallback=fields({"failureThreshold": COUNT, "replicas": COUNT}),
    advanced=fields({"horizontalPodAutoscalerConfig": fields({"behavior": BEHAVIOR})}),
)  # fmt: skip
SERVING_RUNTIME = fields(
    {"supportedModelFormats": items(fields({"name": TEXT}, version=TEXT, autoSelect={"type": "boolean"})),
     "containers": items(ANY_OBJECT)},
    volumes=items(ANY_OBJECT), labels=LABELS,
)  # fmt: skip
EXTERNAL_METRIC = fields(
    {"metric": fields({"backend": {"const": "prometheus"}, "serverAddress": TEXT, "query": TEXT}),
     "target": fields({"type": METRIC_TYPE, "averageValue": TEXT})},
)  # fmt: skip
INFERENCE_SERVICE = fields(
    {"predictor": fields(
        {"model": fields({"modelFormat": fields({"name": TEXT}), "runtime": TEXT, "storageUri": TEXT})},
        minReplicas=COUNT, maxReplicas=COUNT, terminationGracePeriodSeconds=COUNT,
        deploymentStrategy=fields({"type": {"const": "RollingUpdate"}, "rollingUpdate": ANY_OBJECT}),
        autoScaling=fields({"metrics": items(fields({"type": {"const": "External"}, "external": EXTERNAL_METRIC}))}),
    )},
)  # fmt: skip
SPECS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): SERVING_RUNTIME,
    ("serving.kserve.io/v1beta1", "InferenceService"): INFERENCE_SERVICE,
}


def schema_of(document: dict[str, Any]) -> Schema:
    spec = SPECS[document["apiVersion"], document["kind"]]
    return fields({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": spec})
