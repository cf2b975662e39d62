"""Draws follow the requested distribution, and depend on seed and position only, not on the batch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tcdeploy.engine.schedule.sequence import MAX_LOGIT_BIASES
from tcdeploy.engine.schedule.step_batch import row_seed
from tcdeploy.engine.step.sampling import (
    COUNT_LIMIT,
    Backend,
    count_tokens,
    logprobs,
    sample,
    set_biases,
    set_penalty_history,
)
from tcdeploy.kernels.sampling.reference import MAX_ROWS_PER_PASS, accumulate, draw
from tcdeploy.kernels.sampling.rows import Features, SamplingRows, make_sampling_rows
from tcdeploy.kernels.sampling.weights import uniforms
from tcdeploy.planning.memory import SAMPLING_BYTES_PER_LOGIT

PROBABILITIES = (0.05, 0.4, 0.15, 0.3, 0.1)
LOGITS = torch.tensor(PROBABILITIES, dtype=torch.float64).log()
DRAWS = 3000
NAN, INF = float("nan"), float("inf")
PLAIN, FILTERED = Features(penalties=False, filters=False), Features(penalties=False, filters=True)
PENALISED, EVERYTHING = Features(penalties=True, filters=False), Features(penalties=True, filters=True)


def make_rows(rows: int, vocab_size: int, **values: Any) -> SamplingRows:
    """Rows with temperature 1, seed 1 and `values`, each one value for all rows or one per row."""
    sampling = make_sampling_rows(rows, vocab_size, MAX_LOGIT_BIASES, "cpu")
    for name, value in {"temperature": 1.0, "seeds": 1, **values}.items():
        field = getattr(sampling, name)
        field.copy_(torch.as_tensor(value, dtype=field.dtype))
    return sampling


def to_gpu(sampling: SamplingRows) -> SamplingRows:
    stored = [field.name for field in dataclasses.fields(sampling) if field.init]
    return SamplingRows(**{name: getattr(sampling, name).cuda() for name in stored})


def draws(logits: Tensor, count: int, features: Features = FILTERED, **values: Any) -> list[int]:
    """Tokens drawn from one row of logits at positions 0 to count - 1."""
    sampling = make_rows(count, logits.shape[0], **values)
    return sample(logits.expand(count, -1), sampling, torch.arange(count), features).tolist()


def random_logits(rows: int, vocab_size: int, seed: int = 3) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def chi_square(tokens: list[int], probabilities: dict[int, float]) -> float:
    """Pearson's statistic, infinite for tokens outside `probabilities`. Above 30 with 4 degrees: p below 1e-5."""
    counts = Counter(tokens)
    if set(counts) - set(probabilities):
        return float("inf")
    total = sum(probabilities.values())
    expected = {token: len(tokens) * share / total for token, share in probabilities.items()}
    return sum((counts[token] - count) ** 2 / count for token, count in expected.items())


# The distribution


