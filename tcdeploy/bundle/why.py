"""Will it be a hit, here and with these flags? Said before any start, with the factor that differs and what it costs.

torch's own answer comes when it is too late, and names no reason. So the factors that its key is made of are compared
as facts: the machine, torch's settings, the sources of our ops, the model's config, and what the plan decides for each
bucket. Where the plan is the very one that was packed, all buckets hit; where it is another, a bucket still hits if
nothing that its program holds is different: another context, another depth, other buckets beside it change nothing.
tests/bundle/test_why.py holds each rule against what torch then does. No torch here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tcdeploy.cache.manifest import BucketRecord, Manifest, Origin
from tcdeploy.planning.architecture import is_config_factor
from tcdeploy.planning.environment import (
    Difference,
    Environment,
    diff_environments,
    diff_mappings,
    parse_environment,
)
from tcdeploy.planning.plan import IGNORED_PLAN_FIELDS, Bucket, Plan

# Of the plan: what says where, what and how much, and is in no program.
NON_BUCKET_FIELDS = IGNORED_PLAN_FIELDS | {
    "cache_dir", "decisions", "key", "buckets", "mode", "weight_bytes", "alternative_attention",
}  # fmt: skip
PREFILL_FIELDS = {"prefill_attention", "max_prefill_sequences"}
DECODE_FIELDS = {"decode_attention"}
# Of transformers' config: what the program of one layer does not hold, and what only those before and after them do.
NON_LAYER_CONFIG_KEYS = {
    "num_hidden_layers", "n_layer", "layer_types", "max_window_layers", "max_position_embeddings", "n_positions",
    "model_type",
}  # fmt: skip
HEAD_CONFIG_KEYS = {"vocab_size", "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta"}


@dataclass(frozen=True)
class BucketForecast:
    """`miss_seconds`: what compiling it will take, by the ledger of the run that filled the cache; None for a hit."""

    bucket: str
    is_hit: bool
    reasons: tuple[str, ...] = ()
    miss_seconds: float | None = None
    is_estimate: bool = False  # of a bucket that was never compiled there: the median of its kind


@dataclass(frozen=True)
class Forecast:
    buckets: tuple[BucketForecast, ...]
    differences: tuple[Difference, ...]  # that differ; also those that only matter to some buckets

    @property
    def misses(self) -> tuple[BucketForecast, ...]:
        return tuple(one for one in self.buckets if not one.is_hit)

    @property
    def miss_seconds(self) -> float:
        return sum(one.miss_seconds or 0.0 for one in self.misses)


def forecast(cached: Manifest, plan: Plan, environment: Environment, origin: Origin) -> Forecast:
    """What a start of `plan` on this machine, from `origin`, will find in the cache that `cached` describes."""
    head_differences: list[Difference] = []
    shared_differences = diff_environments(environment, _environment(cached))
    if origin.sources != cached.origin.sources:
        shared_differences.append(Difference("tcdeploy's ops", origin.sources[:12], cached.origin.sources[:12]))
    shared_differences += diff_mappings(origin.torch_settings, cached.origin.torch_settings, "torch.")
    for one in diff_mappings(_layer_config(origin.model_config), _layer_config(cached.origin.model_config), "config."):
        (head_differences if one.name.removeprefix("config.") in HEAD_CONFIG_KEYS else shared_differences).append(one)
    here, there = _with_tuples(asdict(plan)), _with_tuples(cached.plan)
    fields = [name for name in here if name not in NON_BUCKET_FIELDS]
    plan_differences = diff_mappings({name: here[name] for name in fields}, {name: there.get(name) for name in fields})
    found = [
        _forecast_bucket(
            bucket,
            cached,
            plan,
            [
                *shared_differences,
                *(head_differences if _compiles_head(bucket, plan) else ()),
                *_relevant_differences(bucket, plan_differences),
            ],
        )
        for bucket in plan.buckets
    ]
    return Forecast(tuple(found), tuple(shared_differences + head_differences + plan_differences))


def _compiles_head(bucket: Bucket, plan: Plan) -> bool:
    """Whether what runs before and after the layers is compiled too; with several candidates, if any does it."""
    if plan.region == "model":
        return True
    return plan.graphs == "step" and not bucket.is_prefill and any(one.compile_head for one in plan.variants(bucket))


def _relevant_differences(bucket: Bucket, plan_differences: list[Difference]) -> list[Difference]:
    others = DECODE_FIELDS if bucket.is_prefill else PREFILL_FIELDS
    return [one for one in plan_differences if one.name not in others]


def merge_forecasts(forecasts: list[Forecast]) -> Forecast:
    """Of a folder with several plans: a bucket is found if any of them has it. The factors are the nearest plan's."""
    nearest = min(forecasts, key=lambda one: (len(one.misses), len(one.differences)))
    columns = zip(*(one.buckets for one in forecasts), strict=True)
    return Forecast(tuple(min(column, key=lambda one: len(one.reasons)) for column in columns), nearest.differences)


def version_differences(cached: Manifest, installed: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What of `environment.installed_versions()` is not as where the cache was made; local labels (+cu130) aside."""
    there = _environment(cached).cache_factors()
    wanted = {name: _without_local_label(there[name]) for name in installed}
    return tuple(diff_mappings({name: _without_local_label(value) for name, value in installed.items()}, wanted))


def _without_local_label(version: Any) -> Any:
    return version.partition("+")[0] if isinstance(version, str) else version


def _forecast_bucket(bucket: Bucket, cached: Manifest, plan: Plan, differences: list[Difference]) -> BucketForecast:
    reasons = [one.name for one in differences]
    known = {record.bucket: record for record in cached.buckets}
    if bucket.name not in known:
        reasons.append("the bucket is not in the cache")
    elif plan.key != cached.plan["key"]:
        reasons += _variant_reasons(bucket, known[bucket.name].variant, plan)
    elif plan.tune_seconds > cached.plan["tune_seconds"] and _has_untimed_variant(bucket, known[bucket.name], plan):
        reasons.append("mode auto would try what it had no time for")
    if not reasons:
        return BucketForecast(bucket.name, True)
    seconds = cached.cold_seconds().get(bucket.name)
    return BucketForecast(
        bucket.name, False, tuple(reasons), seconds or _median_seconds(cached, bucket), seconds is None
    )


def _has_untimed_variant(bucket: Bucket, record: BucketRecord, plan: Plan) -> bool:
    return bool({one.name for one in plan.variants(bucket)} - {one.variant for one in record.trials} - {record.variant})


def _variant_reasons(bucket: Bucket, cached: str, plan: Plan) -> list[str]:
    """Why the bucket's program would be made in another way. Without time to try, the first candidate is taken."""
    names = [variant.name for variant in plan.variants(bucket)][: None if plan.tune_seconds else 1]
    if names == [cached]:
        return []
    return ["mode auto would tune this plan anew"] if len(names) > 1 else [f"mode: {names[0]} instead of {cached}"]


def _median_seconds(cached: Manifest, bucket: Bucket) -> float | None:
    alike = [seconds for name, seconds in cached.cold_seconds().items() if name.startswith(bucket.phase)]
    return statistics.median(alike) if alike else None


def _environment(cached: Manifest) -> Environment:
    return parse_environment(cached.environment)


def _lists_to_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(_lists_to_tuples(one) for one in value) if isinstance(value, list) else value


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in config.items() if is_config_factor(name) and name not in NON_LAYER_CONFIG_KEYS
    }


def _with_tuples(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _lists_to_tuples(value) for name, value in document.items()}
