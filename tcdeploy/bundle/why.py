"""Predicts, before a start, which buckets will be cache hits on this machine with these flags, and what misses cost.

torch reports a miss only after compiling, and without a reason. This module compares the inputs of torch's cache key as
values: the machine, torch's settings, the sources of tcdeploy's ops, the model's config, and the plan's choices for
each bucket. If the plan is the packed one, all buckets hit. If it is another plan, a bucket still hits when nothing in
its program differs: another context, depth or set of buckets changes nothing. tests/bundle/test_why.py compares each
rule with what torch then does.

`compare_manifests` lists what differs between two caches: their inputs and their files. Does not import torch.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tcdeploy.cache.record.bundle_header import PATH_FIELDS
from tcdeploy.cache.record.manifest import Manifest, Origin, diff_sources
from tcdeploy.planning.architecture import is_config_factor
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.environment import (
    Difference,
    Environment,
    diff_environments,
    diff_mappings,
    lists_to_tuples,
    parse_environment,
)
from tcdeploy.planning.plan import IGNORED_PLAN_FIELDS, Bucket, Plan

# Plan fields that are in no program.
NON_BUCKET_FIELDS = IGNORED_PLAN_FIELDS | {
    "cache_dir", "decisions", "key", "buckets", "mode", "weight_bytes", "alternative_attention",
    "environment_key",  # its factors are compared one by one
}  # fmt: skip
PREFILL_FIELDS = {"prefill_attention", "max_prefill_sequences", "mixed_steps"}
DECODE_FIELDS = {"decode_attention"}
# Config keys that are in no layer's program, and those that only the programs before and after the layers contain.
NON_LAYER_CONFIG_KEYS = {
    "num_hidden_layers", "n_layer", "layer_types", "max_window_layers", "max_position_embeddings", "n_positions",
    "model_type",
}  # fmt: skip
HEAD_CONFIG_KEYS = {"vocab_size", "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta"}


@dataclass(frozen=True)
class BucketForecast:
    """`miss_seconds`: compile time of the bucket in the run that filled the cache; None for a hit."""

    bucket: str
    is_hit: bool
    reasons: tuple[str, ...] = ()
    miss_seconds: float | None = None
    is_estimate: bool = False  # the bucket is not in the cache: `miss_seconds` is the median of its phase


@dataclass(frozen=True)
class Forecast:
    buckets: tuple[BucketForecast, ...]
    differences: tuple[Difference, ...]  # includes those that matter to some buckets only

    @property
    def misses(self) -> tuple[BucketForecast, ...]:
        return tuple(bucket for bucket in self.buckets if not bucket.is_hit)

    @property
    def miss_seconds(self) -> float:
        return sum(bucket.miss_seconds or 0.0 for bucket in self.misses)


def forecast(cached: Manifest, plan: Plan, environment: Environment, origin: Origin) -> Forecast:
    """Predict the hits of a start of `plan` on this machine in the cache that `cached` describes."""
    head_differences: list[Difference] = []
    shared_differences = diff_environments(environment, parse_environment(cached.environment))
    shared_differences += diff_sources(origin, cached.origin)
    shared_differences += diff_mappings(origin.torch_settings, cached.origin.torch_settings, "torch.")
    here_config, cached_config = _layer_config(origin.model_config), _layer_config(cached.origin.model_config)
    for difference in diff_mappings(here_config, cached_config, "config."):
        is_head_only = difference.name.removeprefix("config.") in HEAD_CONFIG_KEYS
        (head_differences if is_head_only else shared_differences).append(difference)
    plan_values, cached_values = lists_to_tuples(asdict(plan)), lists_to_tuples(cached.plan)
    fields = [name for name in plan_values if name not in NON_BUCKET_FIELDS]
    plan_differences = diff_mappings(
        {name: plan_values[name] for name in fields}, {name: cached_values.get(name) for name in fields}
    )
    buckets = []
    for bucket in plan.buckets:
        of_head = head_differences if _compiles_head(bucket, plan) else []
        others = DECODE_FIELDS if bucket.is_prefill else PREFILL_FIELDS
        of_plan = (difference for difference in plan_differences if difference.name not in others)
        differences = [*shared_differences, *of_head, *of_plan]
        buckets.append(_forecast_bucket(bucket, cached, plan, differences))
    return Forecast(tuple(buckets), tuple(shared_differences + head_differences + plan_differences))


def _compiles_head(bucket: Bucket, plan: Plan) -> bool:
    """Whether the operations before and after the layers are compiled too, in any of the bucket's variants."""
    if plan.graphs != "step" or bucket.is_prefill:
        return False
    return any(variant.compile_head for variant in plan.variants(bucket))


def merge_forecasts(forecasts: list[Forecast]) -> Forecast:
    """Merge the forecasts of a folder's plans: a bucket hits if it hits in any; differences are the nearest plan's."""
    nearest = min(forecasts, key=lambda forecast: (len(forecast.misses), len(forecast.differences)))
    per_bucket = zip(*(forecast.buckets for forecast in forecasts), strict=True)
    buckets = tuple(
        min(forecasts_of_bucket, key=lambda bucket: len(bucket.reasons)) for forecasts_of_bucket in per_bucket
    )
    return Forecast(buckets, nearest.differences)


