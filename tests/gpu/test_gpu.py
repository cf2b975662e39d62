"""Tests that need a GPU: whole-step CUDA graphs, Triton and FlashAttention in compiled programs, and no recompiles."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import prefilled_rows, prompt_batch
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.step.step_graphs import capture_graph
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
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tcdeploy.start import model_code
from tcdeploy.start import packages as packaged_start
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.packages import start_from_packages
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.prepare import prepare
from tcdeploy.torch_compat.triton import cache as triton_cache
from tests.block_checks import assert_consistent
from tests.conftest import ROOT, reset_programs
from tests.engine.constraints import SumConstraint
from tests.engine.test_continuous_batching import check_random_traffic
from tests.engine_loop import generate_tokens
from tests.model_families import LAYER_KINDS, SUPPORTED, save_config

pytestmark = pytest.mark.gpu
PROMPTS = [
    [3 + (5 * position + row) % 240 for position in range(length)] for row, length in enumerate((1, 47, 130, 300))
]


def deploy(model: str, cache_dir: str, eager: bool = False, **flags: Any) -> Deployment:
    """Prepare with few KV blocks, so that several tests fit on one GPU (`pytest -n 4`)."""
    reset_programs()
    settings = {
        "model": model,
        "buckets": (32, 128),
        "batch_sizes": (1, 4),
        "context": 512,
        "kv_blocks": 256,
        "cache_dir": cache_dir,
        "programs": "jit",  # other tests leave packages in the folder
        **flags,
    }
    return prepare(build_recipe(settings, environ={}), eager=eager, needs_model=True)


@pytest.mark.parametrize("graphs", ["step", "none"])
def test_float32_tokens_on_the_gpu_equal_transformers_generate(
    cache_dir: str, reference_tiny: Any, graphs: str
) -> None:
    """Triton prefill and decode, replayed from graphs, give the tokens of transformers on a CPU."""
    deployment = deploy("builtin:tiny", cache_dir, dtype="float32", graphs=graphs)
    assert [record.captured for record in deployment.records] == [graphs == "step"] * 4
    with measure_compiles() as serving, fail_on_recompile():
        answers = generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=30))
    assert serving.counts.compiles == 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        out = reference_tiny.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
        assert answer == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("graphs", ["step", "none"])
def test_a_constrained_answer_equals_masked_transformers_beside_unconstrained_ones(
    cache_dir: str, reference_tiny: Any, graphs: str
) -> None:
    """The mask depends on the previous token, which is read while the graph of the next step runs."""
    engine, length = deploy("builtin:tiny", cache_dir, dtype="float32", graphs=graphs).engine, 24
    unconstrained = generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30))
    constraint, answers_by_id = SumConstraint(length, 2000), {}
    with measure_compiles() as serving, fail_on_recompile():
        for prompt in PROMPTS:
            for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, constraint=constraint)):
                answers_by_id[engine.submit(prompt, params)] = []
        while engine.has_work:
            for token in engine.step():
                answers_by_id[token.request_id].append(token.token_id)
    assert serving.counts.compiles == 0
    answers = list(answers_by_id.values())
    assert answers[::2] == unconstrained
    for prompt, answer in zip(PROMPTS, answers[1::2], strict=True):
        tokens: list[int] = []
        for _ in range(length):
            with torch.no_grad():
                scores = reference_tiny(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            allowed = torch.tensor([constraint.allows(tokens, token_id) for token_id in range(len(scores))])
            tokens.append(int(scores.where(allowed, -torch.inf).argmax()))
        assert answer == tokens


def sequences_for(deployment: Deployment, count: int) -> list[Sequence]:
    """Sequences of unequal lengths with separate blocks, whose keys and values are whatever the cache holds."""
    allocator = BlockAllocator(deployment.plan.kv_blocks, deployment.plan.block_size)
    sequences = [Sequence(row, [7] * (20 + row), 20 + row, SamplingParams()) for row in range(count)]
    for sequence in sequences:
        sequence.blocks = allocator.allocate(3)
    return sequences


def test_a_replayed_graph_equals_its_programs_and_advances_the_rows(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir)
    runner = deployment.engine.runner
    for bucket in deployment.plan.decode_buckets:
        sequences = sequences_for(deployment, bucket.size)
        outputs = []
        for run in (runner.rerun, runner.rerun_uncaptured):
            runner.row_assignment.apply(prefilled_rows(sequences))
            output = run(bucket)
            outputs.append((output.logits.clone(), output.tokens.clone()))
            expected = [len(sequence.token_ids) + 1 for sequence in sequences]
            assert runner.decode_rows.seq_lens[: bucket.size].tolist() == expected
            assert torch.equal(runner.decode_rows.token_ids[: bucket.size], output.tokens)
        assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    for bucket in deployment.plan.prefill_buckets:
        chunks = [Chunk(sequences[0], 0, 20), Chunk(sequences[1], 5, 11)]
        replayed = runner.run(prompt_batch(chunks, bucket)).logits[:2].clone()
        assert torch.equal(replayed, runner.rerun_uncaptured(bucket).logits[:2])


def test_batching_preemption_and_prefix_reuse_change_no_token_on_the_gpu(cache_dir: str) -> None:
    """In float32, where rounding differs too little between buckets to change a greedy token."""
    params = SamplingParams(max_tokens=40)
    plain = deploy("builtin:tiny", cache_dir, dtype="float32").engine
    alone = [generate_tokens(plain, [prompt], params)[0] for prompt in PROMPTS]
    assert generate_tokens(plain, PROMPTS + PROMPTS[::-1], params) == alone + alone[::-1]
    assert plain.allocator.num_allocatable == plain.allocator.capacity
    scarce = deploy("builtin:tiny", cache_dir, dtype="float32", context=400, kv_blocks=36).engine
    assert generate_tokens(scarce, PROMPTS, params) == alone
    assert scarce.scheduler.preemptions > 0
    seeded = SamplingParams(max_tokens=40, temperature=0.9, top_k=50, top_p=0.95, seed=5)
    drawn = [generate_tokens(scarce, [prompt], seeded)[0] for prompt in PROMPTS]
    assert generate_tokens(scarce, PROMPTS, seeded) == drawn
    assert_consistent(scarce.allocator)


def test_every_variant_gives_the_same_logits_within_rounding(cache_dir: str, tmp_path: Path) -> None:
    """Large enough for the skinny GEMM kernels: 1,024 columns and more."""
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
                runner.row_assignment.apply(prefilled_rows(sequences))
                logits[variant.name] = runner.rerun(bucket).logits.float().clone()
            runner.graphs.capture(bucket)
            runner.row_assignment.apply(prefilled_rows(sequences))
            torch.testing.assert_close(runner.rerun(bucket).logits.float(), logits[variant.name])
        for name, variant_logits in logits.items():
            difference = (variant_logits - logits["default"]).norm() / logits["default"].norm()
            assert difference < 0.02, name


def test_a_prefill_bucket_may_use_another_attention_backend_and_last_token_rows(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, dtype="bfloat16")
    runner, bucket = deployment.engine.runner, deployment.plan.prefill_buckets[-1]
    chunks = [Chunk(sequence, 0, len(sequence.token_ids)) for sequence in sequences_for(deployment, 3)]
    logits = {}
    for variant in (DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE, attention_variant("torch-flash")):
        runner.set_variant(bucket, variant)
        for _ in range(2):
            logits[variant.name] = runner.run(prompt_batch(chunks, bucket)).logits[:3].float().clone()
        if deployment.plan.uses_cuda_graph(bucket, variant):
            runner.graphs.capture(bucket)
            torch.testing.assert_close(
                runner.run(prompt_batch(chunks, bucket)).logits[:3].float(), logits[variant.name]
            )
    for name, variant_logits in logits.items():
        assert (variant_logits - logits["default"]).norm() / logits["default"].norm() < 0.02, name


@pytest.mark.parametrize("mode", ["auto", "reduce-overhead"])
@pytest.mark.parametrize("family", list(SUPPORTED))
def test_every_family_passes_its_parity_check_in_bfloat16(
    family: str, mode: str, cache_dir: str, tmp_path: Path
) -> None:
    deployment = deploy(save_config(family, tmp_path), cache_dir, load_format="dummy", mode=mode)
    if mode == "reduce-overhead":
        assert [record.programs for record in deployment.records] == [LAYER_KINDS.get(family, 1)] * 4
    assert all(record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=5))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize("family", list(SUPPORTED))
def test_every_family_serves_long_buckets_without_timing(family: str, cache_dir: str, tmp_path: Path) -> None:
    """On Hopper their first variants select the last tokens' rows early, which gpt2 cannot."""
    flags = {"buckets": (512, 2048), "context": 2048, "kv_blocks": 512, "load_format": "dummy"}
    limits = {"n_positions": 2048} if family == "gpt2" else {"max_position_embeddings": 2048}
    deployment = deploy(save_config(family, tmp_path, **limits), cache_dir, **flags)
    assert all(record.parity.passed for record in deployment.records)
    if deployment.plan.is_hopper:
        expected = ["default"] * 2 if family == "gpt2" else ["last-token-rows", "last-token-rows+inplace"]
        assert [record.variant for record in deployment.records[:2]] == expected
    with measure_compiles() as serving, fail_on_recompile():
        generate_tokens(deployment.engine, [*PROMPTS, [5] * 900], SamplingParams(max_tokens=5))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize(("region", "graphs"), [("blocks", "region"), ("layer", "region"), ("blocks", "step")])
