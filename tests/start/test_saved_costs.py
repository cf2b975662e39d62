"""The times that an idle server measures reach the next start, by the manifest."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import Manifest, read_manifest, write_manifest
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.step_costs import StepCosts
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.prepare import prepare
from tests.conftest import TINY, TINY_BATCH_SIZES

FAST, SLOW = 32, 64  # tokens


def start(cache_dir: str) -> Deployment:
    flags = {"model": TINY, "shapes": "dynamic", "buckets": (320,), "batch_sizes": TINY_BATCH_SIZES, "kv_blocks": 98}
    return prepare(build_recipe({**flags, "cache_dir": cache_dir}, environ={}))


def costs_of(deployment: Deployment) -> StepCosts:
    assert deployment.engine.clock is not None
    return deployment.engine.clock.predictor.costs


def manifest_of(deployment: Deployment, cache_dir: str) -> Manifest:
    manifest = read_manifest(manifest_path(cache_dir, deployment.plan.key))
    assert manifest is not None
    return manifest


def save(deployment: Deployment, costs: StepCosts) -> None:
    deployment.engine.save_costs(costs)
    for thread in threading.enumerate():
        if thread.name == "step-costs":
            thread.join(60)


def test_the_next_start_knows_the_sizes_that_an_idle_server_has_timed(cache_dir: str) -> None:
    first = start(cache_dir)
    least = min(ms for _, ms in costs_of(first).prefill_ms)
    costs = costs_of(first).with_prefill_ms(SLOW, 1e4).with_prefill_ms(FAST, least)
    save(first, costs)
    second = start(cache_dir)
    # Another test may have timed further sizes of this plan in the shared folder.
    assert costs_of(second) == costs and {FAST, SLOW} <= set(costs.idle_sizes)
    assert SLOW in second.engine.runner.graphs._skipped_sizes and FAST in second.engine._timed_sizes
    assert SLOW not in second.engine._timed_sizes, "it is timed again, in case that its timing was interrupted"
    before = manifest_of(second, cache_dir)
    save(second, dataclasses.replace(costs, decode_context_ms=costs.decode_context_ms + 1))
    assert manifest_of(second, cache_dir) == before, "another process has measured the other costs"
    sources = {**before.origin.sources, next(iter(before.origin.sources)): "0" * 64}
    changed = dataclasses.replace(before, origin=dataclasses.replace(before.origin, sources=sources))
    write_manifest(manifest_path(cache_dir, second.plan.key), changed)
    assert costs_of(start(cache_dir)).idle_sizes == (), "steps are timed again if the programs have changed"


@pytest.mark.parametrize("idle_sizes", [(64,), (128, 64)])
def test_sizes_timed_while_idle_have_a_time(idle_sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not all timed"):
        StepCosts(((128, 7.0),), ((1, 5.0),), idle_sizes=idle_sizes)


def test_costs_that_a_start_has_not_measured_are_measured_while_idle(cache_dir: str) -> None:
    deployed = start(cache_dir)
    runner, key = deployed.engine.runner, deployed.plan.key
    path = manifest_path(cache_dir, key)
    before = manifest_of(deployed, cache_dir)
    write_manifest(path, dataclasses.replace(before, step_costs=None))
    engine = Engine(runner, None, deployed.engine.save_costs, measures_costs=True)
    stops = iter([False] * 3)
    assert engine.capture_next_graph(lambda: next(stops, True)), "a request came before the fourth timing"
    assert engine.clock is None and engine.runner.reserved_blocks is None and not engine.has_work
    assert engine.capture_next_graph()
    assert engine.clock is not None and runner.row_assignment.is_empty
    assert engine.allocator.num_allocatable == engine.allocator.capacity
    save(deployed, engine.clock.predictor.costs)
    assert manifest_of(deployed, cache_dir).step_costs is not None
    assert costs_of(start(cache_dir)) == engine.clock.predictor.costs
    write_manifest(path, before)


def test_an_engine_without_costs_measures_none_unless_it_should(cache_dir: str) -> None:
    engine = Engine(start(cache_dir).engine.runner)
    while engine.capture_next_graph():
        pass
    assert engine.clock is None
