"""A forecast and the start that it is of, in one process: a fork, since many are wanted (forks.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import cli_environment
from tests.fork_server import ForkServer


def forecast_and_start(fork_server: ForkServer, home: Path, **question: Any) -> dict[str, Any]:
    """Have a process build the recipe `flags`, forecast it from the manifests of a folder, and then really start it."""
    script = f"from tests.bundle.forecast_runs import tell; tell({json.dumps(question)!r})"
    done = fork_server.run(environ=cli_environment(home), script=script)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def print_forecast_and_outcomes(asked: str) -> None:
    """In that process: the answer on stdout."""
    from tcdeploy import pipeline
    from tcdeploy.bundle.why import forecast, merge_forecasts
    from tcdeploy.cache.manifest import read_manifest
    from tcdeploy.planning.recipe import build_recipe

    question = json.loads(asked)
    exec(question.get("before", ""))
    recipe = build_recipe(question["flags"], environ={})
    answer: dict[str, Any] = {}
    manifests = [read_manifest(path) for path in sorted(Path(question["cached"], "manifests").glob("*.json"))]
    if manifests:
        planned = pipeline.decide(recipe)
        origin = pipeline.origin_of(planned)
        found = merge_forecasts([forecast(one, planned.plan, planned.environment, origin) for one in manifests if one])
        answer["forecast"] = {one.bucket: "hit" if one.is_hit else "miss" for one in found.buckets}
        answer["reasons"] = {one.bucket: one.reasons for one in found.buckets}
    deployment = pipeline.prepare(recipe)
    answer["happened"] = {record.bucket: record.outcome for record in deployment.records}
    print(json.dumps(answer))