def test_graphs_per_region_give_the_same_tokens(region: str, graphs: str, cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, region=region, graphs=graphs)
    assert all(record.parity.passed for record in deployment.records)
    params = SamplingParams(max_tokens=8)
    answers = generate_tokens(deployment.engine, PROMPTS[:2], params)
    assert answers == generate_tokens(deploy("builtin:tiny", cache_dir).engine, PROMPTS[:2], params)


def test_a_dynamic_range_serves_every_length(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, shapes="dynamic")
    assert deployment.records[0].programs == 1
    with measure_compiles() as serving, fail_on_recompile():
        generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=3))
    assert serving.counts.compiles == 0


def read_libraries(package: Path) -> list[bytes]:
    with zipfile.ZipFile(package) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(".so")]


def test_a_start_from_packages_gives_the_tokens_of_compiled_programs(
    cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages are compiled by the first start; the second one captures them while it reads the weights.

    Its checks replay only graphs, those of mixed steps too.
    """
    flags: dict[str, Any] = {"programs": "aot", "buckets": (128,)}
    tests_of_vector_extensions = valid_vec_isa_list.cache_info()
    compiled = deploy("builtin:tiny", cache_dir, **flags)
    assert valid_vec_isa_list.cache_info() == tests_of_vector_extensions, "40 s of g++ with AVX-512"
    libraries = [library for path in Path(cache_dir, "aot").glob("*/*.pt2") for library in read_libraries(path)]
    assert any(b"cuLaunchKernelEx" in library for library in libraries) == compiled.plan.is_hopper
    expected = generate_tokens(compiled.engine, PROMPTS, SamplingParams(max_tokens=30))
    reset_programs()
    settings = {"model": "builtin:tiny", "batch_sizes": (1, 4), "context": 512, "kv_blocks": 256, **flags}
    recipe = build_recipe({**settings, "cache_dir": cache_dir}, environ={})
    forward, warm, events = ModelRunner._forward, packaged_start.warm, list[str]()
    monkeypatch.setattr(
        ModelRunner, "_forward", lambda runner, *rest: (events.append("forward"), forward(runner, *rest))[1]
    )
    monkeypatch.setattr(packaged_start, "warm", lambda *arguments: (events.append("checks"), warm(*arguments))[1])
    started = start_from_packages(StartRequest(recipe))
    assert started is not None and "programs" in started.stage_seconds
    assert events[-1] == "checks" and events.count("forward") >= 2 * len(started.records)
    assert [(record.outcome, record.compiles, record.captured) for record in started.records] == [("hit", 0, True)] * 3
    with measure_compiles() as serving, fail_on_recompile():
        answers = generate_tokens(started.engine, PROMPTS, SamplingParams(max_tokens=30))
    assert serving.counts.compiles == 0
    assert answers == expected


def test_warm_leaves_packages_that_an_auto_start_uses(run_cli: Any, tmp_path: Path) -> None:
    """`warm` frees the first process's GPU memory, and builds packages in another one. The tokens are those of jit."""
    flags = ("--buckets", "128", "--batch-sizes", "1,4", "--context", "512", "--kv-blocks", "256")
    folder = ("--cache-dir", str(tmp_path / "cache"))
    warmed = run_cli("warm", "builtin:tiny", *flags, *folder, "--json")
    assert warmed.returncode == 0, warmed.stderr
    document = json.loads(warmed.stdout)
    assert document["plan"]["programs"] == "jit" and document["packages"]["failure"] == "", warmed.stderr
    answers = []
    for programs in ("auto", "jit"):
        prompt = ("This module provides", "--max-new-tokens", "30", "--programs", programs)
        done = run_cli("generate", "builtin:tiny", *prompt, *flags, *folder, "--json", new=True)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    auto, jit = answers
    assert (auto["plan"]["programs"], jit["plan"]["programs"]) == ("aot", "jit")
    assert "transformers" not in auto["import_seconds"] and "triton" not in auto["import_seconds"]
    assert {bucket["outcome"] for bucket in auto["buckets"]} == {"hit"}
    assert all(bucket["captured"] for bucket in auto["buckets"])
    assert auto["token_ids"] == jit["token_ids"]


FAILED_CAPTURE = """
import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.engine.step.step_graphs import capture_graph

x = torch.ones(10, device="cuda")
try:
    capture_graph(lambda: StepOutput(x, x, x) if x[0].item() else None, torch.cuda.MemPool())
except RuntimeError:
    print("failed")
pool = torch.cuda.MemPool()
graph = capture_graph(lambda: StepOutput(x * 2, x, x), pool)
del graph, pool
print("freed")
"""


def test_after_a_failed_capture_another_one_succeeds_in_a_new_pool() -> None:
    """A step that reads a tensor on the host cannot be captured. A capture executes nothing, and needs no first run."""
    x = torch.ones(1000, device="cuda")

    def step(reads_on_host: bool) -> StepOutput:
        y = torch.erfinv(x.mul_(0.5))
        return StepOutput(y, y if reads_on_host and y[0].item() else x, x)

    with pytest.raises(RuntimeError, match="captur"):
        capture_graph(lambda: step(True), torch.cuda.MemPool())
    graph = capture_graph(lambda: step(False), torch.cuda.MemPool())
    assert x[0] == 1, "nothing ran"
    for value in (0.5, 0.25):
        torch.testing.assert_close(graph.replay().logits, torch.full_like(x, value).erfinv())


def test_after_a_failed_capture_pools_can_be_freed() -> None:
    """Without `end_allocation`, torch 2.11 ends the process when the next pool is freed."""
    done = subprocess.run([sys.executable, "-c", FAILED_CAPTURE], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "failed\nfreed\n"), done.stderr


ABANDONMENTS = 50


@pytest.mark.parametrize("programs", ["jit", "aot"])
def test_an_abandoned_capture_leaves_no_memory_and_the_next_one_succeeds(programs: str, cache_dir: str) -> None:
    """It is abandoned before each program of the step in turn, with and without a run before the capture."""
    flags: dict[str, Any] = {"shapes": "dynamic", "dtype": "float32", "programs": programs}
    engine = deploy("builtin:tiny", cache_dir, **flags).engine
    graphs, params = engine.runner.graphs, SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    expected = generate_tokens(engine, PROMPTS, params)
    engine._timed_sizes.update(range(1000))  # so that each call captures
    num_graphs, memory = len(graphs), list[tuple[int, int, int]]()
    for number in range(ABANDONMENTS):
        left = iter(range(number % 4))
        graphs._needs_first_run = number % 2 == 1
        assert engine.capture_next_graph(lambda left=left: next(left, None) is None)
        torch.cuda.synchronize()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), -torch.cuda.mem_get_info()[0]))
    assert graphs.abandoned_captures == ABANDONMENTS and len(graphs) == num_graphs
    settled, last = memory[ABANDONMENTS // 5], memory[-1]
    assert last[:2] == settled[:2], memory
    assert last[2] - settled[2] < 16 << 20, "other tests may use the GPU, but no graph was kept"
    graphs._needs_first_run = False
    assert generate_tokens(engine, PROMPTS, params) == expected
    while engine.capture_next_graph():
        pass
    assert len(graphs) > num_graphs and graphs._captures_late
    uncaptured = graphs.uncaptured_runs
    engine.allocator.reset_prefix_cache()
    assert generate_tokens(engine, PROMPTS, params) == expected
    assert graphs.uncaptured_runs == uncaptured


@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_mixed_steps_change_no_token_on_the_gpu(shapes: str, cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as requests arrive and are aborted, with graphs that are captured early, under load and when idle.

    The keys of prompts are split, which otherwise requires prefixes of 2,048 tokens.
    """
    from tcdeploy.kernels.attention import prefill

    monkeypatch.setattr(prefill, "MIN_KEYS_PER_PREFILL_SPLIT", 16)
    flags = {"shapes": shapes, "mixed_steps": "on", "dtype": "float32", "kv_blocks": 60}
    engine = deploy("builtin:tiny", cache_dir, **flags).engine
    check_random_traffic(engine, num_requests=60)
    if shapes == "dynamic":
        assert engine.wants_graph
        engine.capture_wanted_graph()
        check_random_traffic(engine, num_requests=20, seed=21)
    while engine.capture_next_graph():
        pass
    uncaptured = engine.runner.graphs.uncaptured_runs
    check_random_traffic(engine, num_requests=60, seed=22)
    assert engine.runner.graphs.uncaptured_runs == uncaptured


@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_mixed_steps_without_prefill_graphs_pass_the_parity_check(shapes: str, cache_dir: str) -> None:
    """torch's FlashAttention has no float32, in which tokens could be compared."""
    flags = {"shapes": shapes, "mixed_steps": "on", "attention": "torch-flash", "dtype": "bfloat16"}
    deployment = deploy("builtin:tiny", cache_dir, **flags)
    assert all(record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=20))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize("backend", ["torch-flash", "flash-attn-2", "flash-attn-4"])
def test_each_installed_flash_attention_serves_a_whole_model(backend: str, cache_dir: str, tmp_path: Path) -> None:
    """Prompts of one token, of several chunks, and of one chunk plus one token."""
    from tcdeploy.planning.environment import installed_flash_packages

    if backend != "torch-flash" and backend not in dict(installed_flash_packages()):
        pytest.skip(f"{backend} is not installed")
    folder = save_config("llama", tmp_path, hidden_size=256, head_dim=64)
    deployment = deploy(folder, cache_dir, load_format="dummy", attention=backend)
    assert all(record.parity.passed for record in deployment.records)
    generate_tokens(deployment.engine, [*PROMPTS, [5] * 129], SamplingParams(max_tokens=4))


def test_the_check_of_an_eager_start_compiles_no_triton_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have compiled its kernels before."""
    counts: list[int] = []
    check = model_code.check_eager_steps

    def count_kernels(*arguments: Any) -> None:
        counts.append(triton_cache.kernels_compiled)
        check(*arguments)
        counts.append(triton_cache.kernels_compiled)

    monkeypatch.setattr(model_code, "check_eager_steps", count_kernels)
    before = triton_cache.kernels_compiled
    # Numbers of heads that no other test has: this process may have compiled the kernels of other models.
    model = save_config("llama", tmp_path / "model", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    deployment = deploy(model, str(tmp_path / "cache"), eager=True, load_format="dummy", dtype="bfloat16")
    assert deployment.swaps is not None
    deployment.swaps.stop()
    assert before < counts[0] == counts[1]


def test_a_warm_start_times_and_compiles_no_kernel_again(run_cli: Any, tmp_path: Path) -> None:
    """Each start is a new process. The last one uses the folder after a move, and must not write to its old path.

    max-autotune includes coordinate descent over about a hundred kernel configurations.
    """
    folder = save_config("llama", tmp_path, hidden_size=1024, intermediate_size=2048)
    flags = ("--load-format", "dummy", "--mode", "max-autotune", "--buckets", "32", "--batch-sizes", "1")
    flags += ("--context", "512", "--kv-blocks", "256", "--programs", "jit")
    here, there, timed = tmp_path / "here", tmp_path / "there", []
    for outcome, folder_used in (("miss", here), ("hit", here), ("hit", there)):
        if folder_used == there:
            here.rename(there)
        result = run_cli("warm", folder, *flags, "--cache-dir", str(folder_used), "--json")
        records = json.loads(result.stdout)["buckets"]
        counts = [(record["outcome"], record["kernels_timed"], record["kernels_compiled"]) for record in records]
        assert [record["outcome"] for record in records] == [outcome] * 2, counts
        timed.append(sum(record["kernels_timed"] for record in records))
    assert timed[0] > 100 and timed[1:] == [0, 0], timed
    assert not here.exists()


def test_a_moved_cache_folder_is_complete(run_cli: Any, tmp_path: Path) -> None:
    """Including Triton kernels, which Inductor's cache hits do not cover. The manifest lists every binary."""
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
        "--programs",
        "jit",
    )
    cold = run_cli("warm", folder, *flags, "--cache-dir", str(tmp_path / "here"))
    assert cold.returncode == 0, cold.stderr
    assert len(list((tmp_path / "here").glob("triton/*/*.cubin"))) > 4
    first = run_cli("warm", folder, *flags, "--cache-dir", str(tmp_path / "here"), "--json", "--require-hit")
    assert first.returncode == 0, first.stderr
    moved = (tmp_path / "here").rename(tmp_path / "there")
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in moved.glob("triton/*/*")}
    warm = run_cli("warm", folder, *flags, "--cache-dir", str(moved), "--json", "--require-hit")
    assert warm.returncode == 0, warm.stderr
    assert [record["kernels_compiled"] for record in json.loads(warm.stdout)["buckets"]] == [0, 0]
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in moved.glob("triton/*/*")} == before
    (manifest,) = (json.loads(path.read_text()) for path in moved.glob("manifests/*.json"))
    listed = {file["path"] for file in manifest["files"]}
    loaded = [*moved.glob("triton/*/*.cubin"), *moved.glob("triton/*/*.so")]
    assert listed >= {path.relative_to(moved).as_posix() for path in loaded}


def test_a_model_too_large_for_the_gpu_is_refused_before_loading(run_cli: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248}
    folder = save_config("llama", tmp_path, **sizes)
    result = run_cli("warm", folder, "--load-format", "dummy")
    assert result.returncode == 7
    assert "weights leave no memory for KV" in result.stderr


CONTEXT_BEFORE_TORCH = """
import ctypes
from tcdeploy.host.cuda_context import DRIVER, start_context
start_context().join()
flags, active = ctypes.c_uint(), ctypes.c_int()
assert ctypes.CDLL(DRIVER).cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
import torch
print(active.value, int(torch.ones(3, device="cuda").sum()))
"""


def test_torch_uses_the_context_that_was_created_before_its_import() -> None:
    done = subprocess.run([sys.executable, "-c", CONTEXT_BEFORE_TORCH], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 3\n"), done.stderr
