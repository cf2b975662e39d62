"""Models in quantised formats give the tokens of transformers with dequantised weights, in several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.prepare import prepare
from tests.engine_loop import generate_tokens
from tests.exported_programs import exported_programs
from tests.formats import bitsandbytes, compressed, experts, fp8, int_packed, modelopt
from tests.formats.checkpoint import Format, save_source, write_checkpoint, write_dense

PROMPTS = [list(range(40, 60)), [5, 6, 7]]
NEW_TOKENS = 24
CASES: dict[str, tuple[str, Format]] = {
    "llama, GPTQ": ("llama", int_packed.FORMATS["gptq act order"]),
    "qwen3, FP8": ("qwen3", fp8.FORMATS["qwen3"]),
    "mistral, compressed-tensors": ("mistral", compressed.FORMATS["int4 asymmetric"]),
    "gemma3_text, AWQ": ("gemma3_text", int_packed.FORMATS["awq"]),
    "qwen2, Model Optimizer": ("qwen2", modelopt.FORMATS["nvfp4"]),
    "olmo2, int8": ("olmo2", compressed.FORMATS["int8"]),
    "llama, bitsandbytes": ("llama", bitsandbytes.FORMATS["nf4 nested"]),
    "gpt_oss": experts.CASES["gpt-oss"],
    "qwen3_moe": experts.CASES["int4"],
}


def tokens_of(folder: Path, cache: Path) -> tuple[list[list[int]], Any]:
    flags = {"model": str(folder), "cache_dir": str(cache), "dtype": "float32", "programs": "aot"}
    deployment = prepare(build_recipe({**flags, "buckets": (32,), "batch_sizes": (4,), "context": 128}, environ={}))
    return generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=NEW_TOKENS)), deployment


def tokens_of_transformers(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]


QUICK = ("llama, GPTQ", "qwen3, FP8", "gpt_oss", "qwen3_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]
)
def test_tokens_are_those_of_dequantised_weights_also_from_packages(name: str, tmp_path: Path) -> None:
    family, form = CASES[name]
    source = save_source(tmp_path / "source", family, tie_word_embeddings=False)
    dense = write_checkpoint(form, source, tmp_path / "quantised")
    write_dense(source, dense, tmp_path / "dense")
    with exported_programs():
        tokens, first = tokens_of(tmp_path / "quantised", tmp_path / "cache")
        again, second = tokens_of(tmp_path / "quantised", tmp_path / "cache")
    assert tokens == again == tokens_of_transformers(tmp_path / "dense") and len(set(tokens[0])) > 3
    assert first.engine.runner.has_model and not second.engine.runner.has_model
    assert [record.outcome for record in second.records] == ["hit"] * 2
    assert second.weights_read.num_bytes == first.weights_read.num_bytes