@pytest.mark.parametrize("features", [PLAIN, FILTERED, EVERYTHING], ids=str)
def test_draws_follow_the_softmax(features: Features) -> None:
    assert chi_square(draws(LOGITS, DRAWS, features), dict(enumerate(PROBABILITIES))) < 30


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_draws_follow_the_softmax_over_several_chunks(vocab_size: int) -> None:
    logits = random_logits(1, vocab_size)[0]
    tokens = draws(logits, 20_000, PLAIN)
    quarter = max(vocab_size // 4, 1)
    shares = logits.double().softmax(dim=-1).split(quarter)
    expected = {number: float(share.sum()) for number, share in enumerate(shares)}
    assert chi_square([token // quarter for token in tokens], expected) < 30


def test_draws_of_many_seeds_at_one_position_follow_the_softmax() -> None:
    sampling = make_rows(DRAWS, 5, seeds=range(DRAWS))
    tokens = sample(LOGITS.expand(DRAWS, -1), sampling, torch.full((DRAWS,), 17), PLAIN).tolist()
    assert chi_square(tokens, dict(enumerate(PROBABILITIES))) < 30


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens(temperature: float) -> None:
    expected = {token: share ** (1 / temperature) for token, share in enumerate(PROBABILITIES)}
    tokens = draws(LOGITS, DRAWS, temperature=temperature)
    assert chi_square(tokens, expected) < 30
    assert chi_square(tokens, dict(enumerate(PROBABILITIES))) > 100


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_top_k_keeps_exactly_the_k_most_likely(k: int) -> None:
    likeliest = sorted(range(5), key=lambda token: -PROBABILITIES[token])[:k]
    tokens = draws(LOGITS, DRAWS, top_k=k)
    assert set(tokens) == set(likeliest)
    assert chi_square(tokens, {token: PROBABILITIES[token] for token in likeliest}) < 30


@pytest.mark.parametrize("k", [0, 5, 6, 10**9])
def test_top_k_of_zero_or_beyond_the_vocabulary_keeps_all(k: int) -> None:
    assert draws(LOGITS, 200, top_k=k) == draws(LOGITS, 200, PLAIN)


def test_the_lowest_ids_are_kept_among_equal_logits_at_the_limit_of_top_k() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0]).bfloat16()
    assert set(draws(logits, 400, top_k=3)) == {0, 1, 4}
    assert set(draws(logits, 400, top_k=1)) == {1}


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-9, {1}),  # the most likely token is always kept
        (1e-40, {1}),
        (0.2, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 3, 2}),
        (0.84, {1, 3, 2}),
        (0.86, {1, 3, 2, 4}),
        (0.94, {1, 3, 2, 4}),
        (0.96, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, expected: set[int]) -> None:
    tokens = draws(LOGITS, DRAWS, top_p=p)
    assert set(tokens) == expected
    assert chi_square(tokens, {token: PROBABILITIES[token] for token in expected}) < 30


