"""Runs the parity check with and without planted faults: over small models of many families, or large shapes on a GPU.

scripts/planted-faults is the command line. `run_case` is also what the tests use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tcdeploy.engine.check.parity_check import FAILED
from tcdeploy.errors import CompileError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.deployment import release_memory
from tcdeploy.start.prepare import prepare
from tests.model_families import save_config
from tests.parity.planted_faults import FAULTS, NotApplicable, planted

RECENT_OBJECTS = 1  # for gc.collect: skips the oldest generation, which would take 1 s in a long test run
SMALL = {"buckets": (32, 128), "batch_sizes": (1, 8)}
LARGE = {"buckets": (512, 2048), "batch_sizes": (1, 32), "context": 8192, "mode": "auto", "tune_seconds": 0.0,
         "memory_fraction": 0.95}  # fmt: skip
# Large shapes, and a fault for each.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("wrong attention scale", {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    }),
    "qwen2.5-14b": ("bias dropped", {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
    }),
    "qwen3-32b": ("residual dropped in one layer", {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    }),
    "phi-4": ("layer skipped", {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352, "rope_theta": 250000.0,
        "max_position_embeddings": 16384, "pad_token_id": 0,
    }),
    "gemma-2-9b": ("missing attention softcap", {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    }),
    "qwen3-30b-a3b": ("experts swapped", {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    }),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A result: "passed", "caught" (the parity check failed), or "not applicable"."""

    model: str
    dtype: str
    fault: str  # "" if none was planted
    outcome: str
    message: str  # of the failed check
    records: tuple[dict[str, Any], ...]  # of the buckets of a check that passed
    stage_seconds: dict[str, float]
    seconds: float


def run_case(
    model: str,
    folder: str,
    dtype: str,
    fault: str,
    compiles: bool,
    flags: dict[str, Any],
    first_reference: list[Any] | None = None,
) -> Case:
    """Start the model in `folder` with a fault planted ("" for none). `compiles`: False runs the buckets uncompiled.

    `first_reference` is that of `planted`. `flags` name the cache folder. Cases that compile in one process share it:
    torch keeps the path of its headers.
    """
    torch.compiler.reset()
    gc.collect(RECENT_OBJECTS)
    start = time.perf_counter()
    outcome, message, records, stage_seconds = "passed", "", (), {}
    mode = contextlib.nullcontext() if compiles else torch.compiler.set_stance("force_eager")
    with planted(FAULTS[fault] if fault else None, first_reference), mode:
        recipe = {"model": folder, "load_format": "dummy", "dtype": dtype, **flags}
        try:
            deployment = prepare(build_recipe(recipe, environ={}))
        except NotApplicable as reason:
            outcome, message = "not applicable", str(reason)
        except CompileError as error:
            if FAILED not in error.message:
                raise
            outcome, message = "caught", error.message
        else:
            records = tuple(dataclasses.asdict(record) for record in deployment.records)
            stage_seconds = deployment.stage_seconds
            del deployment
    return Case(model, dtype, fault, outcome, message, records, stage_seconds, time.perf_counter() - start)


def run_family(family: str, dtype: str, faults: list[str], compiles: bool) -> list[Case]:
    """Small random model of a family: once without a fault, and once with each of `faults`."""
    with tempfile.TemporaryDirectory() as folder:
        save_config(family, Path(folder))
        flags = {**SMALL, "cache_dir": f"{folder}/cache"}
        reference: list[Any] = []  # that of the first attempt is the same in all cases
        return [run_case(family, folder, dtype, fault, compiles, flags, reference) for fault in ["", *faults]]


def run_shape(shape: str) -> list[Case]:
    """A large shape in bfloat16, with `--mode auto`: without a fault, and with the one of SHAPES."""
    fault, values = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(**values)
        Path(folder, "config.json").write_text(json.dumps({**config.to_dict(), "torch_dtype": "bfloat16"}))
        flags = {**LARGE, "cache_dir": f"{folder}/cache"}
        cases = []
        for name in ("", fault):
            release_memory()
            cases.append(run_case(shape, folder, "bfloat16", name, True, flags))
        return cases


def matrix(cases: list[Case]) -> str:
    """A Markdown table: faults down, models across; bfloat16 and float32 in one cell."""
    models = list(dict.fromkeys(case.model for case in cases))
    outcomes: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        outcomes.setdefault((case.fault, case.model), []).append(case.outcome)
    lines = [f"| fault | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    for fault in dict.fromkeys(case.fault for case in cases):
        cells = [_cell(outcomes.get((fault, model), [])) for model in models]
        lines.append(f"| {fault or 'none'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcomes: list[str]) -> str:
    return "-" if set(outcomes) <= {"not applicable"} else ", ".join(outcomes)
