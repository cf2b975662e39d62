"""What only a GPU can show: whole-step graphs, Triton and FlashAttention inside real programs, and no compile after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.compiler.programs import fail_on_recompile
from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.pipeline import Deployment, prepare
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import (
    COORDINATE_DESCENT_PDL_COMBO,
    DEFAULT,
    LAST_TOKEN_ROWS,
    LAST_TOKEN_ROWS_INPLACE,
    MAX_AUTOTUNE_PDL,
    PDL_COMBO,
    SKINNY_PDL_COMBO,
    SKINNY_PDL_COMBO_FUSED,
    attention_variant,
)
from tests.conftest import reset_programs
from tests.engine.constraints import SumConstraint
from tests.model_families import LAYER_KINDS, SUPPORTED, save_config

pytestmark = pytest.mark.gpu
PROMPTS = [
    [3 + (5 * position + row) % 240 for position in range(length)] for row, length in enumerate((1, 47, 130, 300))
]


def deploy(model: str, cache_dir: str, **flags: Any) -> Deployment:
    """With few blocks, so that several of these tests may run at once on one GPU (`pytest -n 4`)."""
    reset_programs()
    asked = {
        "model": model,
        "buckets": (32, 128),
        "batch_sizes": (1, 4),
        "context": 512,
        "kv_blocks": 256,
        "cache_dir": cache_dir,
        **flags,
    }
    return prepare(build_recipe(asked, environ={}))


@pytest.mark.parametrize("graphs", ["step", "none"])
def test_float32_tokens_on_the_gpu_equal_transformers_generate(
    cache_dir: str, reference_tiny: Any, graphs: str
) -> None:
    """The same arithmetic as on the CPU: Triton prefill and decode, replayed from graphs."""
    deployment = deploy("builtin:tiny", cache_dir, dtype="float32", graphs=graphs)
    assert [record.captured for record in deployment.records] == [graphs == "step"] * 4
    with measure_compiles() as serving, fail_on_recompile():
        ours = deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    assert serving.counts.compiles == 0
    for prompt, answer in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        out = reference_tiny.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
        assert answer == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("graphs", ["step", "none"])
def test_a_constrained_answer_is_the_most_likely_that_obeys_beside_free_ones(
    cache_dir: str, reference_tiny: Any, graphs: str
) -> None:
    """Its mask hangs on the token of the step before, which is read while the graph of the next one runs."""
    engine, length = deploy("builtin:tiny", cache_dir, dtype="float32", graphs=graphs).engine, 24
    free = engine.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    chain, found = SumConstraint(length, 2000), {}
    with measure_compiles() as serving, fail_on_recompile():
        for prompt in PROMPTS:
            for params in (SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, constraint=chain)):
                found[engine.submit(prompt, params)] = []
        while engine.has_work:
            for token in engine.step():
                found[token.request_id].append(token.token_id)
    assert serving.counts.compiles == 0
    answers = list(found.values())
    assert answers[::2] == free
    for prompt, answer in zip(PROMPTS, answers[1::2], strict=True):
        tokens: list[int] = []
        for _ in range(length):
            with torch.no_grad():
                scores = reference_tiny(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            allowed = torch.tensor([chain.allows(tokens, token_id) for token_id in range(len(scores))])
            tokens.append(int(scores.where(allowed, -torch.inf).argmax()))
        assert answer == tokens


def sequences_for(deployment: Deployment, count: int) -> list[Sequence]:
    """Of unequal lengths, with blocks of their own; what their keys are is whatever the cache holds."""
    allocator = BlockAllocator(deployment.plan.kv_blocks, deployment.plan.block_size)
    made = [Sequence(row, [7] * (20 + row), 20 + row, SamplingParams()) for row in range(count)]
    for sequence in made:
        sequence.blocks = allocator.allocate(3)
    return made


def test_a_replayed_graph_gives_what_the_programs_give_and_moves_the_rows_on(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir)
    runner = deployment.engine.runner
    for bucket in deployment.plan.decode_buckets:
        sequences = sequences_for(deployment, bucket.size)
        found = []
        for run in (runner.rerun, runner.rerun_uncaptured):
            runner.row_assignment.assign_prefilled(sequences)
            output = run(bucket)
            found.append((output.logits.clone(), output.tokens.clone()))
            wanted = [len(sequence.token_ids) + 1 for sequence in sequences]
            assert runner.state.seq_lens[: bucket.size].tolist() == wanted
            assert torch.equal(runner.state.token_ids[: bucket.size], output.tokens)
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    for bucket in deployment.plan.prefill_buckets:
        chunks = [Chunk(sequences[0], 0, 20), Chunk(sequences[1], 5, 11)]
        recorded = runner.prefill(chunks, bucket=bucket).logits[:2].clone()
        assert torch.equal(recorded, runner.rerun_uncaptured(bucket).logits[:2])


def test_tokens_on_the_gpu_survive_pre_emption_prefix_reuse_and_neighbours(cache_dir: str) -> None:
    """float32, where all buckets round alike enough for greedy tokens to be equal."""
    params = SamplingParams(max_new_tokens=40)
    plain = deploy("builtin:tiny", cache_dir, dtype="float32").engine
    alone = [plain.generate([prompt], params)[0] for prompt in PROMPTS]
    assert plain.generate(PROMPTS + PROMPTS[::-1], params) == alone + alone[::-1]
    assert plain.allocator.free == plain.allocator.capacity
    scarce = deploy("builtin:tiny", cache_dir, dtype="float32", context=400, kv_blocks=36).engine
    assert scarce.generate(PROMPTS, params) == alone
    assert scarce.scheduler.preemptions > 0
    seeded = SamplingParams(max_new_tokens=40, temperature=0.9, top_k=50, top_p=0.95, seed=5)
    drawn = [scarce.generate([prompt], seeded)[0] for prompt in PROMPTS]
    assert scarce.generate(PROMPTS, seeded) == drawn
    scarce.allocator.assert_consistent()


def test_every_candidate_gives_the_same_logits_within_rounding(cache_dir: str, tmp_path: Path) -> None:
    """Large enough that products are streamed: 1,024 columns and more."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = save_config("llama", tmp_path, head_dim=128, **sizes)
    deployment = deploy(folder, cache_dir, load_format="dummy", dtype="bfloat16")
    runner = deployment.engine.runner
    for bucket in deployment.plan.decode_buckets:
        sequences = sequences_for(deployment, bucket.size)
        logits = {}
        for variant in (
            DEFAULT, PDL_COMBO, SKINNY_PDL_COMBO, SKINNY_PDL_COMBO_FUSED, COORDINATE_DESCENT_PDL_COMBO,
            MAX_AUTOTUNE_PDL,
        ):  # fmt: skip
            runner.set_variant(bucket, variant)
            for _ in range(3):
                runner.row_assignment.assign_prefilled(sequences)
                logits[variant.name] = runner.rerun(bucket).logits.float().clone()
            runner.capture(bucket)
            runner.row_assignment.assign_prefilled(sequences)
            torch.testing.assert_close(runner.rerun(bucket).logits.float(), logits[variant.name])
        for name, found in logits.items():
            difference = (found - logits["default"]).norm() / logits["default"].norm()
            assert difference < 0.02, name


