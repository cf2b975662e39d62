"""The sampling kernels draw the tokens of the reference, for every combination of features and any logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.engine.schedule.sequence import MAX_LOGIT_BIASES, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import new_row
from tcdeploy.engine.step.rows import row_use
from tcdeploy.engine.step.sampling import logprobs, sample, set_biases, set_penalty_history
from tcdeploy.kernels.sampling import filter_kernels, sample_triton
from tcdeploy.kernels.sampling.rows import Features, SamplingRows, make_sampling_rows
from tests.triton_tools import record_launches, specialization_key

tl = pytest.importorskip("triton.language")
NAN, INF = float("nan"), float("inf")
PLAIN, FILTERED = Features(penalties=False, filters=False), Features(penalties=False, filters=True)


def make_rows(rows: int, vocab_size: int, **values: Any) -> SamplingRows:
    """Rows with temperature 1, a seed each, and `values`: one value for all rows, or one per row."""
    sampling = make_sampling_rows(rows, vocab_size, MAX_LOGIT_BIASES, "cpu")
    for name, value in {"temperature": 1.0, "seeds": range(rows), **values}.items():
        field = getattr(sampling, name)
        field.copy_(torch.as_tensor(value, dtype=field.dtype))
    return sampling


def move(sampling: SamplingRows, device: str) -> SamplingRows:
    stored = [field.name for field in dataclasses.fields(sampling) if field.init]
    return SamplingRows(**{name: getattr(sampling, name).to(device) for name in stored})


def random_logits(rows: int, vocab_size: int, scale: float = 2.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    return logits.to(dtype)


def check(
    device: str, logits: Tensor, sampling: SamplingRows, features: Features, masks: Tensor | None = None
) -> list[int]:
    """Assert that the kernels give the tokens of the reference on the CPU, and return them."""
    size = len(logits)
    rows = torch.arange(size).flip(0)  # the rows' parameters are not in the order of the logits
    positions = torch.arange(size) * 3 + 5
    expected = sample(logits, sampling, positions, features, rows, masks)
    on_device = move(sampling, device)
    masks = masks if masks is None else masks.to(device)
    tokens = sample(
        logits.to(device), on_device, positions.to(device), features, rows.to(device), masks, backend="triton"
    )
    assert tokens.tolist() == expected.tolist()
    return expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 2047, 2048, 2049, 5000])
def test_draws_without_filters(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    temperature = [1.0, 0.0, 0.3, 7.0, 1e-3, 1e-42, 1e30, 0.7]
    tokens = check(
        device, random_logits(8, vocab_size, dtype=dtype), make_rows(8, vocab_size, temperature=temperature), PLAIN
    )
    assert vocab_size < 100 or len(set(tokens)) > 4


FILTERS: dict[str, list[float]] = {
    "top_k": [20, 0, 0, 0, 1, 3, 400, 4099, 10**9, 50, 0, 2],
    "top_p": [0.8, 0.9, 0.5, 1e-9, 1.0, 0.95, 0.99, 0.999999, 0.7, 1.0, 1.0, 0.0],
    "min_p": [0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.05, 0.0],
    "temperature": [0.7, 1.0, 1.5, 1.0, 1.0, 0.1, 3.0, 1.0, 100.0, 0.0, 1.0, 1.0],
}


@pytest.mark.parametrize(("vocab_size", "scale"), [(3, 3.0), (2100, 0.01), (4100, 3.0)])
def test_filters(device: str, vocab_size: int, scale: float) -> None:
    check(device, random_logits(12, vocab_size, scale), make_rows(12, vocab_size, **FILTERS), FILTERED)


def test_equal_logits_at_the_limit_of_a_filter(device: str) -> None:
    """A bracket of one score cannot be divided by scores: the id decides."""
    sampling = make_rows(12, 700, **FILTERS)
    tokens = check(device, random_logits(12, 700, 1.0).round(), sampling, FILTERED)
    check(device, torch.zeros(12, 700), sampling, FILTERED)
    assert len(set(tokens)) > 6


def test_brackets_that_hold_more_tokens_than_are_listed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CAPACITY": 16, "FEW": 8, "COLUMNS": 4}.items():
        monkeypatch.setattr(sample_triton, name, value)
    check(device, random_logits(12, 300).round(decimals=1), make_rows(12, 300, **FILTERS), FILTERED)


def test_lists_that_are_searched_bit_by_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_triton, "FEW", 4)
    monkeypatch.setattr(sample_triton, "COLUMNS", 2)
    for scale in (0.01, 4.0):
        check(device, random_logits(12, 300, scale), make_rows(12, 300, **FILTERS), FILTERED)


def test_approximate_sums_that_are_wrong_are_not_used(device: str) -> None:
    """Of a temperature whose scale is infinite in float32."""
    sampling = make_rows(4, 300, temperature=1e-40, top_p=0.5, top_k=[0, 299, 0, 270], seeds=range(8, 12))
    check(device, random_logits(4, 300).round(), sampling, FILTERED)


@pytest.mark.parametrize("margin", [-0.9, 0.9])
def test_sums_beyond_their_margin_do_not_change_a_limit(
    device: str, monkeypatch: pytest.MonkeyPatch, margin: float
) -> None:
    """A negative margin excludes the limit from the bracket."""
    if device == "cuda":
        pytest.skip("a compiled kernel does not read the changed constant")
    monkeypatch.setattr(filter_kernels, "MARGIN", tl.constexpr(margin))
    logits = random_logits(4, 300, 0.5)
    logits[0], logits[0, 7] = -1.0, 0.0  # excludes it at the lower end alone
    sampling = make_rows(4, 300, top_p=[0.3, 0.5, 0.8, 0.05], top_k=[0, 0, 270, 0])
    check(device, logits, sampling, FILTERED)


def test_exactly_the_kept_tokens_are_drawn(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p at the edge between two tokens, and a large top-k of one token more than a pivot of its search counts."""
    for top_k in (0, 4):
        zeros = torch.tensor([0.0, -0.0] * 3).expand(8, 6).contiguous()
        kept = check(device, zeros, make_rows(8, 6, top_p=0.5, top_k=top_k, min_p=1.0), FILTERED)
        assert set(kept) == set(range((top_k or 6) // 2))
    monkeypatch.setattr(sample_triton, "LISTED_K", 8)
    logits = torch.where(torch.arange(60) < 19, 0.0, -0.3).expand(6, 60).contiguous()
    sampling = make_rows(6, 60, top_k=[19, 20, 20, 20, 20, 21], temperature=1e30)
    check(device, logits, sampling, FILTERED._replace(small_top_k=False))


def test_a_batch_launches_the_kernels_of_its_top_k_and_top_p(device: str) -> None:
    """A top-k of the whole vocabulary keeps all, but `Features` do not know the vocabulary."""
    for top_k in (255, 256, 257):
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=0.5)
        features = row_use(new_row(Sequence(0, [1], 1, params))).features
        assert features
        check(device, random_logits(4, 256), make_rows(4, 256, top_k=top_k, top_p=0.5), features)


def test_penalties_biases_and_masks_change_only_their_rows(device: str) -> None:
    vocab_size, size = 2500, 8
    sampling = make_rows(
        size, vocab_size, temperature=[1, 0, 1, 1, 0.7, 0, 1, 1], top_k=[0, 0, 20, 0, 0, 0, 5, 0],
        top_p=[1, 1, 1, 1, 0.9, 1, 0.5, 1], repetition=[1.0, 1.3, 1.0, 1.2, 1.0, 1.0, 1.0, 0.8],
        presence=[0.0, 0.0, 1.5, 0.1, 0.0, 0.0, 0.0, -0.5], frequency=[0.0, 0.4, 0.0, -0.2, 0.0, 0.0, 0.0, 0.0],
        changes_logits=[False, True, True, True, True, True, True, True],
    )  # fmt: skip
    for row in range(size):
        ids = torch.randint(vocab_size, (400,), generator=torch.Generator().manual_seed(row)).tolist()
        set_penalty_history(sampling, row, ids[:100], ids[100:])
    set_biases(sampling, 4, [(7, 100.0, 14), (8, -100.0, 2**62), (2047, 9.5, 2**62), (2047, 1.0, 2**62)])
    set_biases(sampling, 5, [(2499, 90.0, 2**62), (0, -INF, 2**62)])
    masks = torch.full((size, -(-vocab_size // 32)), -1, dtype=torch.int32)
    masks[1], masks[2, 40] = 0, 5  # rows 6 and 5 of the parameters
    masks[1, 3] = 0x55
    logits = random_logits(size, vocab_size)
    everything = Features(penalties=True, filters=True, biases=True, masks=True)
    tokens = check(device, logits, sampling, everything, masks)
    assert tokens[1] in {96, 98, 100, 102}
    assert tokens[2] == 2499
    sampling.changes_logits.zero_()
    assert check(device, logits, sampling, FILTERED)[7] == tokens[7]  # of row 0, which changes nothing
    sampling.changes_logits[1:] = 1
    for features in (Features(True, False), Features(False, False, biases=True), Features(True, True, True)):
        check(device, logits, sampling, features)


def test_top_k_above_the_number_of_allowed_tokens(device: str) -> None:
    """Masked tokens are not listed, or a constrained row would be searched as a whole."""
    sampling = make_rows(12, 2100, top_k=[20, 256, 400] * 4, top_p=[1.0, 0.1, 0.7, 0.7] * 3, changes_logits=True)
    masks = torch.zeros(12, -(-2100 // 32), dtype=torch.int32)
    masks[:, 3], masks[:, 65] = 0x5555, 7
    features = Features(penalties=False, filters=True, masks=True)
    tokens = check(device, random_logits(12, 2100), sampling, features, masks)
    assert set(tokens) <= {*range(96, 112, 2), 2080, 2081, 2082}


@pytest.mark.parametrize("features", [PLAIN, Features(True, True)], ids=str)
def test_unusable_logits_give_the_first_maximum(device: str, features: Features) -> None:
    logits = random_logits(12, 2600, dtype=torch.float32)
    logits[1] = -INF
    logits[2] = NAN
    logits[3, 2500] = -NAN
    logits[4, 300] = INF
    logits[5] = INF
    logits[6, :2599] = -INF
    logits[7, 10:] = -INF
    logits[8, 5] = 3e38
    logits[9, 100:] = -3e38
    sampling = make_rows(12, 2600, **FILTERS, changes_logits=True)
    sampling.temperature[2] = 0.0
    tokens = check(device, logits, sampling, features)
    assert tokens[1:7] == [0, 0, 2500, 300, 0, 2599]


def test_each_kernel_has_one_binary_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a request would compile: warm-up launches each kernel once."""
    launches = record_launches(monkeypatch)
    keys = []
    for rows in (1, 2, 16, 33):
        logits, tokens = torch.zeros(rows, 4000, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
        masks = torch.zeros(rows, 125, dtype=torch.int32)
        for features in (Features(True, True, True, True), PLAIN, Features(False, True, True)):
            launches.clear()
            words = masks if features.masks else None
            sample(logits, make_rows(rows, 4000), tokens, features, tokens, words, tokens, "triton")
            logprobs(logits, tokens, rows % 5, "triton")
            keys += [specialization_key(launch) for launch in launches]
    assert len({name for name, _ in keys}) == len(set(keys)) == 12


def test_rows_of_a_batch_draw_the_tokens_that_they_draw_alone(device: str) -> None:
    logits, sampling = random_logits(12, 700), make_rows(12, 700, **FILTERS)
    logits, sampling = logits.to(device), move(sampling, device)
    positions = torch.arange(12, device=device)
    together = sample(logits, sampling, positions, FILTERED, backend="triton")
    for row in (0, 1, 7, 9):
        index = torch.tensor([row], device=device)
        alone = sample(logits[index], sampling, positions[index], FILTERED, index, backend="triton")
        assert alone.tolist() == together[index].tolist()
