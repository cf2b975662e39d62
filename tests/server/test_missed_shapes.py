"""What no bucket holds is served by those there are, written down, and warmed next time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.server.conftest import ServerProcess


def test_a_prompt_beyond_the_buckets_is_served_counted_and_written_once(
    server: ServerProcess, warm_cache: Path
) -> None:
    def lines() -> int:
        found = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
        return found.count({"kind": "prefill", "size": 256})

    written = warm_cache / "missed_shapes.jsonl"
    before, lines_before = server.metric("missed_shapes_total", bucket="prefill:256"), lines()
    for _ in range(2):
        answer = server.client.completions.create(model=TINY, prompt=[40] * 200, max_tokens=2)
        assert answer.usage is not None and answer.usage.prompt_tokens == 200
    assert server.metric("missed_shapes_total", bucket="prefill:256") == before + 2
    assert server.metric("recompiles_total") == 0
    assert lines() == lines_before + (before == 0) >= 1, "once per process"


def test_warm_takes_them_up(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    missed_shapes = tmp_path / "missed_shapes.jsonl"
    shapes = [{"kind": "prefill", "size": 256}, {"kind": "decode", "size": 8}, {"kind": "prefill", "size": 256}]
    missed_shapes.write_text("\n".join(map(json.dumps, shapes)))
    flags = ("--buckets", "32,128", "--batch-sizes", "1,4", "--cache-dir", str(tmp_path / "cache"))
    result = run_cli("warm", TINY, *flags, "--from", str(missed_shapes), "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    buckets = [(bucket["phase"], bucket["size"]) for bucket in json.loads(result.stdout)["plan"]["buckets"]]
    assert buckets == [("prefill", size) for size in (32, 128, 256)] + [("decode", size) for size in (1, 4, 8)]


@pytest.mark.parametrize("content", [None, "no json", '{"kind": "other", "size": 1}', "[1]"])
def test_a_file_that_is_none_is_refused(run_cli: Callable[..., Any], tmp_path: Path, content: str | None) -> None:
    missed_shapes = tmp_path / "missed.jsonl"
    if content is not None:
        missed_shapes.write_text(content)
    result = run_cli("warm", TINY, "--from", str(missed_shapes), "--dry-run")
    assert result.returncode == 2 and "missed" in result.stderr
