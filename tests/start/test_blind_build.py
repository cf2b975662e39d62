"""Builds for GPUs that the machine does not have. A CPU build of PyTorch is supplemented by cuda_build.py."""

from __future__ import annotations

import json
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tcdeploy.cache.record.manifest import Manifest, read_manifests
from tcdeploy.errors import IntegrityError, MismatchError
from tcdeploy.kernels.experts.interface import EXPERTS_IMPLEMENTATION, run_experts
from tcdeploy.start.blind import build
from tcdeploy.start.blind.build import copy_winners
from tcdeploy.torch_compat.blind.cubin import architecture
from tests.conftest import TINY, RunCLI
from tests.start.cuda_build import cuda_build

SHAPES = ("--load-format", "dummy", "--buckets", "64", "--batch-sizes", "1,4")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return cuda_build(tmp_path_factory.mktemp("cuda_build"))


def architectures(folder: Path, manifest: Manifest) -> set[int]:
    """Of all cubins of a plan, in packages too."""
    found = set()
    for path in (folder / file.path for file in manifest.files):
        if path.suffix == ".cubin":
            found.add(architecture(path.read_bytes()))
        elif path.suffix == ".pt2":
            with zipfile.ZipFile(path) as package:
                found |= {architecture(package.read(name)) for name in package.namelist() if name.endswith(".cubin")}
    return found


@pytest.mark.parametrize(
    ("target", "programs", "number"),
    [("l4", "jit", 89), ("h200", "auto", 90), pytest.param("b200", "auto", 100, marks=pytest.mark.long)],
)
def test_programs_and_kernels_are_compiled_for_the_target(
    run_cli: RunCLI, environment: dict[str, str], tmp_path: Path, target: str, programs: str, number: int
) -> None:
    folder, bundle = tmp_path / "cache", tmp_path / "plan.tcb"
    flags = (*SHAPES, "--programs", programs, "--cache-dir", str(folder))
    planned = json.loads(run_cli("warm", TINY, *flags, "--dry-run", "--target-gpu", target, "--json").stdout)["plan"]
    done = run_cli("warm", TINY, *flags, "--target-gpu", target, "--json", new=True, **environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [(key, manifest)] = read_manifests(folder).items()
    assert key == report["plan_key"] and (programs != "jit" or key == planned["key"])
    assert [record.bucket for record in manifest.buckets] == ["prefill:64", "decode:1", "decode:4"]
    assert {record.outcome for record in manifest.buckets} == {"blind"} and not manifest.was_warm
    assert architectures(folder, manifest) == {number}
    assert manifest.environment["torch"] == torch.__version__  # in the key: a CUDA build misses plans of a CPU build
    assert manifest.blind is not None and manifest.blind.choices == tuple(report["choices"]) != ()
    folders = {file.path.partition("/")[0] for file in manifest.files}
    assert folders == {"aot", "triton"} if programs == "auto" else {"fxgraph", "aotautograd", "triton"} <= folders
    if programs == "jit":
        num_programs = sum(record.programs for record in manifest.buckets)
        assert len([file for file in manifest.files if file.path.startswith("fxgraph/")]) == num_programs
    packed = run_cli("cache", "pack", str(folder), "-o", str(bundle))
    assert packed.returncode == 0, packed.stderr
    refused = run_cli("warm", TINY, *flags, "--no-compile")
    assert refused.returncode == 3 and "were built for NVIDIA" in refused.stderr


@pytest.mark.long
def test_measured_configurations_of_a_bundle_are_taken(
    run_cli: RunCLI, environment: dict[str, str], tmp_path: Path
) -> None:
    flags = ("warm", TINY, *SHAPES, "--programs", "jit", "--target-gpu", "l4", "--json")
    first = json.loads(run_cli(*flags, "--cache-dir", str(tmp_path / "first"), new=True, **environment).stdout)
    unmeasured = [choice for choice in first["choices"] if choice.startswith("kernel")]
    assert unmeasured
    for path in (tmp_path / "first").rglob("*.best_config"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "time_taken_ms": 1}))
    winners = ("--winners", str(tmp_path / "first"), "--cache-dir", str(tmp_path / "second"))
    second = json.loads(run_cli(*flags, *winners, new=True, **environment).stdout)
    assert [choice for choice in second["choices"] if choice.startswith("kernel")] == []


def test_configurations_that_were_not_measured_are_no_winners(tmp_path: Path) -> None:
    (tmp_path / "source" / "ab").mkdir(parents=True)
    for name, time in (("measured", 3), ("fast", 0), ("first", -1)):
        (tmp_path / "source" / "ab" / f"{name}.best_config").write_text(json.dumps({"time_taken_ms": time}))
    copy_winners(tmp_path / "source", tmp_path / "staging")
    assert sorted(path.name for path in tmp_path.glob("staging/*/*")) == ["fast.best_config", "measured.best_config"]


