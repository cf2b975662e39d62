"""Shapes beyond the largest bucket are served, recorded once per process, and added by `warm --from`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.server.observe.missed_shapes import MissedShapes
from tests.conftest import TINY
from tests.server.conftest import ServerProcess


def test_a_prompt_beyond_the_largest_bucket_is_served_counted_and_recorded_once(
    server: ServerProcess, warm_cache: Path
) -> None:
    def count_records() -> int:
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return records.count({"phase": "prefill", "size": 256})

    file = warm_cache / "missed_shapes.jsonl"
    before, records_before = server.metric("missed_shapes_total", bucket="prefill:256"), count_records()
    for _ in range(2):
        completion = server.client.completions.create(model=TINY, prompt=[40] * 200, max_tokens=2)
        assert completion.usage is not None and completion.usage.prompt_tokens == 200
    assert server.metric("missed_shapes_total", bucket="prefill:256") == before + 2
    assert server.metric("recompiles_total") == 0
    wait_until(lambda: count_records() == records_before + (before == 0) >= 1)  # a thread writes it, once per process


def test_warm_adds_a_bucket_per_recorded_shape(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    """The last record has the key of release 0.2, "kind"."""
    missed_shapes = tmp_path / "missed_shapes.jsonl"
    shapes = [{"phase": "prefill", "size": 256}, {"phase": "decode", "size": 8}, {"kind": "prefill", "size": 256}]
    missed_shapes.write_text("\n".join(map(json.dumps, shapes)))
    flags = ("--buckets", "32,128", "--batch-sizes", "1,4", "--cache-dir", str(tmp_path / "cache"))
    result = run_cli("warm", TINY, *flags, "--from", str(missed_shapes), "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    buckets = [(bucket["phase"], bucket["size"]) for bucket in json.loads(result.stdout)["plan"]["buckets"]]
    assert buckets == [("prefill", size) for size in (32, 128, 256)] + [("decode", size) for size in (1, 4, 8)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true within 30 s"
        time.sleep(0.01)


def observe(folder: Path) -> None:
    """Miss a shape, in a thread because an open FIFO would wait, and wait for the thread that writes it."""
    plan: Any = SimpleNamespace(
        cache_dir=str(folder), prefill_buckets=[SimpleNamespace(size=32)], decode_buckets=[SimpleNamespace(size=1)]
    )
    observer = threading.Thread(target=MissedShapes(plan).observe_shape, args=("prefill", 200), daemon=True)
    before = threading.active_count()
    observer.start()
    wait_until(lambda: threading.active_count() == before)


def test_a_shape_is_written_outside_of_the_thread_that_observes_it(tmp_path: Path) -> None:
    """The thread that observes a shape runs the event loop."""
    threads = []
    missed = MissedShapes(SimpleNamespace(  # type: ignore[arg-type]
        cache_dir=str(tmp_path), prefill_buckets=[SimpleNamespace(size=32)], decode_buckets=[SimpleNamespace(size=1)]
    ))  # fmt: skip
    missed._append = lambda *_: threads.append(threading.current_thread())  # type: ignore[method-assign]
    missed.observe_shape("prefill", 200)
    wait_until(lambda: len(threads) == 1)
    assert threads[0] is not threading.current_thread() and threads[0].daemon


@pytest.mark.parametrize("form", ["fifo", "link", "hard link", "device"])
def test_a_file_that_leads_elsewhere_is_not_written(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    private, file = tmp_path / "private", tmp_path / "missed_shapes.jsonl"
    private.write_text("secret")
    if form == "fifo":
        os.mkfifo(file)
    elif form == "hard link":
        file.hardlink_to(private)
    else:
        file.symlink_to(private if form == "link" else "/dev/full")
    observe(tmp_path)
    assert private.read_text() == "secret"
    assert "cannot write the missed shape prefill:256" in caplog.text


@pytest.mark.parametrize(
    "content",
    [None, "no json", '{"phase": "other", "size": 1}', "[1]", "[" * 200_000, '{"phase": "prefill", "size": 1e999}'],
)
def test_a_missing_or_malformed_file_is_a_usage_error(
    run_cli: Callable[..., Any], tmp_path: Path, content: str | None
) -> None:
    missed_shapes = tmp_path / "missed.jsonl"
    if content is not None:
        missed_shapes.write_text(content)
    result = run_cli("warm", TINY, "--from", str(missed_shapes), "--dry-run")
    assert result.returncode == 2 and "missed" in result.stderr
