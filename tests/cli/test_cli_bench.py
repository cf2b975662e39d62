"""`tcdeploy bench` as a command: validation before torch is imported, and runs on the embedded model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.models.location import BUILTIN_MODELS
from tests.bench.fake_server import FakeServer, run_in_thread
from tests.conftest import ROOT, RunCLI
from tests.formats.checkpoint import write_checkpoint
from tests.formats.fp8 import FORMATS

SMALL = ("--buckets", "32", "--batch-sizes", "2", "--context", "128")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("bench-cache"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("decode", "--repeats", "0"), "repeats is 0"),
        (("decode", "--baseline", "vllm"), "unknown baseline 'vllm'"),
        (("decode", "--output", "/no/such/folder/x.json"), "does not exist"),
        (("decode", "--plot", "/no/such/folder/x.png"), "does not exist"),
        (("decode", "--steps", "0"), "steps is 0"),
        (("prefill", "--lengths", "12,many"), "expected a list of integers"),
        (("prefill", "--lengths", "-3"), "prompt length is -3"),
        (("throughput", "--requests", "0"), "requests is 0"),
        (("throughput", "--request-rate", "-1"), "request rate is -1"),
        (("throughput", "--request-rate", "often"), "expected a number"),
        (("startup", "--warm-runs", "0"), "warm runs is 0"),
        (("quality",), "--text is missing"),
        (("quality", "--text", "/no/such.txt"), "/no/such.txt cannot be read"),
        (("quality", "--text", "/dev/null"), "/dev/null is empty"),
        (("quality", "--text", "x", "--window", "1"), "--window is 1"),
        (("quality", "--text", "x", "--output", "/no/such/folder/x.json"), "does not exist"),
    ],
)
def test_bad_input_is_refused_before_torch(
    run_cli: RunCLI, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    command, *options = arguments
    completed = run_cli("bench", command, "builtin:tiny", *options, PYTHONPATH=f"{tmp_path}:{ROOT}")
    lines = completed.stderr.splitlines()
    assert (completed.returncode, completed.stdout) == (2, "")
    assert [line.partition(" ")[0] for line in lines] == ["error:", "hint:"]
    assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--sweep", "4,often"), "expected a list of numbers"),
        (("--slo", "ttft"), "expected METRIC=MILLISECONDS"),
        (("--trace", "/no/such.jsonl"), "/no/such.jsonl cannot be read"),
        (("--trace", "t.jsonl", "--sweep", "2"), "--sweep has no effect with --trace"),
        (("--sweep", "4", "--output", "/no/such/folder/x.json"), "does not exist"),
    ],
)
def test_a_load_that_cannot_be_run_is_refused(run_cli: RunCLI, arguments: tuple[str, ...], word: str) -> None:
    completed = run_cli("bench", "serve", *arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    error = next(line for line in completed.stderr.splitlines() if line.startswith("error:"))  # after warnings
    assert word in error


def test_a_sweep_prints_a_row_per_rate_and_where_the_limits_are_exceeded(run_cli: RunCLI, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    small = ("--duration", "0.5", "--input-length", "4", "--output-length", "3", "--slo", "ttft=60000")
    with run_in_thread(FakeServer()) as url:
        completed = run_cli(
            "bench", "serve", "--url", url, "--sweep", "8,20", *small, "--tpot-limit", "0.001", "--output", str(output)
        )
    document = parse_document(completed)
    assert json.loads(output.read_text()) == document
    assert [(row["request_rate"], row["requests"]) for row in document["rows"]] == [(8.0, 4), (20.0, 10)]
    assert document["sweep"]["tpot_limit_rate"] == document["sweep"]["limit_rate"] == 8.0
    assert document["rows"][0]["goodput"]["share"] == 1.0
    assert document["rows"][0]["latencies"]["request_gap_ms"]["mean"] > 0
    lines = lines_without_warnings(completed)
    assert [re.sub(r" +\d+\.\d s$", "", line) for line in lines[:2]] == ["8 requests/s", "20 requests/s"]
    assert [line.split()[:2] for line in lines[3:5]] == [["fake", "8"], ["fake", "20"]]
    assert lines[-1] == "time per token, mean, above 0.001 ms: first at 8 requests/s"


def test_lengths_beyond_the_context_are_refused_before_weights_are_loaded(run_cli: RunCLI) -> None:
    completed = run_cli("bench", "throughput", "builtin:tiny", *SMALL, "--input-length", "100", "--output-length", "29")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "error: a request (100 in, 29 out) is 129 tokens, and the context is 128" in completed.stderr
    assert not re.search(r"^load\b", completed.stderr, re.MULTILINE)


def test_a_window_beyond_the_context_is_refused_before_weights_are_loaded(run_cli: RunCLI) -> None:
    text = ("--text", str(ROOT / "LICENSE"), "--window", "129")
    completed = run_cli("bench", "quality", "builtin:tiny", *SMALL, *text)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "error: --window for builtin:tiny is 129 tokens, and the context is 128" in completed.stderr
    assert not re.search(r"^load\b", completed.stderr, re.MULTILINE)


def test_help_of_each_benchmark_shows_the_defaults_of_its_settings(run_cli: RunCLI) -> None:
    completed = run_cli("bench", "--help")
    assert completed.returncode == 0
    for command in ("decode", "prefill", "throughput", "quality", "startup", "serve"):
        assert f"  {command} " in completed.stdout
        assert run_cli("bench", command, "--help").returncode == 0
    text = " ".join(run_cli("bench", "decode", "--help").stdout.split())
    assert "Isolated steps per bucket [default: 30]" in text
    assert "[default: 512, or less if the KV cache is smaller]" in text


def lines_without_warnings(completed: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of stderr without the warning of a busy machine: other tests run beside this one."""
    return [line for line in completed.stderr.splitlines() if not line.endswith("on a busy machine")]


