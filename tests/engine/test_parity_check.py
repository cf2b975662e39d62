"""The comparison of a bucket's logits with the reference, and the error of a bucket that fails it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.engine.check import parity_check
from tcdeploy.engine.check.parity import MAX_RATIO, compare_logits, outlier_rows, row_distances
from tcdeploy.engine.check.parity_check import ParityCheck, ParityChecker, raise_if_failed
from tcdeploy.errors import CompileError
from tcdeploy.planning.bucket_record import GreedyTokens, Parity
from tcdeploy.planning.plan import Bucket

BUCKET = Bucket("prefill", 512)
PRECISE = torch.tensor([[4.0, 1.0, 0.0], [0.0, 4.0, 1.0]])
NO_TOKENS = GreedyTokens("", (), ())
NO_ROWS = torch.empty(0, 2, dtype=torch.float64)


def shifted(difference: float) -> Tensor:
    """PRECISE with the least likely token of the first row changed."""
    return PRECISE + torch.tensor([[0.0, 0.0, difference], [0.0, 0.0, 0.0]])


def compare(difference: float, eager_difference: float, sampled_distances: Tensor = NO_ROWS, **changes: Any) -> Parity:
    dtypes = {"compute_dtype": "bfloat16", "reference_dtype": "float32", **changes}
    return compare_logits(
        shifted(difference), shifted(eager_difference), PRECISE, sampled_distances=sampled_distances, **dtypes
    )


def test_a_bucket_may_be_farther_from_higher_precision_than_eager_by_a_factor() -> None:
    assert compare(0.1, 0.1).passed
    assert compare(0.1 * MAX_RATIO * 0.99, 0.1).passed
    assert not compare(0.1 * MAX_RATIO * 1.01, 0.1).passed
    assert compare(0.1, 0.1).max_difference == pytest.approx(0.1)


def test_an_eager_computation_that_is_wrong_in_float32_is_no_yardstick() -> None:
    """Both sides are equally wrong."""
    in_float32 = {"compute_dtype": "float32", "reference_dtype": "float64"}
    assert compare(0.19, 0.19, **in_float32).passed
    assert not compare(0.21, 0.21, **in_float32).passed  # 5% of the largest logit
    assert compare(0.21, 0.21).passed, "in bfloat16 such differences are usual"


@pytest.mark.parametrize("lowest", [None, -math.inf])
@pytest.mark.parametrize("fault", [0.0, 0.21, 1e6])
def test_a_token_that_a_model_excludes_is_equal_in_all_dtypes(lowest: float | None, fault: float) -> None:
    """Its logit, -inf or the lowest value of the dtype, widens no limit. `fault`: the value of one logit."""

    def excluding(logits: Tensor, dtype: torch.dtype) -> Tensor:
        value = torch.finfo(dtype).min if lowest is None else lowest
        return torch.cat([logits.to(dtype), torch.full((2, 1), value, dtype=dtype)], dim=1)

    logits, eager = excluding(PRECISE, torch.float32), excluding(PRECISE, torch.float32)
    logits[0, 3 if fault == 1e6 else 2] = fault
    parity = compare_logits(logits, eager, excluding(PRECISE, torch.float64), "float32", "float64", NO_ROWS)
    assert parity.passed == (fault == 0)
    assert parity.max_difference_limit <= 0.05 * 4
    rows = outlier_rows(logits, eager, excluding(PRECISE, torch.float64), "float32", "float64", NO_ROWS)
    assert rows == (frozenset({0}) if fault else frozenset())


def test_the_kl_divergence_has_a_limit_of_its_own() -> None:
    eager = shifted(-0.5)  # less likely: a small divergence
    parity = compare_logits(shifted(0.7), eager, PRECISE, "bfloat16", "float32", NO_ROWS)
    assert parity.max_difference < parity.max_difference_limit and parity.kl > parity.kl_limit
    assert not parity.passed


def test_other_rows_widen_the_limit() -> None:
    assert not compare(0.4, 0.1).passed
    assert compare(0.4, 0.1, sampled_distances=row_distances(shifted(0.4), PRECISE)).passed


def test_an_eager_outlier_does_not_hide_a_fault_in_all_rows() -> None:
    """As with routed experts, where a rounding error selects another expert in a few rows."""
    eager_rows = torch.tensor([[2.0, 0.5]] + [[0.01, 1e-6]] * 30, dtype=torch.float64)
    everywhere = PRECISE + torch.tensor([[0.0, 0.0, 0.5], [0.5, 0.0, 0.0]])
    rows = [side.repeat(2, 1) for side in (everywhere, shifted(0.01), PRECISE)]
    parity = compare_logits(*rows, "bfloat16", "float32", eager_rows)
    assert parity.max_difference < parity.max_difference_limit and parity.kl < parity.kl_limit
    assert parity.median_kl > parity.median_kl_limit and not parity.passed


def test_the_median_of_few_rows_has_the_limit_of_the_largest() -> None:
    assert compare(0.1, 0.1).median_kl_limit == compare(0.1, 0.1).kl_limit


def test_with_an_fp8_cache_single_rows_of_float32_may_have_another_fp8_value() -> None:
    """0.1 is 2.5% of the largest logit. In 16 bits, the eager rows have such differences too."""
    in_float32 = {"compute_dtype": "float32", "reference_dtype": "float64"}
    assert not compare(0.1, 0.0, **in_float32).passed
    assert compare(0.1, 0.0, has_fp8_kv=True, **in_float32).passed
    assert not compare(0.13, 0.0, has_fp8_kv=True, **in_float32).passed
    assert compare(0.1, 0.0, has_fp8_kv=True) == compare(0.1, 0.0)
    everywhere = PRECISE + torch.tensor([[0.0, 0.0, 0.115], [0.115, 0.0, 0.0]])
    sides = [side.repeat(2, 1) for side in (everywhere, PRECISE, PRECISE)]
    parity = compare_logits(*sides, "float32", "float64", NO_ROWS, has_fp8_kv=True)
    assert parity.max_difference < parity.max_difference_limit and parity.kl < parity.kl_limit
    assert parity.median_kl > parity.median_kl_limit == 1e-4 and not parity.passed
    sides[0] = torch.cat([shifted(0.1), PRECISE])
    assert compare_logits(*sides, "float32", "float64", NO_ROWS, has_fp8_kv=True).passed


def outliers(difference: float, eager_difference: float = 0.1, eager_rows: Tensor = NO_ROWS) -> frozenset[int]:
    eager = shifted(eager_difference)
    return outlier_rows(shifted(difference), eager, PRECISE, "bfloat16", "float32", eager_rows)


def test_a_row_is_an_outlier_although_a_few_eager_rows_are_as_far_off() -> None:
    eager_rows = torch.tensor([[2.0, 0.5]] + [[0.1, 1e-3]] * 30, dtype=torch.float64)
    assert compare(1.0, 0.1, sampled_distances=eager_rows).passed
    assert outliers(1.0, eager_rows=eager_rows) == {0}
    assert outliers(0.1, eager_rows=eager_rows) == frozenset()
    assert outliers(1.0, eager_difference=1.0, eager_rows=eager_rows) == frozenset(), "eager has it in the same row"
    assert outliers(math.nan, eager_rows=eager_rows) == {0}


def make_checker(
    monkeypatch: pytest.MonkeyPatch, results: list[tuple[Parity, set[int]]], reference_changed: bool = False
) -> tuple[ParityChecker, list[int]]:
    """A checker whose comparisons have these results and outliers, and the numbers of the attempts it made."""
    checker: Any = object.__new__(ParityChecker)
    made: list[int] = []
    checker._runner, checker._is_stored = SimpleNamespace(filled_state="filled"), False
    checker._prompts_and_reference = lambda number: (number, None)
    checker._reference_changed = lambda: reference_changed

    def check(_: Any, __: Bucket, number: int, ___: None) -> ParityCheck:
        assert (checker._runner.filled_state is None) == bool(made), "a bucket may overwrite what is checked"
        made.append(number)
        parity, rows = results[number]
        return ParityCheck(parity, frozenset(rows), NO_TOKENS, NO_TOKENS)

    monkeypatch.setattr(parity_check, "_check", check)
    return checker, made


@pytest.mark.parametrize(
    ("attempts", "num_made", "passed", "num_outliers"),
    [
        ([(True, set())], 1, True, 0),
        ([(False, {1}), (True, set())], 2, True, 0),
        ([(False, {1}), (False, {2})], 2, False, 0),
        ([(True, {1}), (True, {2})], 2, True, 0),
        ([(True, {1, 2}), (True, {1}), (True, {0, 1}), (True, {0})], 4, True, 0),
        ([(True, {1, 2}), (True, {1}), (True, {0, 1}), (True, {1})], 4, False, 1),
        ([(False, {1}), (True, {1}), (True, {1}), (True, {1})], 4, False, 1),
    ],
)
def test_a_bucket_fails_on_two_sets_of_prompts_or_for_one_row_that_is_an_outlier_on_all(
    monkeypatch: pytest.MonkeyPatch,
    attempts: list[tuple[bool, set[int]]],
    num_made: int,
    passed: bool,
    num_outliers: int,
) -> None:
    results = [(replace(compare(0.1, 0.1), passed=passed), rows) for passed, rows in attempts]
    checker, made = make_checker(monkeypatch, results)
    parity = checker.check(BUCKET).parity
    assert parity.attempts == num_made
    assert (made, parity.passed, parity.outlier_rows) == (list(range(num_made)), passed, num_outliers)
    if num_outliers:
        with pytest.raises(CompileError, match="; rows that are outliers on 4 sets of prompts: 1$"):
            raise_if_failed(parity, BUCKET)


def test_a_failed_check_is_not_repeated_if_the_reference_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that has changed since would also be in the reference of the second set of prompts."""
    results: list[tuple[Parity, set[int]]] = [(compare(0.2, 0.1), set()), (compare(0.1, 0.1), set())]
    checker, made = make_checker(monkeypatch, results, reference_changed=True)
    parity = checker.check(BUCKET).parity
    assert (made, parity.passed, parity.reference_changed) == ([0], False, True)
    with pytest.raises(CompileError, match="the model have changed since the reference was computed$"):
        raise_if_failed(parity, BUCKET)
    checker, made = make_checker(monkeypatch, results)
    assert checker.check(BUCKET).parity.passed and made == [0, 1]