@pytest.mark.parametrize(("p", "num_tokens"), [(0.0, 1), (0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_a_set_that_reaches_p_exactly(p: float, num_tokens: int) -> None:
    assert set(draws(torch.zeros(4), 400, top_p=p)) == set(range(num_tokens))


def test_top_p_applies_to_the_tokens_that_top_k_left() -> None:
    """Of 0.4 and 0.3, the first has 4/7, which reaches 0.5; of all five tokens it would not."""
    assert set(draws(LOGITS, 400, top_k=2, top_p=0.5)) == {1}
    assert set(draws(LOGITS, 400, top_p=0.5)) == {1, 3}


def test_top_p_applies_after_temperature() -> None:
    assert set(draws(LOGITS, 400, temperature=0.25, top_p=0.7)) == {1}


@pytest.mark.parametrize(
    ("p", "expected"),
    [(1.0, {1}), (0.76, {1}), (0.74, {1, 3}), (0.376, {1, 3}), (0.374, {1, 2, 3}), (0.1, {0, 1, 2, 3, 4}), (0.0, None)],
)
def test_min_p_is_relative_to_the_largest_probability(p: float, expected: set[int] | None) -> None:
    tokens = draws(LOGITS, DRAWS, min_p=p)
    assert set(tokens) == (expected or set(range(5)))
    assert chi_square(tokens, {token: PROBABILITIES[token] for token in set(tokens)}) < 30


def test_min_p_applies_after_temperature_and_after_top_p() -> None:
    """(0.3 / 0.4) ** 4 is 0.32. Top-p sees all five tokens, of which 0.4 alone does not reach 0.5."""
    assert set(draws(LOGITS, 400, temperature=0.25, min_p=0.5)) == {1}
    assert set(draws(LOGITS, 400, top_p=0.5, min_p=0.2)) == {1, 3}


def test_filters_agree_with_transformers() -> None:
    from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(1, 300)[0] * 3
    for top_k, top_p, min_p in ((50, 0.9, 0.01), (7, 0.99, 0.0), (0, 0.6, 0.05), (200, 1.0, 0.2)):
        scores = logits[None]
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores)
        scores = MinPLogitsWarper(min_p)(None, scores)[0]
        expected = draws(scores, 2000, PLAIN)
        assert draws(logits, 2000, top_k=top_k, top_p=top_p, min_p=min_p) == expected


# Numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_any_float_dtype_are_accepted_and_not_modified(dtype: torch.dtype) -> None:
    logits = (random_logits(1, 700)[0] * 4).to(dtype)
    before = logits.clone()
    for features in (PLAIN, FILTERED, EVERYTHING):
        values = {"top_k": 90, "top_p": 0.9, "repetition": 1.1, "frequency": 0.1} if features.filters else {}
        assert draws(logits, 300, features, **values) == draws(logits.float(), 300, features, **values)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-30, 1e-38, 1e-42, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(1, 1000)[0] * 5
    best = int(logits.argmax())
    logits[best] += 1.0
    for shift in (0.0, 25.0, -25.0):
        for features in (PLAIN, FILTERED):
            assert set(draws(logits + shift, 10, features, temperature=temperature, top_p=0.9)) == {best}


@pytest.mark.parametrize("temperature", [1e6, 1e30, 3e38])
def test_an_enormous_temperature_is_uniform(temperature: float) -> None:
    tokens = draws(torch.tensor([-50.0, 0.0, 80.0, 3.0, 7.0]), DRAWS, PLAIN, temperature=temperature)
    assert chi_square(tokens, dict.fromkeys(range(5), 1.0)) < 30


def test_temperature_zero_gives_the_lowest_id_among_equal_maxima() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0]).bfloat16()
    for features in (PLAIN, FILTERED, EVERYTHING):
        assert set(draws(logits, 20, features, temperature=0.0, top_p=0.1)) == {1}


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    for vocab_size in (3, 256, 700):
        for token in {1, vocab_size // 2, vocab_size - 2}:
            weights = torch.zeros(1, vocab_size, dtype=torch.float64)
            weights[0, token] = 1.0
            assert draw(weights, torch.tensor([[uniform]], dtype=torch.float64)).item() == token


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.2499, 2), (0.25, 600), (0.7499, 600), (0.75, 601)])
def test_the_uniform_number_is_a_quantile_of_the_weights(uniform: float, token: int) -> None:
    weights = torch.zeros(1, 900, dtype=torch.float64)
    weights[0, [2, 600, 601]] = torch.tensor([0.5, 1.0, 0.5], dtype=torch.float64)
    assert draw(weights, torch.tensor([[uniform]], dtype=torch.float64)).item() == token


