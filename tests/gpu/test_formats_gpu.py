"""Quantised checkpoints on a GPU: the weights that a CPU reads or writes, and kernels that agree with the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tcdeploy.start.quantize import save_quantised
from tests.conftest import TINY
from tests.engine_loop import generate_tokens
from tests.formats import bitsandbytes, compressed, experts, fp8, int_packed, modelopt, torchao
from tests.formats.checkpoint import WEIGHTS, Format, save_source, write_checkpoint
from tests.formats.gguf import FILE, write_gguf
from tests.formats.test_readers import FORMATS, dense_weights, plan
from tests.gpu.test_gpu import deploy

pytestmark = pytest.mark.gpu
DEEPSEEK_SIZES = {"qk_rope_head_dim": 32, "num_key_value_heads": 8}  # its head_dim, and as many as query heads
REPEATING = "gemma3_text"  # with these random weights, its answers repeat one token
PROMPT, SHORT_PROMPT = list(range(40, 60)), [5, 6, 7]
OTHER_PROMPTS = {"deepseek_v3": list(range(100, 130))}  # its answers to PROMPT have three different tokens
STARTED: dict[str, tuple[str, Format | str]] = {  # a family per format; a str is a type of GGUF
    "FP8 blocks": ("qwen3", fp8.FORMATS["qwen3"]),
    "FP8 static": ("mistral", fp8.FORMATS["autofp8 static"]),
    "FP8 rows, compressed-tensors": ("llama", compressed.FORMATS["float channel"]),
    "int8, compressed-tensors": ("olmo2", compressed.FORMATS["int8"]),
    "int4, compressed-tensors": ("qwen2", compressed.FORMATS["int4 asymmetric"]),
    "MXFP4, compressed-tensors": ("llama", compressed.FORMATS["mxfp4"]),
    "GPTQ, act order": ("llama", int_packed.FORMATS["gptq act order"]),
    "AWQ": ("gemma3_text", int_packed.FORMATS["awq"]),
    "AutoRound": ("mistral", int_packed.FORMATS["auto-round"]),
    "NVFP4, Model Optimizer": ("qwen2", modelopt.FORMATS["nvfp4"]),
    "torchao": ("llama", torchao.FORMATS["int8"]),
    "bitsandbytes": ("llama", bitsandbytes.FORMATS["nf4 nested"]),
    "GGUF Q4_K_M": ("qwen3", "Q4_K_M"),
    "GGUF Q8_0": ("llama", "Q8_0"),
    **{f"experts, {name}": tuple(case)[:2] for name, case in experts.CASES.items()},
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_reads_the_weights_that_a_cpu_does(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(FORMATS[name], save_source(tmp_path / "source"), folder)
    expected = dense_weights(plan(folder, device="cpu"))
    weights = dense_weights(plan(folder, device="cuda"))
    assert weights.keys() == expected.keys()
    assert [key for key, value in weights.items() if not torch.equal(value.cpu(), expected[key])] == []


@pytest.mark.parametrize("to", ["fp8", "int8", "int4:64"])
def test_a_gpu_quantises_as_a_cpu_does(to: str, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        save_quantised(Recipe(model=TINY, quantize=to, device=device), tmp_path / device, NullProgress())
    expected, tensors = (load_file(tmp_path / device / WEIGHTS) for device in ("cpu", "cuda"))
    assert tensors.keys() == expected.keys()
    assert [key for key, tensor in tensors.items() if not torch.equal(tensor.float(), expected[key].float())] == []


@pytest.mark.parametrize("name", STARTED)
def test_kernels_agree_with_dequantised_weights(name: str, tmp_path: Path) -> None:
    """In bfloat16, in captured steps of one, four and up to 128 rows."""
    family, form = STARTED[name]
    sizes = DEEPSEEK_SIZES if family == "deepseek_v3" else {}
    source, folder = save_source(tmp_path / "source", family, **sizes), tmp_path / "model"
    if isinstance(form, str):
        write_gguf(source, folder, form)
        folder /= FILE
    else:
        write_checkpoint(form, source, folder)
    deployment = deploy(str(folder), str(tmp_path / "cache"), buckets=(128,), context=256)
    assert all(record.captured and record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        prompts = [OTHER_PROMPTS.get(family, PROMPT), SHORT_PROMPT]
        answers = generate_tokens(deployment.engine, prompts, SamplingParams(max_tokens=24))
    assert serving.counts.compiles == 0
    assert len(set(answers[0])) > 3 or family == REPEATING
