"""Small models of many families have exactly one program per bucket and kind of layer, and correct outputs.

Inductor compiles those of two families. The others are traced by Dynamo, which decides what is counted here, and their
graphs run without a compiler; scripts/test --long compiles them too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy.cli.display import show_warm_report
from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import prompt_batch
from tcdeploy.engine.step.batch import GraphKey
from tcdeploy.errors import RecompileError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE, Variant
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.prepare import prepare
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tests.conftest import TINY, prepare_tiny, reset_programs
from tests.coverage.campaign import traced_only
from tests.engine_loop import generate_tokens
from tests.model_families import LAYER_KINDS, SUPPORTED, WINDOW, save_config

BUCKET, BATCH = 48, 3


def deploy(folder: str, cache_dir: str, **flags: Any) -> Deployment:
    """A dummy deployment, after resetting torch's compiled programs so that all counts start at zero."""
    reset_programs()
    base_flags = {"model": folder, "load_format": "dummy", "buckets": (BUCKET,), "batch_sizes": (BATCH,), **flags}
    return prepare(build_recipe({**base_flags, "cache_dir": cache_dir}, environ={}))


COMPILED = ("llama",)
TRACED = ("gemma3_text", "gpt_oss")  # two kinds of layers; sinks and experts


def families() -> Iterator[Any]:
    """(family, whether Inductor compiles its programs)"""
    for name in SUPPORTED:
        if name not in COMPILED:
            yield pytest.param((name, False), id=name, marks=() if name in TRACED else pytest.mark.long)
        marks = () if name in COMPILED else pytest.mark.long
        yield pytest.param((name, True), id=f"{name}-compiled", marks=marks)


