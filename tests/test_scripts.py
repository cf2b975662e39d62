"""Claims of the documentation about the repository, and the flags with which the benchmark scripts run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from tcdeploy.errors import NetworkError
from tcdeploy.planning.environment import installed_flash_packages
from tests.bench.fake_server import FakeServer, run_in_thread

ROOT = Path(__file__).resolve().parent.parent


def test_the_python_files_that_the_documentation_names_exist() -> None:
    """Except templates (with NAME) and files marked as `(new)`. A name may be relative to tcdeploy/."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pattern = re.compile(r"`((?:\w+/)*(?!\w*NAME)\w+\.py)`(?! \(new\))")
    named = {name for page in pages for name in pattern.findall(page.read_text(encoding="utf-8"))}
    assert len(named) >= 30
    missing = [name for name in sorted(named) if not any((ROOT / base / name).is_file() for base in ("", "tcdeploy"))]
    assert missing == []


def test_the_console_script_of_the_readme_is_declared() -> None:
    assert 'tcdeploy = "tcdeploy.cli.app:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("bench-serve", ("COMMON_FLAGS", "FULL_BUCKETS")),
        ("bench-serve", ("COMMON_FLAGS", "BUCKETS_2048")),
        ("bench-serve", ("COMMON_FLAGS", "BUCKETS_512")),
        ("bench-speed", ("LARGE",)),
        ("bench-speed", ("SMALL",)),
    ],
)
def test_the_flags_of_a_gpu_benchmark_make_a_plan(script: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Finds contradicting flags without a GPU."""
    from tcdeploy.cli.app import app

    config = json.loads((ROOT / "scripts/configs/llama-3.1-8b/config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | small))
    flags = [flag for part in parts for flag in getattr(load_script(script), part)]
    arguments = ["compile", str(tmp_path), "--load-format", "dummy", *flags, "--dry-run"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_traffic_of_another_server_is_measured_and_earlier_results_are_kept(tmp_path: Path) -> None:
    """The second call measures nothing: its table has the results that are in the folder."""
    out = tmp_path / "results"
    trial = ["--only", "one-client", "sweep", "--divide-lengths", "128", "--sweep", "8,20", "--duration", "0.3"]
    with run_in_thread(FakeServer()) as url:
        tables = [
            run_script("bench-traffic", "--out", str(out), *arguments)
            for arguments in (["--other", f"fake={url}", *trial], [])
        ]
    assert tables[0] == tables[1]
    lines = tables[0].splitlines()
    subjects = [line.split()[:3] for line in lines]
    assert subjects[1:3] == [["sweep", "fake", "8/s"], ["sweep", "fake", "20/s"]]
    assert lines[0].startswith("one-client   fake") and "first token, p99, above 500 ms" in lines[3]
    assert {path.name for path in out.iterdir()} >= {"one-client.fake.json", "sweep.fake.json"}


def test_the_loads_of_bench_traffic_are_valid(tmp_path: Path) -> None:
    """Each reaches the server, which is absent: exit code 8, not 2."""
    from tcdeploy.cli.app import app

    script = load_script("bench-traffic")
    chats = [*script.chat_lines(divisor=1), *script.long_prompt_lines(script.LONG_PROMPTS, divisor=1)]
    script.write_trace(tmp_path / "chats.jsonl", chats)
    script.write_trace(tmp_path / "long-alone.jsonl", script.long_prompt_lines(script.ALONE_PROMPTS, divisor=1))
    options = Namespace(out=tmp_path, divide_lengths=1, sweep=script.SWEEP_RATES, duration=30)
    for load, flags in script.load_flags(options).items():
        result = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", *flags])
        assert isinstance(result.exception, NetworkError), load
    assert len(chats) == 16 * 12 + 6 and max(line["input_length"] for line in chats) == 32768


def test_results_of_bench_traffic_that_failed_have_a_row() -> None:
    script = load_script("bench-traffic")
    assert list(script.format_rows("chats", "ours", {"failed": "exit code 8"})) == [
        "chats        ours       failed: exit code 8"
    ]
    row = {"kind": "chat", "request_rate": None, "failures": {"HTTP 400": 2}, "requests": 2, "latencies": None}
    [line] = script.format_rows("chats", "ours", {"rows": [{**row, "kind": ""}, row]})
    assert line.split() == ["chats", "ours", "chat", "2", "of", "2", "failed:", "HTTP", "400"]


def test_bench_traffic_describes_padding_by_kind_of_bucket() -> None:
    script = load_script("bench-traffic")
    lines = [
        'tcdeploy:bucket_tokens_total{bucket="prefill:2-2048"} 1000.0',
        'tcdeploy:bucket_tokens_total{bucket="decode:32"} 320.0',
        'tcdeploy:bucket_tokens_total{bucket="decode:16"} 80.0',
        'tcdeploy:bucket_padding_tokens_total{bucket="prefill:2-2048"} 20.0',
        'tcdeploy:bucket_padding_tokens_total{bucket="decode:32"} 100.0',
        'tcdeploy:bucket_padding_tokens_total{bucket="decode:16"} 20.0',
        "tcdeploy:graph_captures_total 3.0",
    ]
    described = script.describe_metrics(Counter(), script.parse_metrics("\n".join(lines)))
    assert described.startswith("padding 10.0% (2.0% of steps with prompts, 30.0% of decode steps); 3 captures")


def test_a_made_shape_has_the_sampling_defaults_of_qwen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"vocab_size": 300}')
    monkeypatch.setattr(sys, "argv", ["make-shape", str(tmp_path / "config"), str(tmp_path / "shape")])
    load_script("make-shape").main()
    defaults = json.loads((tmp_path / "shape/generation_config.json").read_text())
    assert defaults == {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert (tmp_path / "shape/tokenizer.json").exists()


def test_a_made_shape_can_have_fewer_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()
    config = {"vocab_size": 300, "num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]}
    (tmp_path / "config/config.json").write_text(json.dumps(config | {"hybrid_override_pattern": "ME*E"}))
    arguments = ["make-shape", str(tmp_path / "config"), str(tmp_path / "shape"), "--layers", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    load_script("make-shape").main()
    made = json.loads((tmp_path / "shape/config.json").read_text())
    expected = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "hybrid_override_pattern": "ME*"}
    assert {name: made[name] for name in expected} == expected


@pytest.mark.parametrize("layers", ["0", "-1", "5"])
def test_a_made_shape_has_no_more_layers_than_the_model(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "num_hidden_layers": 4}')
    monkeypatch.setattr(sys, "argv", ["make-shape", str(tmp_path), str(tmp_path / "shape"), "--layers", layers])
    with pytest.raises(SystemExit):
        load_script("make-shape").main()
    assert f"--layers {layers}: the model has 4" in capsys.readouterr().err and not (tmp_path / "shape").exists()


def test_bench_models_prints_its_last_run_and_replaces_model_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands run in another folder than the caller's, so they get absolute paths."""
    script, commands = load_script("bench-models"), list[list[str]]()

    def run(command: list[str], log: Path) -> int:
        commands.append(command)
        with log.open("a") as file:
            file.write("  a line\n")
        return 0

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache/qwen3.5-9b-files").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/qwen3.5-9b-starts.json").write_text('{"rows": []}')
    (tmp_path / "out/qwen3.5-9b-measure.txt").write_text("  an earlier line\n")
    parts = ["--only", "measure", "starts", "--out", "out", "--cache-dir", "cache"]
    monkeypatch.setattr(sys, "argv", ["bench-models", "qwen3.5-9b", *parts])
    monkeypatch.setattr(script, "run", run)
    assert script.main() == 0
    assert "  a line" in (printed := capsys.readouterr().out) and "earlier" not in printed
    assert not (tmp_path / "cache/qwen3.5-9b-files").exists()
    words = [word for command in commands for word in command]
    assert str(tmp_path / "out") in words and not any(word.startswith(("out", "cache/")) for word in words)