def parse_document(completed: subprocess.CompletedProcess[str]) -> Any:
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_decode_beside_every_baseline(run_cli: RunCLI, shared_cache: str, tmp_path: Path) -> None:
    baselines = [word for name in ("eager", "generate", "region") for word in ("--baseline", name)]
    quick = ("--context-length", "40", "--repeats", "3", "--steps", "4")
    output = tmp_path / "decode.json"
    files = ("--output", str(output), "--cache-dir", shared_cache)
    completed = run_cli("bench", "decode", "builtin:tiny", *SMALL, *quick, *baselines, *files)
    document = parse_document(completed)
    assert json.loads(output.read_text()) == document
    assert (document["schema"], document["command"], document["plan"]["key"] != "") == (3, "bench decode", True)
    assert document["settings"]["repeats"] == 3 and document["environment"]["torch"]
    assert document["machine"]["copy_bytes_per_second"] > 0 and document["device_memory"] is None
    assert document["machine"]["matmul_flop_per_second"] > 0
    subjects = [(row["subject"], row["batch"]) for row in document["rows"]]
    assert subjects == [(name, 2) for name in ("tcdeploy", "eager", "generate", "region")]
    assert any(note.startswith("region: graphs is none") for note in document["notes"])
    assert any(note.startswith("generate: not compiled") for note in document["notes"])
    assert document["environment"]["cpu_name"]
    assert "eager: transformers' model with its own attention (SDPA) in a plain loop" in completed.stderr
    header = next(line for line in completed.stderr.splitlines() if "ms per step" in line)
    assert "of floor" in header
    subjects = [line.split()[0] for line in lines_without_warnings(completed) if "%" in line]
    assert subjects == ["tcdeploy", "eager", "generate", "region"]