@pytest.mark.parametrize("features", [PLAIN, EVERYTHING], ids=str)
def test_the_edges_between_tokens_are_exact_to_eleven_digits(
    features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uniform numbers 1e-11 below and above each token's edge in float64. Weights in float32 would miss by 1e-8."""
    logits = random_logits(1, 3000)[0]
    edges = (logits.double() / 0.75).softmax(dim=-1).cumsum(dim=-1)[5:2500:5]
    tokens = torch.arange(5, 2500, 5)
    for offset, expected in ((-1e-11, tokens), (1e-11, tokens + 1)):
        monkeypatch.setattr(
            "tcdeploy.kernels.sampling.reference.uniforms", lambda seeds, positions, u=edges + offset: u[positions]
        )
        assert draws(logits, len(edges), features, temperature=0.75) == expected.tolist()


def test_cumulative_units_of_a_uniform_large_vocabulary_do_not_overflow() -> None:
    for vocab_size in (1, 128256, 262144):
        cumulative = accumulate(torch.ones(1, vocab_size, dtype=torch.float64))
        assert 2**60 < cumulative.total.item() < 2**62
        assert cumulative.first_exceeding(cumulative.total - 1).item() == vocab_size - 1
        assert cumulative.first_exceeding(torch.zeros(1, 1, dtype=torch.int64)).item() == 0


@pytest.mark.parametrize("features", [PLAIN, FILTERED, EVERYTHING], ids=str)
def test_unusable_logits_give_the_first_maximum_and_do_not_affect_other_rows(features: Features) -> None:
    logits = random_logits(7, 600)
    alone = sample(logits, make_rows(7, 600, top_p=0.9, top_k=40), torch.arange(7), features).tolist()
    logits[1] = -INF
    logits[2] = NAN
    logits[3, 500] = NAN
    logits[4, 300] = INF
    logits[5] = INF
    tokens = sample(logits, make_rows(7, 600, top_p=0.9, top_k=40), torch.arange(7), features).tolist()
    assert tokens == [alone[0], 0, 0, 500, 300, 0, alone[6]]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((600,), -INF)
    logits[[5, 300, 599]] = 0.0
    for features in (PLAIN, FILTERED):
        assert set(draws(logits, 200, features, top_k=50, top_p=0.999)) == {5, 300, 599}


# Randomness


def test_a_draw_is_determined_by_seed_and_position() -> None:
    logits = random_logits(1, 500)[0]
    assert draws(logits, 30, seeds=7) == draws(logits, 30, seeds=7)
    assert draws(logits, 30, seeds=7) != draws(logits, 30, seeds=8)
    assert draws(logits, 30, seeds=7)[1:] != draws(logits, 30, seeds=7)[:-1]


def test_streams_of_neighbouring_seeds_are_not_shifts_of_each_other() -> None:
    seeds, positions = torch.arange(100)[:, None], torch.arange(100)[None, :]
    numbers = uniforms(seeds.expand(100, 100).reshape(-1), positions.expand(100, 100).reshape(-1))
    assert numbers.unique().numel() == 10_000


GAMMA, START = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_uniforms_are_splitmix64_of_the_paper(seed: int) -> None:
    """Computed with Python integers. The published first output for seed 0 is 0xE220A8397B1DCDAF."""
    assert uniforms(torch.tensor([0]), torch.tensor([1])).item() == (0xE220A8397B1DCDAF >> 11) / 2**53
    for position in (0, 1, 2, 1000, 131071):
        z = (seed * START + position * GAMMA) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected = ((z ^ (z >> 31)) >> 11) / 2**53
        assert uniforms(torch.tensor([seed]), torch.tensor([position])).tolist() == [expected]


def test_streams_of_neighbouring_seeds_do_not_overlap() -> None:
    """The distance between the starts of two seeds, in either direction, for all differences up to 2^20."""
    steps = torch.arange(1, 2**20) * ((START * pow(GAMMA, -1, 2**64) + 2**63) % 2**64 - 2**63)
    assert steps.abs().min() > 2**40


def test_uniforms_are_uniform_and_uncorrelated_with_the_previous_one() -> None:
    positions = torch.arange(100_000)
    for seed in (0, 1, 2**40):
        numbers = uniforms(torch.full_like(positions, seed), positions)
        assert 0 <= numbers.min() < 1e-4 < 1 - 1e-4 < numbers.max() < 1
        assert chi_square((numbers * 5).long().tolist(), dict.fromkeys(range(5), 1.0)) < 30
        assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.015  # 4.7 standard deviations


def test_a_seed_becomes_a_signed_64_bit_integer_and_none_a_random_one() -> None:
    assert [row_seed(seed) for seed in (0, 5, -1, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 5, -1, 2**63 - 1, -(2**63), -1]
    random_seeds = {row_seed(None) for _ in range(20)}
    assert len(random_seeds) == 20
    torch.tensor(list(random_seeds), dtype=torch.int64)


# Batches


MIXED: dict[str, list[float]] = {
    "temperature": [1.0, 0.0, 0.7, 1.3, 1.0, 2.0, 1.0, 0.0],
    "seeds": [1, 2, 3, 4, 5, 6, 1, 8],
    "top_k": [0, 0, 50, 0, 3, 0, 0, 5],
    "top_p": [1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 1.0, 0.5],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.1, 0.05, 0.0, 0.0],
    "repetition": [1.0, 1.3, 1.0, 1.0, 1.1, 1.0, 1.0, 0.8],
    "presence": [0.0, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0, -0.5],
    "frequency": [0.0, 0.4, 0.0, 0.0, -0.2, 0.0, 0.0, 0.0],
}


def mixed_rows(vocab_size: int) -> SamplingRows:
    sampling = make_rows(8, vocab_size, **MIXED, changes_logits=True)
    for row in range(8):
        ids = torch.randint(vocab_size, (400,), generator=torch.Generator().manual_seed(row)).tolist()
        set_penalty_history(sampling, row, ids[:100], ids[100:])
    return sampling


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_rows_with_different_parameters_draw_the_same_tokens_alone(vocab_size: int) -> None:
    """Alone, a row runs with its own features only; the features of other rows must not change its tokens."""
    sampling, logits, positions = mixed_rows(vocab_size), random_logits(8, vocab_size) * 2, torch.arange(8) * 7
    for step in range(20):
        together = sample(logits, sampling, positions + step, EVERYTHING).tolist()
        for row in range(8):
            neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            used = {name for name, value in neutral.items() if MIXED[name][row] != value}
            features = Features(
                bool(used & {"repetition", "presence", "frequency"}), bool(used & {"top_k", "top_p", "min_p"})
            )
            index = torch.tensor([row])
            alone = sample(logits[index], sampling, positions[index] + step, features, rows=index)
            assert alone.tolist() == [together[row]], (step, row)


def test_rows_are_indices_into_the_sampling_parameters() -> None:
    sampling, logits, positions = mixed_rows(300), random_logits(8, 300), torch.arange(8)
    order = torch.tensor([6, 0, 7, 3, 3, 1, 2, 5, 4])
    in_order = sample(logits, sampling, positions, EVERYTHING)
    assert torch.equal(sample(logits[order], sampling, positions[order], EVERYTHING, rows=order), in_order[order])
    assert torch.equal(sample(logits[:5], sampling, positions[:5], EVERYTHING), in_order[:5])


@pytest.mark.parametrize("features", [PLAIN, FILTERED], ids=str)
def test_a_token_is_the_same_alone_and_in_a_batch_of_32(features: Features) -> None:
    logits, positions = random_logits(32, 32000), torch.arange(32)
    top_p = [0.5 + row / 80 for row in range(32)] if features.filters else 1.0
    sampling = make_rows(32, 32000, seeds=range(32), top_p=top_p)
    together = sample(logits, sampling, positions, features)
    for row in range(32):
        index = torch.tensor([row])
        assert sample(logits[index], sampling, positions[index], features, rows=index).item() == together[row]
    assert len(set(together.tolist())) > 25


def test_splitting_a_large_batch_changes_no_token() -> None:
    size = 2 * MAX_ROWS_PER_PASS + 3
    logits = random_logits(size, 50)
    sampling = make_rows(size, 50, seeds=range(size), top_k=[row % 7 for row in range(size)])
    positions, backwards = torch.arange(size) * 3, torch.arange(size).flip(0)
    together = sample(logits, sampling, positions, FILTERED)
    assert together.shape == (size,)
    parts = [
        sample(logits[row : row + 1], sampling, positions[row : row + 1], FILTERED, rows=torch.tensor([row]))
        for row in range(size)
    ]
    assert torch.equal(together, torch.cat(parts))
    flipped = sample(logits[backwards], sampling, positions[backwards], FILTERED, rows=backwards)
    assert torch.equal(flipped, together[backwards])


# Penalties


def penalised(logits: list[float], prompt: list[int], output: list[int], **penalties: float) -> list[float]:
    """The formulas of the module docstring, token by token."""
    scores = []
    for token, score in enumerate(logits):
        if token in prompt or token in output:
            score = score / penalties["repetition"] if score > 0 else score * penalties["repetition"]
        score -= penalties["frequency"] * output.count(token)
        score -= penalties["presence"] * (token in output)
        scores.append(score)
    return scores


@pytest.mark.parametrize("repetition", [1.0, 1.5, 0.7])
@pytest.mark.parametrize("presence", [0.0, 0.8, -0.6])
@pytest.mark.parametrize("frequency", [0.0, 0.3, -0.2])
def test_penalties_follow_the_formulas(repetition: float, presence: float, frequency: float) -> None:
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
    logits = random_logits(1, 40)[0]
    prompt, output = [1, 1, 2, 3, 30, 39], [3, 4, 4, 4, 5, 39, 0, 20, 21, 22]
    scores = torch.tensor(penalised(logits.tolist(), prompt, output, **penalties), dtype=torch.float64)
    expected = draws(scores, 1000, PLAIN)
    count = len(expected)
    sampling = make_rows(count, 40, **penalties)
    for row in range(count):
        set_penalty_history(sampling, row, prompt, output)
    tokens = sample(logits.expand(count, -1), sampling, torch.arange(count), PENALISED).tolist()
    differing = sum(token != other for token, other in zip(tokens, expected, strict=True))
    assert differing <= 1, "float32 scores may differ at one edge"
    greedy = make_rows(1, 40, temperature=0.0, **penalties)
    set_penalty_history(greedy, 0, prompt, output)
    assert sample(logits[None], greedy, torch.zeros(1).long(), PENALISED).item() == scores.argmax()


def test_penalties_apply_to_greedy_rows() -> None:
    sampling = make_rows(1, 3, temperature=0.0, frequency=0.6)
    logits, tokens = torch.tensor([[2.0, 1.5, 1.0]]), []
    for position in range(6):
        token = sample(logits, sampling, torch.tensor([position]), PENALISED)
        count_tokens(sampling, torch.tensor([0]), token)
        tokens += token.tolist()
    assert tokens == [0, 1, 0, 2, 1, 0]


def test_the_prompt_counts_for_the_repetition_penalty_only() -> None:
    logits = torch.tensor([2.0, 1.9])
    for penalties, token in (({"presence": 2.0, "frequency": 2.0}, 0), ({"repetition": 1.2}, 1)):
        sampling = make_rows(1, 2, temperature=0.0, **penalties)
        set_penalty_history(sampling, 0, [0, 0, 0], [])
        assert sample(logits[None], sampling, torch.tensor([3]), PENALISED).item() == token


def test_counting_is_exact_and_changes_no_other_row() -> None:
    sampling = make_rows(6, 11)
    rows, expected = torch.tensor([4, 0, 2, 5, 5, 5]), [[0] * 11 for _ in range(5)]
    for step in range(100):
        tokens = torch.tensor([step % 11, step % 3, 7, step % 2, 3, 3])
        count_tokens(sampling, rows, tokens)
        for row, token in zip((4, 0, 2), tokens.tolist(), strict=False):
            expected[row][token] += 1
    assert sampling.output_counts[:5].tolist() == expected


def test_a_count_stays_at_its_limit() -> None:
    sampling = make_rows(2, 3)
    set_penalty_history(sampling, 0, [], [1] * (COUNT_LIMIT - 1))
    for _ in range(4):
        count_tokens(sampling, torch.tensor([0]), torch.tensor([1]))
    assert sampling.output_counts.tolist() == [[0, COUNT_LIMIT, 0], [0, 0, 0]]
    set_penalty_history(sampling, 0, [], [2] * (COUNT_LIMIT + 9))
    assert sampling.output_counts.tolist() == [[0, 0, COUNT_LIMIT], [0, 0, 0]]


def test_penalty_history_replaces_that_of_the_previous_sequence() -> None:
    sampling = make_rows(3, 5)
    set_penalty_history(sampling, 1, [0, 1], [2, 2, 4])
    set_penalty_history(sampling, 1, [4, 4], [0])
    assert sampling.output_counts.tolist() == [[0] * 5, [1, 0, 0, 0, 0], [0] * 5]
    assert sampling.in_prompt.tolist() == [[False] * 5, [False] * 4 + [True], [False] * 5]


# Log-probabilities, memory and operations


def test_logprobs_are_those_of_the_model() -> None:
    logits = random_logits(3, 90) * 4
    tokens = torch.tensor([5, 0, 89])
    result = logprobs(logits, tokens, 4)
    for row in range(3):
        total = math.log(sum(math.exp(value) for value in logits[row].tolist()))
        ranked = sorted(range(90), key=lambda token: -float(logits[row, token]))[:4]
        assert result.top_ids[row].tolist() == ranked
        assert result.top_logprobs[row].tolist() == pytest.approx([float(logits[row, t]) - total for t in ranked])
        assert result.chosen[row].item() == pytest.approx(float(logits[row, tokens[row]]) - total)
    assert (result.chosen.dtype, result.top_ids.dtype, result.top_logprobs.dtype) == (
        torch.float32, torch.int64, torch.float32,
    )  # fmt: skip


def test_the_first_of_the_logprobs_is_the_greedy_token_among_equal_logits() -> None:
    logits = torch.tensor([[-2.0, 0.0, 3.0, -0.0, 3.0, -7.0, 0.0, -2.0]]).bfloat16()
    assert logprobs(logits, torch.tensor([2]), 8).top_ids.tolist() == [[2, 4, 1, 3, 6, 0, 7, 5]]
    assert logprobs(logits, torch.tensor([2]), 1).top_ids.tolist() == [[2]]
    assert logprobs(-logits.abs() - 1, torch.tensor([2]), 2).top_ids.tolist() == [[1, 3]]


def test_logprobs_of_the_chosen_token_alone() -> None:
    result = logprobs(LOGITS[None], torch.tensor([3]), 0)
    assert result.chosen.tolist() == pytest.approx([math.log(0.3)])
    assert result.top_ids.shape == result.top_logprobs.shape == (1, 0)


@pytest.mark.parametrize("unusable", [NAN, INF, -INF])
def test_logprobs_of_unusable_logits_have_ids_in_range(unusable: float) -> None:
    logits = torch.full((2, 50), unusable)
    logits[1, :25] = 1.0
    ids = logprobs(logits, torch.tensor([1, 2]), 50).top_ids
    assert ids.sort(dim=-1).values.tolist() == [list(range(50))] * 2


def test_a_row_takes_three_bytes_for_each_vocabulary_entry_as_the_plan_predicts() -> None:
    sampling = make_sampling_rows(7, 90, MAX_LOGIT_BIASES, "cpu")
    nbytes = sum(getattr(sampling, field.name).nbytes for field in dataclasses.fields(sampling) if field.init)
    assert nbytes == 7 * (48 + SAMPLING_BYTES_PER_LOGIT * 90 + 512 * 20)


def test_new_rows_are_greedy_and_neutral() -> None:
    logits = random_logits(4, 80)
    tokens = sample(logits, make_sampling_rows(4, 80, MAX_LOGIT_BIASES, "cpu"), torch.arange(4), EVERYTHING)
    assert torch.equal(tokens, logits.argmax(dim=-1))


def everything(
    logits: Tensor, sampling: SamplingRows, rows: Tensor, positions: Tensor, backend: Backend = "reference"
) -> list[Tensor]:
    tokens = [
        sample(logits, sampling, positions, features, rows=indices, backend=backend)
        for features in (PLAIN, PENALISED, FILTERED, EVERYTHING)
        for indices in (None, rows)
    ]
    count_tokens(sampling, rows, tokens[0])
    return [*tokens, *logprobs(logits, tokens[0], 20, backend)]


def test_sampling_reads_no_value_on_the_host() -> None:
    """Fake tensors hold no values: `.item()`, a mask as an index or nonzero raises."""
    with FakeTensorMode():
        sampling = make_sampling_rows(5, 600, MAX_LOGIT_BIASES, "cpu")
        results = everything(torch.zeros(4, 600), sampling, torch.arange(4), torch.arange(4))
    assert [tuple(tensor.shape) for tensor in results] == [(4,)] * 9 + [(4, 20)] * 2


def test_unused_features_launch_no_operations() -> None:
    def operations(features: Features) -> set[str]:
        with torch.profiler.profile() as profile:
            sample(random_logits(4, 600), mixed_rows(600), torch.arange(4), features)
        return {event.name for event in profile.events()}

    assert "aten::sort" in operations(FILTERED)
    assert "aten::sort" not in operations(PLAIN) | operations(PENALISED)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_tokens_as_the_cpu() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits, positions = (random_logits(8, 128256) * 3).to(dtype), torch.arange(8)
        cpu_rows = mixed_rows(128256)
        gpu_rows = to_gpu(cpu_rows)
        for step in range(10):
            for features in (PLAIN, PENALISED, FILTERED, EVERYTHING):
                expected = sample(logits, cpu_rows, positions + step, features)
                on_gpu = (logits.cuda(), gpu_rows, (positions + step).cuda(), features)
                assert torch.equal(sample(*on_gpu).cpu(), expected)
                assert torch.equal(sample(*on_gpu, backend="triton").cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_captured_step_draws_the_same_tokens_as_an_eager_one(backend: Backend) -> None:
    sampling = to_gpu(mixed_rows(5000))
    logits, rows, positions = random_logits(8, 5000).cuda(), torch.arange(8).cuda(), torch.arange(8).cuda()
    everything(logits, sampling, rows, positions, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(logits, sampling, rows, positions, backend)
    for _ in range(3):
        logits.copy_(torch.randn_like(logits))
        positions += 1
        counts = sampling.output_counts.clone()
        graph.replay()
        sampling.output_counts.copy_(counts)
        for replayed, expected in zip(captured, everything(logits, sampling, rows, positions, backend), strict=True):
            assert torch.equal(replayed, expected)


# Masks


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.8}], ids=str)
def test_masked_rows_draw_as_if_the_masked_logits_were_minus_infinity(vocab_size: int, values: dict[str, Any]) -> None:
    """More rows than one pass samples. Every second row has a mask, packed bit by bit in a plain loop."""
    count = MAX_ROWS_PER_PASS + 7
    logits = random_logits(count, vocab_size)
    allowed = torch.rand(count, vocab_size, generator=torch.Generator().manual_seed(8)) < 0.3
    allowed[:, 0] |= ~allowed.any(dim=-1)
    allowed[::2] = True
    words = torch.full((count, -(-vocab_size // 32)), -1, dtype=torch.int32)
    expected = logits.clone()
    for row in range(1, count, 2):
        for word in range(words.shape[1]):
            bits = 0
            for bit in range(32):
                token = word * 32 + bit
                if token < vocab_size and allowed[row, token]:
                    bits |= 1 << bit
                elif token < vocab_size:
                    expected[row, token] = -INF
            words[row, word] = bits - 2**32 if bits >= 2**31 else bits
    features = Features(penalties=False, filters="top_k" in values)
    sampling, positions = make_rows(count, vocab_size, **values), torch.arange(count)
    tokens = sample(logits, sampling, positions, features._replace(masks=True), masks=words)
    assert tokens.tolist() == sample(expected, sampling, positions, features).tolist()
    assert allowed[torch.arange(count), tokens].all()


def test_a_mask_applies_after_biases_and_excludes_nan() -> None:
    logits = torch.tensor([[1.0, NAN, 3.0, 2.0]]).bfloat16()
    sampling = make_rows(1, 4, temperature=0.0)
    set_biases(sampling, 0, [(2, 100.0, 10**6)])
    masks = torch.tensor([[0b1001]], dtype=torch.int32)
    features = Features(penalties=False, filters=False, biases=True, masks=True)
    assert sample(logits, sampling, torch.tensor([5]), features, masks=masks).tolist() == [3]