def test_flash_attn_kernels_that_are_not_built_are_functions_that_raise(tmp_path: Path) -> None:
    script = load_script("build-flash-attn")
    for direction in ("fwd", "fwd_split", "bwd"):
        for name in ("hdim64_bf16", "hdim64_bf16_causal", "hdim96_bf16_causal", "hdim64_fp16"):
            (tmp_path / f"flash_{direction}_{name}_sm80.cu").touch()
    kernels = script.list_kernels(tmp_path)
    built = script.select_kernels(kernels, [64, 128], ["bfloat16"])
    assert sorted(kernel.source.name for kernel in built) == [
        f"flash_{direction}_hdim64_bf16{causal}_sm80.cu"
        for direction in ("fwd", "fwd_split")
        for causal in ("_causal", "")
    ]
    missing = [kernel for kernel in kernels if kernel not in built]
    text = script.write_missing_kernels(missing, tmp_path / "missing.cpp").read_text()
    assert text.count("TORCH_CHECK(false") == len(missing) == 8
    assert (
        "template <> void run_mha_fwd_splitkv_dispatch<cutlass::bfloat16_t, 96, true>(Flash_fwd_params&, cudaStream_t)"
    ) in text
    assert "template <> void run_mha_bwd_<cutlass::half_t, 64, false>(Flash_bwd_params&, cudaStream_t)" in text
    assert '"flash-attn was built without fwd for bf16 and head_dim 96 (scripts/build-flash-attn)"' in text