def test_throughput_and_prefill_write_their_documents(run_cli: RunCLI, shared_cache: str) -> None:
    cached = ("--cache-dir", shared_cache)
    quick = ("--requests", "3", "--input-length", "9", "--output-length", "4", "--request-rate", "50")
    document = parse_document(
        run_cli("bench", "throughput", "builtin:tiny", *SMALL, *quick, "--baseline", "eager", *cached)
    )
    deployment, eager = document["rows"]
    assert deployment["engine"]["compiles"] == 0 and deployment["requests"] == 3
    assert len(deployment["request_timings"]) == 3
    reason = "it runs whole batches, and supports neither --request-rate nor --concurrency"
    assert eager == {"subject": "eager", "reason": reason}
    completed = run_cli("bench", "prefill", "builtin:tiny", *SMALL, "--lengths", "8,60", "--repeats", "2", *cached)
    assert [row["tokens"] for row in parse_document(completed)["rows"]] == [8, 60]
    assert "TTFT ms" in completed.stderr


def test_a_quantised_model_beside_the_one_that_it_was_made_from(
    run_cli: RunCLI, shared_cache: str, tmp_path: Path
) -> None:
    """`compile` reports the same numbers as `bench quality`, of the same programs."""
    write_checkpoint(FORMATS["fbgemm"], BUILTIN_MODELS["builtin:tiny"], tmp_path / "fp8")
    text, output = ("--text", str(ROOT / "LICENSE"), "--tokens", "300", "--window", "128"), tmp_path / "quality.json"
    options = (*SMALL, *text, "--against", "builtin:tiny", "--cache-dir", shared_cache)
    completed = run_cli("bench", "quality", str(tmp_path / "fp8"), *options, "--output", str(output))
    document = parse_document(completed)
    assert json.loads(output.read_text()) == document
    row, reference = document["rows"]
    assert [(item["subject"], item["model"]) for item in document["rows"]] == [
        ("tcdeploy", str(tmp_path / "fp8")), ("reference", "builtin:tiny"),
    ]  # fmt: skip
    assert 0 < row["kl_nats"] < 0.1 and 0.8 < row["top1_agreement"] < 1
    assert row["perplexity"] != reference["perplexity"] and reference["kl_nats"] is None
    assert (document["text"]["scored_tokens"], document["text"]["windows"]) == (297, 3)
    assert document["plan"]["model"] == str(tmp_path / "fp8") and document["settings"]["against"] == "builtin:tiny"
    lines = completed.stderr.splitlines()
    stages = [line.split()[0] for line in lines if re.match(r"(load|text)\b.* s", line)]
    assert stages == ["load", "text", "load", "text"], "the reference is measured before the model is loaded"
    assert (
        next(line.split() for line in lines if "KL nats" in line) == "perplexity nats/token KL nats top-1 model".split()
    )
    assert document["notes"][0].startswith(
        f"perplexity {row['perplexity']:.5g} over 297 tokens of {ROOT / 'LICENSE'}; KL "
    )
    assert set(document["notes"]) <= set(lines)
    compiled = parse_document(run_cli("compile", str(tmp_path / "fp8"), *options, "--json"))
    assert compiled["quality"] == {"rows": document["rows"], "text": document["text"], "notes": document["notes"]}


def test_compile_prints_the_perplexity_below_its_table(run_cli: RunCLI, shared_cache: str) -> None:
    text = ("--text", str(ROOT / "LICENSE"), "--tokens", "40")
    completed = run_cli("compile", "builtin:tiny", *SMALL, *text, "--cache-dir", shared_cache)
    assert completed.returncode == 0, completed.stderr
    assert re.search(rf"^perplexity [\d.e+]+ over 39 tokens of {ROOT / 'LICENSE'}$", completed.stdout, re.MULTILINE)
    assert completed.stdout.splitlines()[-1].endswith(f"builtin:tiny {' '.join(SMALL)} --cache-dir {shared_cache}")
    refused = run_cli("compile", "builtin:tiny", *text, "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error: --text excludes --dry-run\nhint: remove --text and --against" in refused.stderr
