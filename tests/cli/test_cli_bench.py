"""`tcdeploy bench` as a person types it: refusals in a blink, JSON alone on stdout, and runs on the embedded model."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

RunCli = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--buckets", "32", "--batch-sizes", "2", "--context", "128")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("bench-cache"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("decode", "--repeats", "0"), "repeats is 0"),
        (("decode", "--baseline", "vllm"), "no baseline 'vllm'"),
        (("decode", "--output", "/no/such/folder/x.json"), "does not exist"),
        (("decode", "--plot", "/no/such/folder/x.png"), "does not exist"),
        (("decode", "--price-per-hour", "0"), "price per hour is 0"),
        (("prefill", "--lengths", "12,many"), "no list of whole numbers"),
        (("prefill", "--lengths", "-3"), "prompt length is -3"),
        (("throughput", "--requests", "0"), "number of requests is 0"),
        (("throughput", "--request-rate", "-1"), "request rate is -1"),
        (("throughput", "--request-rate", "often"), "no number"),
        (("startup", "--warm-runs", "0"), "warm runs is 0"),
    ],
)
def test_bad_input_is_refused_before_torch(
    run_cli: RunCli, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    command, *options = arguments
    done = run_cli("bench", command, "builtin:tiny", *options, PYTHONPATH=f"{tmp_path}:{ROOT}")
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, [line.partition(" ")[0] for line in lines]) == (2, "", ["error:", "hint:"])
    assert word in lines[0]


def test_lengths_beyond_the_context_are_refused_before_the_weights(run_cli: RunCli) -> None:
    done = run_cli("bench", "throughput", "builtin:tiny", *SMALL, "--input-length", "100", "--output-length", "29")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: a request (100 in, 29 out) is 129 tokens, and the context is 128" in done.stderr
    assert "load ..." not in done.stderr


def test_each_benchmark_has_its_help_with_defaults_from_the_settings(run_cli: RunCli) -> None:
    done = run_cli("bench", "--help")
    assert done.returncode == 0
    for command in ("decode", "prefill", "throughput", "startup"):
        assert f"  {command} " in done.stdout
        assert run_cli("bench", command, "--help").returncode == 0
    text = " ".join(run_cli("bench", "decode", "--help").stdout.split())
    assert "Of a step alone, per bucket [default: 30]" in text
    assert "[default: 512, or what fits]" in text


def document_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_decode_beside_every_baseline(run_cli: RunCli, shared_cache: str, tmp_path: Path) -> None:
    baselines = [word for name in ("eager", "generate", "region") for word in ("--baseline", name)]
    quick = ("--context-length", "40", "--repeats", "3", "--steps", "4", "--price-per-hour", "2")
    out = tmp_path / "decode.json"
    done = run_cli(
        "bench", "decode", "builtin:tiny", *SMALL, *quick, *baselines, "--output", str(out), "--cache-dir", shared_cache
    )
    document = document_of(done)
    assert json.loads(out.read_text()) == document
    assert (document["schema"], document["command"], document["plan"]["key"] != "") == (1, "bench decode", True)
    assert document["settings"]["repeats"] == 3 and document["environment"]["torch"]
    assert document["machine"]["copy_bytes_per_second"] > 0 and document["device_memory"] is None
    subjects = [(row["subject"], row["batch"]) for row in document["rows"]]
    assert subjects == [(name, 2) for name in ("tcdeploy", "eager", "generate", "region")]
    assert any(note.startswith("region: graphs is none") for note in document["notes"])
    assert any(note.startswith("generate: not compiled") for note in document["notes"])
    header = next(line for line in done.stderr.splitlines() if "ms per step" in line)
    assert "of floor" in header and "per 1M tok" in header
    shown = [line.split()[0] for line in done.stderr.splitlines() if "%" in line]
    assert shown == ["tcdeploy", "eager", "generate", "region"]


def test_throughput_and_prefill_write_their_documents(run_cli: RunCli, shared_cache: str) -> None:
    cached = ("--cache-dir", shared_cache)
    quick = ("--requests", "3", "--input-length", "9", "--output-length", "4", "--request-rate", "50")
    document = document_of(
        run_cli("bench", "throughput", "builtin:tiny", *SMALL, *quick, "--baseline", "eager", *cached)
    )
    ours, eager = document["rows"]
    assert ours["engine"]["compiles"] == 0 and ours["requests"] == 3
    assert eager == {"subject": "eager", "reason": "it serves whole batches, and knows no arrivals over time"}
    done = run_cli("bench", "prefill", "builtin:tiny", *SMALL, "--lengths", "8,60", "--repeats", "2", *cached)
    assert [row["tokens"] for row in document_of(done)["rows"]] == [8, 60]
    assert "first token ms" in done.stderr


def test_the_process_that_startup_measures_tells_when_its_first_token_came(run_cli: RunCli, shared_cache: str) -> None:
    """As the parent calls it; on a cache that is warm already, so that the test is quick."""
    before = time.time()
    child = ("--child", "--prompt-length", "5", "--cache-dir", shared_cache)
    child_report = document_of(run_cli("bench", "startup", "builtin:tiny", *SMALL, *child))
    assert before < child_report["began"] < child_report["ended"] < time.time()
    assert list(child_report["stage_seconds"]) == ["import", "decide", "load", "compile", "record", "first token"]
    assert child_report["plan"]["model"] == "builtin:tiny" and child_report["environment"]["torch"]