def test_a_prefill_bucket_may_attend_by_another_backend_and_choose_rows_early(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, dtype="bfloat16")
    runner, bucket = deployment.engine.runner, deployment.plan.prefill_buckets[-1]
    chunks = [Chunk(sequence, 0, len(sequence.token_ids)) for sequence in sequences_for(deployment, 3)]
    logits = {}
    for variant in (DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE, attention_variant("torch-flash")):
        runner.set_variant(bucket, variant)
        for _ in range(2):
            logits[variant.name] = runner.prefill(chunks, bucket=bucket).logits[:3].float().clone()
        if deployment.plan.uses_cuda_graph(bucket, variant):
            runner.capture(bucket)
            torch.testing.assert_close(runner.prefill(chunks, bucket=bucket).logits[:3].float(), logits[variant.name])
    for name, found in logits.items():
        assert (found - logits["default"]).norm() / logits["default"].norm() < 0.02, name


@pytest.mark.parametrize("family", list(SUPPORTED))
def test_every_family_is_right_in_bfloat16(family: str, cache_dir: str, tmp_path: Path) -> None:
    deployment = deploy(save_config(family, tmp_path), cache_dir, load_format="dummy")
    kinds = LAYER_KINDS.get(family, 1)
    assert [record.programs for record in deployment.records] == [kinds] * 4
    assert all(record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize(("region", "graphs"), [("blocks", "region"), ("layer", "region"), ("blocks", "step")])
def test_per_region_graphs_are_right_too(region: str, graphs: str, cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, region=region, graphs=graphs)
    assert all(record.parity.passed for record in deployment.records)
    params = SamplingParams(max_new_tokens=8)
    ours = deployment.engine.generate(PROMPTS[:2], params)
    assert ours == deploy("builtin:tiny", cache_dir).engine.generate(PROMPTS[:2], params)


def test_a_dynamic_range_serves_every_length(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, shapes="dynamic")
    assert deployment.records[0].programs == 1
    with measure_compiles() as serving, fail_on_recompile():
        deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=3))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize("backend", ["torch-flash", "flash-attn-2", "flash-attn-3", "flash-attn-4"])