def test_a_built_flash_attn_is_found_as_a_package_that_pip_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except `cute`, which would be taken for flash-attn-4."""
    script = load_script("build-flash-attn")
    distribution, target = tmp_path / "flash_attn-2.8.3", tmp_path / "target"
    (distribution / "flash_attn/cute").mkdir(parents=True)
    for name in ("flash_attn/__init__.py", "flash_attn/cute/__init__.py", "LICENSE", "flash_attn_2_cuda.so"):
        (distribution / name).touch()
    (distribution / "PKG-INFO").write_text("Metadata-Version: 2.2\nName: flash_attn\nVersion: 2.8.3\n")
    script.install(distribution / "flash_attn_2_cuda.so", distribution, target)
    assert not (target / "flash_attn/cute").exists() and (target / "flash_attn_2_cuda.so").exists()
    monkeypatch.syspath_prepend(target)
    assert ("flash-attn-2", "2.8.3") in installed_flash_packages()
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]


def test_only_the_known_source_distribution_of_flash_attn_is_built(tmp_path: Path) -> None:
    script = load_script("build-flash-attn")
    (tmp_path / script.SDIST).write_bytes(b"other")
    with pytest.raises(SystemExit, match="is not the source distribution of flash-attn 2.8.3"):
        script.unpack(tmp_path / script.SDIST, tmp_path)


def test_step_batches_are_measured(tmp_path: Path) -> None:
    run_script("bench-step-batch", "--rows", "4", "--out", str(tmp_path))
    results = json.loads((tmp_path / "step-batch.json").read_text())
    sizes = [results[name]["bytes"] for name in ("steady", "half ended", "new, greedy", "new, sampled")]
    assert sizes == sorted(sizes) and all(result["encode us"] > 0 for result in results.values())


def test_the_first_minute_is_measured_beside_a_later_time() -> None:
    load_script("bench-starts")  # finds its modules
    import first_minute

    fake = FakeServer()
    with run_in_thread(fake) as url:
        measured = first_minute.measure(url, first_minute.Periods(minute=0.9, idle=0.0, later=0.3))
    assert {name: (result.requests, result.failed) for name, result in measured.items()} == {
        "minute": (3, 0),
        "later": (1, 0),
    }
    assert all(0 < result.median <= result.p99 for result in measured.values())
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 4, "none is in the prefix cache"
    [settings] = {(len(body["prompt"]), body["max_tokens"], body["temperature"]) for body in fake.bodies}
    assert settings == (512, 16, 1.0)


def test_the_starts_of_two_checkouts_alternate_and_the_first_ones_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = load_script("bench-starts")
    started = []

    @contextlib.contextmanager
    def started_server(command: list[str], *_: object, cwd: Path, **__: object) -> Iterator[str]:
        started.append(cwd.name)
        yield command[command.index("--cache-dir") + 1]

    monkeypatch.setattr(script, "started_server", started_server)
    starts = script.Starts({"base": Path("old"), "head": Path("new")}, "jit", ["model"], tmp_path)
    measured = list(starts.in_turn(2, [3]))
    assert started == ["new", "old", "old", "new", "new", "old"]
    assert measured == [(name, str(tmp_path / f"{name}-jit")) for name in ("base", "head", "head", "base")]


def test_captures_are_profiled_at_the_sizes_of_the_plan_the_largest_first() -> None:
    from tcdeploy.planning.plan import make_plan
    from tests.machines import H100, LLAMA_8B, make_recipe

    script = load_script("profile-capture")
    plan = make_plan(make_recipe(shapes="dynamic", buckets=(512,), batch_sizes=(1, 32)), H100, LLAMA_8B)
    keys = script.keys_to_capture(plan, 0, None)
    sizes = [key.tokens for key in keys]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 512 and sizes[-1] == 1
    assert {key.row_slots for key in keys} == {0}
    chosen = script.keys_to_capture(plan, 32, [1, 64])
    assert [(key.bucket.is_prefill, key.tokens, key.row_slots) for key in chosen] == [(True, 64, 32), (False, 1, 0)]


def run_script(script: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout


def load_script(script: str) -> ModuleType:
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))  # where a script finds local_server.py
    loader = SourceFileLoader(script.replace("-", "_"), str(ROOT / "scripts" / script))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # where dataclasses look up their annotations
    loader.exec_module(module)
    return module