@pytest.mark.parametrize("times", [(), (-1,)])
def test_winners_without_a_measurement_are_refused(times: tuple[int, ...], tmp_path: Path) -> None:
    for time in times:
        (tmp_path / "x.best_config").write_text(json.dumps({"time_taken_ms": time}))
    with pytest.raises(MismatchError, match="--winners contains no measured kernel configuration") as caught:
        copy_winners(tmp_path, tmp_path / "staging")
    assert "without --target-gpu, or remove --winners" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        '{"XBLOCK": "256 if print() else 1", "found_by_coordesc": true, "time_taken_ms": 1}',  # in a launcher's source
        '{"XBLOCK, print()": 256, "time_taken_ms": 1}',
        '{"configs_hash": "print()", "time_taken_ms": 1}',
        '{"XBLOCK": [256], "time_taken_ms": 1}',
        '{"time_taken_ms": "1"}',
        "[" * 100_000,
        "[]",
        "{",
        "\x80",
    ],
)
def test_a_result_with_text_is_refused_because_inductor_writes_it_into_source_code(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "x.best_config").write_bytes(content.encode("latin-1"))
    with pytest.raises(IntegrityError, match="x.best_config of --winners does not consist of numbers and hashes"):
        copy_winners(tmp_path, tmp_path / "staging")


def test_a_result_of_inductor_is_copied(tmp_path: Path) -> None:
    result = {"XBLOCK": 256, "EVEN": True, "num_warps": 4, "configs_hash": "1b2c", "time_taken_ms": 1}
    (tmp_path / "source").mkdir()
    for triton_hash in ("YCIIG77B", None):
        content = json.dumps({**result, "triton_cache_hash": triton_hash})
        (tmp_path / "source" / "x.best_config").write_text(content)
        copy_winners(tmp_path / "source", tmp_path / "staging")
        assert (tmp_path / "staging" / "x.best_config").read_text() == content


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch is built for CUDA")
def test_pytorch_for_cpus_builds_nothing_for_a_gpu(run_cli: RunCLI, tmp_path: Path) -> None:
    done = run_cli("warm", TINY, *SHAPES, "--target-gpu", "h200", "--cache-dir", str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"error: PyTorch {torch.__version__} is built for CPUs" in done.stderr
    assert not (tmp_path / "cache" / "manifests").exists()


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "max_position_embeddings": 1024, "decoder_sparse_step": 1, "mlp_only_layers": [], "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("quantize", [(), ("--quantize", "fp8")])
def test_the_kernels_of_a_mixture_are_compiled(
    run_cli: RunCLI, environment: dict[str, str], tmp_path: Path, quantize: tuple[str, ...]
) -> None:
    """Also those that end a step, which no package contains: uncompiled experts read how many tokens each has."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MIXTURE))
    flags = (*SHAPES, *quantize, "--target-gpu", "h200", "--cache-dir", str(tmp_path / "cache"), "--json")
    done = run_cli("warm", str(tmp_path / "model"), *flags, new=True, **environment)
    assert done.returncode == 0, done.stderr
    assert not [choice for choice in json.loads(done.stdout)["choices"] if "uncompiled steps" in choice]
    [manifest] = read_manifests(tmp_path / "cache").values()
    kernels = {Path(file.path).name for file in manifest.files if file.path.endswith(".cubin")}
    assert {"_argmax_kernel.cubin", "_advance_kernel.cubin"} <= kernels


def test_kernels_that_cannot_be_compiled_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("data-dependent\ndetails")

    monkeypatch.setattr(build, "launch_kernels", fail)
    monkeypatch.setattr(build, "CheckPrompts", lambda *_: None)
    monkeypatch.setattr(build, "choices", {})
    cleared: list[None] = []
    builder: Any = SimpleNamespace(
        plan=SimpleNamespace(buckets=()), planned=SimpleNamespace(architecture=None, config=None),
        _fake_cuda=SimpleNamespace(tensors=lambda runs_ops: nullcontext()),
        _tracker=SimpleNamespace(track=nullcontext),
        _runner=SimpleNamespace(row_assignment=SimpleNamespace(clear=lambda: cleared.append(None))),
    )  # fmt: skip
    build._Builder._compile_kernels_of_checks(builder)
    [choice] = build.choices
    assert choice == "kernels of uncompiled steps: the first start on the GPU compiles them (data-dependent)"
    assert cleared == [None]


def test_experts_are_restored_after_the_kernels_of_the_checks_are_compiled() -> None:
    hidden = torch.ones(3, 4)
    with build._experts_without_values():
        out = ALL_EXPERTS_FUNCTIONS[EXPERTS_IMPLEMENTATION](None, hidden, None, None)
    assert out.shape == hidden.shape and out.dtype == hidden.dtype
    assert ALL_EXPERTS_FUNCTIONS[EXPERTS_IMPLEMENTATION] is run_experts