def version_differences(cached: Manifest, installed: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Versions in `installed_versions()` that differ from the packer's, ignoring local labels such as +cu130.

    Ahead-of-time packages can start without transformers, and on a CPU without Triton. A start without transformers
    needs the record of a start with the same Python, patch level included (start/record/factors.py).
    """
    environment = parse_environment(cached.environment)
    here = {**installed, "python": ".".join(str(installed["python"]).split(".")[:2])}
    there = environment.cache_factors()
    if cached.plan.get("programs") == "aot":
        if installed.get("transformers") == "":
            here["python"], there["python"] = installed["python"], environment.python
        unused = {"transformers"} if environment.gpus else {"transformers", "triton"}
        here = {name: value for name, value in here.items() if value or name not in unused}
    here = {name: _without_local_label(value) for name, value in here.items()}
    return tuple(diff_mappings(here, {name: _without_local_label(there[name]) for name in here}))


def _without_local_label(version: Any) -> Any:
    return version.partition("+")[0] if isinstance(version, str) else version


def _forecast_bucket(bucket: Bucket, cached: Manifest, plan: Plan, differences: list[Difference]) -> BucketForecast:
    reasons = [difference.name for difference in differences]
    records = {record.bucket: record for record in cached.buckets}
    if bucket.name not in records:
        reasons.append("the bucket is not in the cache")
    elif plan.key != cached.plan["key"] and plan.programs == "aot":
        reasons.append("ahead-of-time packages belong to one plan, and this is another")
    elif plan.key != cached.plan["key"]:
        reasons += _variant_reasons(bucket, records[bucket.name].variant, plan)
    elif plan.tune_seconds > cached.plan["tune_seconds"] and _has_untimed_variant(bucket, records[bucket.name], plan):
        reasons.append("mode auto has time for variants that were not timed")
    if not reasons:
        return BucketForecast(bucket.name, True)
    seconds = cached.cold_seconds().get(bucket.name)
    estimate = seconds or _median_seconds(cached, bucket)
    return BucketForecast(bucket.name, False, tuple(reasons), estimate, is_estimate=seconds is None)


def _has_untimed_variant(bucket: Bucket, record: BucketRecord, plan: Plan) -> bool:
    timed = {trial.variant for trial in record.trials} | {record.variant}
    return bool({variant.name for variant in plan.variants(bucket)} - timed)


def _variant_reasons(bucket: Bucket, cached: str, plan: Plan) -> list[str]:
    """Why the bucket may get another variant. Without tuning time, a bucket gets its first variant."""
    names = [variant.name for variant in plan.variants(bucket)][: None if plan.tune_seconds else 1]
    if names == [cached]:
        return []
    if len(names) > 1:
        return ["mode auto would time the variants of this plan"]
    return [f"mode: {names[0]} instead of {cached}"]


def _median_seconds(cached: Manifest, bucket: Bucket) -> float | None:
    same_phase = [seconds for name, seconds in cached.cold_seconds().items() if name.startswith(bucket.phase)]
    return statistics.median(same_phase) if same_phase else None


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in config.items() if is_config_factor(name) and name not in NON_LAYER_CONFIG_KEYS
    }


@dataclass(frozen=True)
class Comparison:
    """Inputs that differ, paths that are in one cache only or have other content, and the count of identical files."""

    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[str, ...]
    same: int


def compare_manifests(first: Sequence[Manifest], second: Sequence[Manifest]) -> Comparison:
    """Compare two caches by the manifests of their plans.

    Plans with jit programs are compared with each other, and so are plans with packages. If one cache has only jit
    programs and the other only packages, these two are compared.
    """
    pairs = [(a, b) for a in first for b in second if a.plan.get("programs") == b.plan.get("programs")]
    pairs = pairs or list(zip(first, second, strict=False))
    differences = itertools.chain(*itertools.starmap(_differences, pairs))
    first_files, second_files = (
        {file.path: file.sha256 for manifest in manifests for file in manifest.files} for manifests in (first, second)
    )
    shared = first_files.keys() & second_files.keys()
    changed = tuple(sorted(path for path in shared if first_files[path] != second_files[path]))
    return Comparison(
        differences=tuple(dict.fromkeys(differences)),
        only_first=tuple(sorted(first_files.keys() - second_files.keys())),
        only_second=tuple(sorted(second_files.keys() - first_files.keys())),
        changed=changed,
        same=len(shared) - len(changed),
    )


def _differences(first: Manifest, second: Manifest) -> list[Difference]:
    return [
        *diff_mappings(_without_paths(first.environment), _without_paths(second.environment), "environment."),
        *diff_mappings(_without_paths(first.plan), _without_paths(second.plan), "plan."),
        *diff_mappings(first.origin.model_config, second.origin.model_config, "config."),
        *diff_mappings(first.origin.torch_settings, second.origin.torch_settings, "torch."),
        *diff_sources(first.origin, second.origin),
    ]


def _without_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in (*PATH_FIELDS, "decisions")}
