"""Runs a forecast and the start that it predicts in one forked process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import cli_environment
from tests.fork_server import ForkServer


def forecast_and_start(fork_server: ForkServer, home: Path, **question: Any) -> dict[str, Any]:
    """In a forked process: forecast the recipe `flags` from the manifests of a folder, then start it."""
    script = f"from tests.bundle.forecast_runs import print_forecast_and_outcomes as run; run({json.dumps(question)!r})"
    done = fork_server.run(environ=cli_environment(home), script=script)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def print_forecast_and_outcomes(question_json: str) -> None:
    """Runs in the forked process; prints the result as JSON."""
    from tcdeploy.bundle.why import forecast, merge_forecasts
    from tcdeploy.cache.record.manifest import read_manifest
    from tcdeploy.planning.recipe import build_recipe
    from tcdeploy.start.decide import decide, origin_of
    from tcdeploy.start.prepare import prepare

    question = json.loads(question_json)
    exec(question.get("before", ""))
    recipe = build_recipe(question["flags"], environ={})
    result: dict[str, Any] = {}
    manifests = [read_manifest(path) for path in sorted(Path(question["cached"], "manifests").glob("*.json"))]
    if manifests:
        planned = decide(recipe)
        origin = origin_of(planned)
        forecasts = [forecast(cached, planned.plan, planned.environment, origin) for cached in manifests if cached]
        buckets = merge_forecasts(forecasts).buckets
        result["forecast"] = {bucket.bucket: "hit" if bucket.is_hit else "miss" for bucket in buckets}
        result["reasons"] = {bucket.bucket: bucket.reasons for bucket in buckets}
    deployment = prepare(recipe, needs_model=True)
    result["outcomes"] = {record.bucket: record.outcome for record in deployment.records}
    print(json.dumps(result))
