"""Many real starts in little time: a process that has imported everything, and forks for each one.

A start of the command takes 5 s on this kind of machine to import torch and transformers, and less than one to look at
a warm cache. A child of a process that has done no more than import is as fresh as a new process: nothing was compiled,
no cache folder was read, no thread was started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import cli_environment


class Starts:
    """`ask` has a child build the recipe, forecast it from the manifests of a folder, and then really start it."""

    def __init__(self, home: Path, **environ: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.bundle.starts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=cli_environment(home, **environ),
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    from tcdeploy import pipeline
    from tcdeploy.bundle.why import best_of, forecast
    from tcdeploy.compiler.manifest import read_manifest
    from tcdeploy.recipe import build_recipe

    os.environ.update(question.get("environ", {}))
    for line in question.get("before", []):
        exec(line)
    recipe = build_recipe(question["flags"], environ={})
    answer: dict[str, Any] = {}
    manifests = [read_manifest(path) for path in sorted(Path(question["cached"], "manifests").glob("*.json"))]
    if manifests:
        decided = pipeline.decide(recipe)
        origin = pipeline.origin_of(decided)
        found = best_of([forecast(one, decided.plan, decided.environment, origin) for one in manifests if one])
        answer["forecast"] = {one.bucket: "hit" if one.is_hit else "miss" for one in found.buckets}
        answer["reasons"] = {one.bucket: one.reasons for one in found.buckets}
    if not question.get("only_forecast"):
        deployment = pipeline.prepare(recipe)
        answer["happened"] = {record.bucket: record.outcome for record in deployment.records}
        answer["seconds"] = {record.bucket: record.compile_seconds for record in deployment.records}
    return answer


def _serve() -> None:
    import tcdeploy.pipeline  # noqa: F401 - what takes the time

    for line in sys.stdin:
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                answer = _answer(json.loads(line))
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writer, "w") as out:
                out.write(json.dumps(answer))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            print(told.read(), flush=True)
        os.wait()


if __name__ == "__main__":
    _serve()