@pytest.mark.parametrize("difference", [math.nan, 10.0])
def test_a_check_is_not_repeated_after_more_than_a_rounding_error(
    difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, made = make_checker(monkeypatch, [(compare(difference, 0.1), {0}), (compare(0.1, 0.1), set())])
    assert not checker.check(BUCKET).parity.passed and made == [0]


def test_differences_of_the_last_bits_pass_even_if_eager_has_none() -> None:
    assert compare(0.01, 0.0).passed
    assert not compare(0.01, 0.0, compute_dtype="float32", reference_dtype="float64").passed


def test_without_a_higher_precision_the_tolerances_are_fixed() -> None:
    same = {"compute_dtype": "bfloat16", "reference_dtype": "bfloat16"}
    assert compare(0.3, 0.0, **same).passed
    assert not compare(0.5, 0.0, **same).passed


@pytest.mark.parametrize("side", [0, 1, 2])
def test_a_nan_on_any_side_fails_the_check(side: int) -> None:
    sides = [PRECISE.clone() for _ in range(3)]
    sides[side][1, 1] = math.nan
    assert not compare_logits(*sides, "bfloat16", "float32", NO_ROWS).passed


def test_the_error_names_the_bucket_the_figures_and_the_next_command() -> None:
    with pytest.raises(CompileError) as raised:
        raise_if_failed(compare(2.0, 0.1), BUCKET)
    assert raised.value.message.startswith(
        "prefill:512 failed its parity check: compiled logits differ from float32 by 2 and KL 0."
    )
    assert "transformers' eager logits by 0.1 and " in raised.value.message
    assert "(limits 0.15 and " in raised.value.message
    flags = "--programs jit --region blocks --mode default"
    assert raised.value.hint == f"find the part with {flags}, then --attention reference"


def test_a_passed_check_raises_nothing() -> None:
    raise_if_failed(compare(0.0, 0.0), BUCKET)
