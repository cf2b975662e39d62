"""The whole flow on the embedded model: from a recipe to warmed programs that give transformers' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.programs.compile_stats import measure_compiles, read_counts
from tcdeploy.programs.stances import fail_on_recompile
from tests.conftest import TINY_BATCH_SIZES, TINY_BUCKETS
from tests.engine_loop import generate_tokens

TEXT = "The function returns a new list of the objects that were given to it, in the order of the arguments. "


COMMON_WORDS = set(
    "the a an of to in and or is are be for if that this it as by with not on from which at can will given used "
    "return returns function value object objects list string name type class method argument arguments file "
    "module python new number none true false default set sequence called instance attribute error raised "
    "when all one two first second any same other using".split()
)


def prompt_of(tokenizer: Any, length: int) -> list[int]:
    return tokenizer(TEXT * 40).input_ids[:length]


def plain_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def params_with_eos(model: Any, new_tokens: int) -> SamplingParams:
    eos = model.generation_config.eos_token_id
    return SamplingParams(max_tokens=new_tokens, stop_token_ids=tuple(eos if isinstance(eos, list) else [eos]))


@pytest.mark.parametrize(
    "length",
    [1, TINY_BUCKETS[0] - 1, TINY_BUCKETS[0], TINY_BUCKETS[0] + 1, TINY_BUCKETS[-1], TINY_BUCKETS[-1] + 1, 5 * 128 - 3],
)
def test_greedy_tokens_equal_transformers_generate(tiny_deployment: Any, reference_tiny: Any, length: int) -> None:
    """Prompts shorter than a bucket, equal to one, and several times the largest (prefilled in chunks)."""
    prompt = prompt_of(tiny_deployment.tokenizer, length)
    assert len(prompt) == length
    tokens = generate_tokens(tiny_deployment.engine, [prompt], params_with_eos(reference_tiny, 24))[0]
    assert tokens == plain_greedy(reference_tiny, prompt, 24)


def test_a_batch_of_unequal_lengths_equals_each_prompt_alone(tiny_deployment: Any, reference_tiny: Any) -> None:
    """More prompts than the largest decode bucket, so sequences start as others finish."""
    prompts = [prompt_of(tiny_deployment.tokenizer, length) for length in (3, 200, 32, 129, 1, 77, 640)]
    answers = generate_tokens(tiny_deployment.engine, prompts, params_with_eos(reference_tiny, 20))
    assert answers == [plain_greedy(reference_tiny, prompt, 20) for prompt in prompts]


def test_nothing_compiles_after_warm_up(tiny_deployment: Any) -> None:
    prompts = [prompt_of(tiny_deployment.tokenizer, length) for length in (1, 2, 31, 33, 64, 127, 128, 129, 700)]
    with measure_compiles() as while_serving, fail_on_recompile():
        generate_tokens(tiny_deployment.engine, prompts, SamplingParams(max_tokens=9, temperature=0.7, seed=3))
    assert while_serving.counts.compiles == 0
    assert while_serving.counts.programs == 0


def test_the_compile_counter_counts_an_ordinary_compile() -> None:
    """Otherwise the test above could not fail."""
    before = read_counts()
    torch.compile(lambda x: x + 41, backend="eager")(torch.ones(3))
    assert (read_counts() - before).compiles == 1


def test_every_bucket_is_one_program_without_graph_breaks_and_passes_its_check(fresh_deployment: Any) -> None:
    records = fresh_deployment.records
    assert [record.bucket for record in records] == [
        *(f"prefill:{size}" for size in TINY_BUCKETS),
        *(f"decode:{size}" for size in TINY_BATCH_SIZES),
    ]
    assert len(fresh_deployment.planned.architecture.attention_layers) > 1
    for record in records:
        assert record.programs == 1, f"{record.bucket}: one program for any number of layers"
        assert record.graph_breaks == 0
        assert record.parity.passed and record.parity.relative_difference < 1e-4


def test_all_blocks_are_free_when_all_sequences_have_finished(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    assert engine.allocator.num_allocatable == engine.allocator.capacity


def test_greedy_text_is_english(tiny_deployment: Any) -> None:
    """The embedded model is trained: most of its words are words of the Python library documentation."""
    tokenizer = tiny_deployment.tokenizer
    ids = generate_tokens(
        tiny_deployment.engine, [tokenizer("The function returns").input_ids], SamplingParams(max_tokens=60)
    )[0]
    words = [word.strip(".,;:()`'\"").lower() for word in tokenizer.decode(ids).split()]
    assert len(words) >= 20
    assert len(set(words)) >= 12, f"a loop of few words: {words}"
    assert sum(word in COMMON_WORDS for word in words) >= len(words) * 0.4, words