@pytest.fixture(scope="module", params=families())
def family(request: pytest.FixtureRequest, cache_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name, compiles = request.param
    folder = save_config(name, tmp_path_factory.mktemp(name))
    with contextlib.nullcontext() if compiles else traced_only():
        return name, deploy(folder, cache_dir)


def test_each_bucket_has_one_program_per_kind_of_layer(family: Any) -> None:
    name, deployment = family
    kinds = LAYER_KINDS.get(name, 1)
    num_layers = len(deployment.planned.architecture.attention_layers)
    assert num_layers > kinds, "fewer kinds than layers, or the count proves nothing"
    assert [record.programs for record in deployment.records] == [kinds, kinds]
    assert [record.graph_breaks for record in deployment.records] == [0, 0]


def test_compiled_logits_are_those_of_eager_transformers(family: Any) -> None:
    """Prefill packs a prompt longer than the window; the difference is rounding in float32."""
    _, deployment = family
    for record in deployment.records:
        assert record.parity.relative_difference < 1e-5, record
        assert record.parity.kl < 1e-5, record


def test_generating_past_the_window_equals_transformers_generate(family: Any) -> None:
    """Covers chunks, the paged prefix, window, soft-capping and sinks, with 130 prompt tokens and 40 new ones."""
    name, deployment = family
    prompts = [
        [(7 * position + row) % 250 + 3 for position in range(length)] for row, length in enumerate((130, 5, 47))
    ]
    assert max(map(len, prompts)) > WINDOW + BUCKET
    with measure_compiles() as serving, fail_on_recompile():
        ours = generate_tokens(deployment.engine, prompts, SamplingParams(max_tokens=40))
    assert serving.counts.compiles == 0
    model = deployment.engine.runner.model
    model.set_attn_implementation("eager")
    try:
        with torch.compiler.set_stance("force_eager"):
            for prompt, answer in zip(prompts, ours, strict=True):
                assert answer == greedy(model, prompt, 40), name
    finally:
        model.set_attn_implementation("tcdeploy")


def greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy decoding with a full, uncompiled forward pass per token and without a KV cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_attention_and_mlp_can_be_programs_of_their_own(cache_dir: str, tmp_path: Path) -> None:
    deployment = deploy(save_config("llama", tmp_path, num_hidden_layers=2), cache_dir, region="blocks")
    assert [record.programs for record in deployment.records] == [2, 2]
    assert all(record.parity.relative_difference < 1e-5 for record in deployment.records)


@pytest.mark.long  # a number that depends on the layer is exported in test_export.py
def test_a_number_that_differs_between_layers_costs_a_program_per_layer(
    cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention scales of 20 layers. torch's own limit is 8 programs. Dynamo makes them here, and Inductor none."""
    sizes = {"n_layer": 20, "n_embd": 16, "n_head": 2, "n_positions": 64}
    folder = save_config("gpt2", tmp_path, scale_attn_by_inverse_layer_idx=True, **sizes)
    with torch.compiler.set_stance("default", force_backend="eager"):
        deployment = deploy(folder, cache_dir, buckets=(16,), batch_sizes=(1,))
    assert [record.programs for record in deployment.records] == [20, 20]
    show_warm_report(deployment, None, as_json=False)
    assert "each layer has its own program" in capsys.readouterr().out


PROMPTS_OF_THE_RANGE = [[3 + position % 200 for position in range(length)] for length in (1, 2, 3, 17, 47, 48, 49, 101)]


@pytest.fixture(scope="module")
def answers_of_a_static_bucket(cache_dir: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    deployment = deploy(save_config("llama", tmp_path_factory.mktemp("static"), num_hidden_layers=2), cache_dir)
    return generate_tokens(deployment.engine, PROMPTS_OF_THE_RANGE, SamplingParams(max_tokens=4))


@pytest.mark.parametrize(("region", "programs"), [("layer", 1), ("blocks", 2)])
def test_a_dynamic_range_is_one_program(
    region: str, programs: int, cache_dir: str, tmp_path: Path, answers_of_a_static_bucket: list[list[int]]
) -> None:
    """Every length of the range, and chunks of longer prompts, run the one program that warm-up made."""
    folder = save_config("llama", tmp_path, num_hidden_layers=2)
    deployment = deploy(folder, cache_dir, shapes="dynamic", region=region)
    record = deployment.records[0]
    assert (record.bucket, record.programs, record.graph_breaks) == (f"prefill:2-{BUCKET}", programs, 0)
    with measure_compiles() as serving, fail_on_recompile():
        ours = generate_tokens(deployment.engine, PROMPTS_OF_THE_RANGE, SamplingParams(max_tokens=4))
    assert serving.counts.compiles == 0
    assert ours == answers_of_a_static_bucket


# The embedded model is a Qwen3 too.
@pytest.mark.parametrize("model", [TINY, *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3", "gemma2"))])
def test_a_dynamic_range_has_one_program_that_selects_rows(model: str, cache_dir: str, tmp_path: Path) -> None:
    """One program of the last layer selects 2 to 8 rows of 2 to 48 tokens, with the logits of selecting them later."""
    flags = {"model": TINY} if model == TINY else {"model": save_config(model, tmp_path), "load_format": "dummy"}
    reset_programs()
    flags |= {"buckets": (BUCKET,), "batch_sizes": (BATCH,), "shapes": "dynamic", "cache_dir": cache_dir}
    deployment = prepare(build_recipe(flags, environ={}))
    kinds, runner, [bucket] = LAYER_KINDS.get(model, 1), deployment.engine.runner, deployment.plan.prefill_buckets
    assert deployment.records[0].programs == kinds
    for variant, programs in ((LAST_TOKEN_ROWS, 1), (LAST_TOKEN_ROWS_INPLACE, kinds + 1)):
        runner.set_variant(bucket, variant)
        with measure_compiles() as compiles:
            make_timing_batch(runner, bucket).run()
        assert (compiles.counts.programs, compiles.counts.graph_breaks) == (programs, 0)
        with measure_compiles() as serving, fail_on_recompile(), torch.no_grad():
            for tokens, num_rows in itertools.product((2, 3, 17, 31, 47, BUCKET), (2, 3, 5, 8)):
                assert_same_logits(deployment, variant, tokens, num_rows)
        assert serving.counts.compiles == 0


def assert_same_logits(deployment: Deployment, variant: Variant, tokens: int, num_rows: int) -> None:
    """The logits of one prompt, with the rows selected in the last layer and before the head."""
    runner, [bucket] = deployment.engine.runner, deployment.plan.prefill_buckets
    sequence = Sequence(0, [3 + 5 * position % 200 for position in range(tokens)], tokens, SamplingParams())
    sequence.blocks = [1, 2, 3]
    prefill = runner._prefill_for(bucket, tokens, runner.plan.step_sizes(bucket))
    prefill.fill(prompt_batch([Chunk(sequence, 0, tokens)]))
    buffers = prefill.buffers()
    assert buffers.logits_indices is not None
    rows = buffers.logits_indices[:num_rows].copy_(torch.arange(num_rows) * 7 % tokens)
    mark_dynamic(rows, 0)  # as PrefillBuffers does for its own view
    runner.set_variant(bucket, DEFAULT)
    expected = runner._logits(buffers, rows, in_last_layer=False)
    runner.set_variant(bucket, variant)
    selected_early = runner._logits(buffers, rows, in_last_layer=True)
    assert selected_early.shape == expected.shape == (num_rows, runner.vocab_size)
    assert (selected_early - expected).norm() < 1e-5 * expected.norm()


def test_the_mlp_of_every_family_is_found(family: Any) -> None:
    from tcdeploy.programs.regions import find_layers

    name, deployment = family
    layers = find_layers(deployment.engine.runner.model, deployment.planned.architecture)
    assert len({id(layer.module) for layer in layers}) == len(deployment.planned.architecture.attention_layers), name
    for layer in layers:
        inside = {id(parameter) for module in (*layer.attention, *layer.mlp) for parameter in module.parameters()}
        left = [
            path
            for path, parameter in layer.module.named_parameters()
            if id(parameter) not in inside and parameter.ndim > 1
        ]
        assert len(layer.mlp) == 1 and not left, f"{name}: {left} belong to no block"


def test_a_shape_outside_the_buckets_is_an_error_after_warm_up(cache_dir: str) -> None:
    """`fail_on_recompile` refuses a call of the model with a shape that no bucket has."""
    reset_programs()  # a program that another test compiled for a dynamic range would serve the shape
    deployment = prepare_tiny(cache_dir)
    runner = deployment.engine.runner
    [bucket, *_] = deployment.plan.prefill_buckets
    runner.step_holder.step = runner._make_step(runner._buffers_of(GraphKey(bucket, bucket.size, 0)), None)
    with pytest.raises(RecompileError, match="after warm-up"), fail_on_recompile(), torch.no_grad():
        runner.model(input_ids=torch.zeros(1, 7, dtype=torch.long), position_ids=torch.arange(7)[None], use_cache=False)
    runner.step_holder.step = None


def test_max_autotune_gives_correct_logits(cache_dir: str, tmp_path: Path) -> None:
    deployment = deploy(save_config("llama", tmp_path, num_hidden_layers=2), cache_dir, mode="max-autotune")
    assert all(record.parity.relative_difference < 1e-5 for record in deployment.records)