def test_each_flash_attention_that_is_installed_serves_a_whole_model(
    backend: str, cache_dir: str, tmp_path: Path
) -> None:
    """Prompts of one token, of several chunks, and of a chunk with one token left."""
    from tcdeploy.planning.environment import installed_flash_packages

    if backend != "torch-flash" and backend not in dict(installed_flash_packages()):
        pytest.skip(f"{backend} is not installed")
    folder = save_config("llama", tmp_path, hidden_size=256, head_dim=64)
    deployment = deploy(folder, cache_dir, load_format="dummy", attention=backend)
    assert all(record.parity.passed for record in deployment.records)
    deployment.engine.generate([*PROMPTS, [5] * 129], SamplingParams(max_new_tokens=4))


def test_a_warm_start_keeps_the_kernels_that_were_tuned(run_cli: Any, tmp_path: Path) -> None:
    """Each start in a process of its own, the last where the folder has moved and nothing may be written at its old
    place. max-autotune descends by coordinates as well, over some hundred variants.
    """
    folder = save_config("llama", tmp_path, hidden_size=1024, intermediate_size=2048)
    flags = ("--load-format", "dummy", "--mode", "max-autotune", "--buckets", "32", "--batch-sizes", "1")
    flags += ("--context", "512", "--kv-blocks", "256")
    here, there, timed = tmp_path / "here", tmp_path / "there", []
    for outcome, assign_prefilled in (("miss", here), ("hit", here), ("hit", there)):
        if assign_prefilled == there:
            here.rename(there)
        result = run_cli("warm", folder, *flags, "--cache-dir", str(assign_prefilled), "--json")
        records = json.loads(result.stdout)["buckets"]
        made = [(record["outcome"], record["kernels_timed"], record["kernels_compiled"]) for record in records]
        assert [record["outcome"] for record in records] == [outcome] * 2, made
        timed.append(sum(record["kernels_timed"] for record in records))
    assert timed[0] > 100 and timed[1:] == [0, 0], timed
    assert not here.exists()


def test_a_folder_that_was_moved_is_still_full(run_cli: Any, tmp_path: Path) -> None:
    """Triton's kernels too, ours among them, which Inductor's own hits say nothing of; and every binary is named."""
    folder = save_config("llama", tmp_path, hidden_size=1024, intermediate_size=2048)
    flags = (
        "--load-format",
        "dummy",
        "--buckets",
        "32",
        "--batch-sizes",
        "1",
        "--context",
        "512",
        "--kv-blocks",
        "256",
    )
    cold = json.loads(run_cli("warm", folder, *flags, "--cache-dir", str(tmp_path / "here"), "--json").stdout)
    assert sum(record["kernels_compiled"] for record in cold["buckets"]) > 4
    first = run_cli("warm", folder, *flags, "--cache-dir", str(tmp_path / "here"), "--json", "--require-hit")
    assert first.returncode == 0, first.stderr
    moved = (tmp_path / "here").rename(tmp_path / "there")
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in moved.glob("triton/*/*")}
    warm = run_cli("warm", folder, *flags, "--cache-dir", str(moved), "--json", "--require-hit")
    assert warm.returncode == 0, warm.stderr
    assert [record["kernels_compiled"] for record in json.loads(warm.stdout)["buckets"]] == [0, 0]
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in moved.glob("triton/*/*")} == before
    (manifest,) = (json.loads(path.read_text()) for path in moved.glob("manifests/*.json"))
    named = {file["path"] for file in manifest["files"]}
    loaded = [*moved.glob("triton/*/*.cubin"), *moved.glob("triton/*/*.so")]
    assert named >= {path.relative_to(moved).as_posix() for path in loaded}


def test_a_model_too_large_for_the_gpu_is_told_before_loading(run_cli: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248}
    folder = save_config("llama", tmp_path, **sizes)
    result = run_cli("warm", folder, "--load-format", "dummy")
    assert result.returncode == 7
    assert "weights leave no memory for KV" in result.stderr
