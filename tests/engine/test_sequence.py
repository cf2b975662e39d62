"""Validation of sampling parameters, and when a sequence finishes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy
import pytest

from tcdeploy.engine.schedule.sequence import SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import new_row
from tcdeploy.engine.step.rows import row_use
from tcdeploy.errors import UsageError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": -INF}, "temperature is -inf"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_p": -0.1}, "top-p is -0.1"),
        ({"top_p": -0.5}, "top-p is -0.5"),
        ({"top_p": 1.0001}, "top-p is 1.0001"),
        ({"top_p": NAN}, "top-p is nan"),
        ({"top_p": INF}, "top-p is inf"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"top_k": 2**31}, "top-k is 2147483648"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"min_p": -0.1}, "min-p is -0.1"),
        ({"min_p": 1.0}, "min-p is 1.0"),
        ({"min_p": NAN}, "min-p is nan"),
        ({"repetition_penalty": 0.0}, "repetition penalty is 0.0"),
        ({"repetition_penalty": -1.0}, "repetition penalty is -1.0"),
        ({"repetition_penalty": INF}, "repetition penalty is inf"),
        ({"repetition_penalty": NAN}, "repetition penalty is nan"),
        ({"presence_penalty": 2.01}, "presence penalty is 2.01"),
        ({"presence_penalty": -2.01}, "presence penalty is -2.01"),
        ({"presence_penalty": NAN}, "presence penalty is nan"),
        ({"frequency_penalty": 2.01}, "frequency penalty is 2.01"),
        ({"frequency_penalty": -2.01}, "frequency penalty is -2.01"),
        ({"frequency_penalty": -INF}, "frequency penalty is -inf"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"stop_token_ids": {2}}, r"stop_token_ids is \{2\}"),
        ({"stop_token_ids": "2"}, "stop_token_ids is '2'"),
        ({"stop": ["a", ""]}, r"stop is \['a', ''\]"),
        ({"stop": [3]}, r"stop is \[3\]"),
        ({"stop": None}, "stop is None"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"stop_token_ids": (2, "3")}, "a stop token id is '3'"),
        ({"stop_token_ids": (2, -1)}, "a stop token id is -1"),
        ({"stop_token_ids": (2, True)}, "a stop token id is True"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        SamplingParams(**changes)
    assert caught.value.exit_code == 2
    assert "must be" in caught.value.message and caught.value.hint


WHOLE = ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "min_tokens")
STRUCTURED = ("stop", "stop_token_ids", "ignore_eos", "logit_bias", "constraint")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", WHOLE + NUMBERS)
@pytest.mark.parametrize("value", ["1", b"1", True, [1], numpy.ones(2), 1j, NAN, INF, -INF])
def test_a_value_that_is_not_a_number_is_a_usage_error(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match="must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_is_a_whole_number(name: str) -> None:
    with pytest.raises(UsageError, match="a whole number"):
        SamplingParams(**{name: 1.0})


def test_a_copy_with_another_seed_is_equal_otherwise_and_checks_the_seed() -> None:
    params = SamplingParams(temperature=0.5, logit_bias=((3, -1.0),))
    assert params.with_seed(5) == replace(params, seed=5) and params.seed is None
    with pytest.raises(UsageError, match="seed"):
        params.with_seed(2**64)


@pytest.mark.parametrize("name", ["max_tokens", "top_k", *NUMBERS, "stop_token_ids"])
def test_none_is_valid_only_for_seed_and_logprobs(name: str) -> None:
    with pytest.raises(UsageError, match="None"):
        SamplingParams(**{name: None})
    assert SamplingParams(seed=None, logprobs=None) == SamplingParams()


def test_stop_may_be_one_text_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[2, 3])
    assert (params.stop, params.stop_token_ids) == (("end",), (2, 3))
    assert params == SamplingParams(stop=["end"], stop_token_ids=(2, 3)) and hash(params)


def test_every_parameter_is_checked() -> None:
    assert {field.name for field in fields(SamplingParams)} == {*WHOLE, *NUMBERS, *STRUCTURED}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_tokens": 1},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 0},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"top_k": 2**31 - 1},
        {"temperature": 1},
        {"min_p": 0.0},
        {"min_p": 0.999},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop_token_ids": (0, 2)},
    ],
)
def test_values_at_the_limits_are_valid(changes: dict[str, Any]) -> None:
    params = SamplingParams(**changes)
    assert {name: getattr(params, name) for name in changes} == changes


def test_sampling_params_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "greedy", "penalties"),
    [
        ({}, True, False),
        ({"temperature": 0.5}, False, False),
        ({"top_k": 1}, True, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"repetition_penalty": 0.9}, True, True),
        ({"presence_penalty": 0.1}, True, True),
        ({"frequency_penalty": -0.1}, True, True),
    ],
)
def test_params_report_which_features_of_sampling_they_use(
    changes: dict[str, Any], greedy: bool, penalties: bool
) -> None:
    params = SamplingParams(**changes)
    assert (params.is_greedy, params.has_penalties) == (greedy, penalties)


@pytest.mark.parametrize(
    ("changes", "filters"), [({}, False), ({"top_k": 1}, True), ({"top_p": 0.99}, True), ({"min_p": 0.01}, True)]
)
def test_rows_use_filters_if_their_params_do(changes: dict[str, Any], filters: bool) -> None:
    features = row_use(new_row(sequence(temperature=1.0, **changes))).features
    assert features is not None and features.filters == filters


def sequence(**changes: Any) -> Sequence:
    return Sequence(0, [5, 6, 7], 3, SamplingParams(**changes))


def test_new_tokens_are_counted_without_the_prompt() -> None:
    request = sequence()
    assert (request.num_output_tokens, request.finish_reason) == (0, "")
    request.append(8)
    assert (request.token_ids, request.num_output_tokens, request.finish_reason) == ([5, 6, 7, 8], 1, "")


def test_a_sequence_ends_at_max_tokens() -> None:
    request = sequence(max_tokens=2)
    request.append(8)
    assert request.finish_reason == ""
    request.append(9)
    assert (request.finish_reason, request.num_output_tokens) == ("length", 2)


def test_any_stop_token_ends_a_sequence_and_stays_in_it() -> None:
    request = sequence(stop_token_ids=(1, 2))
    request.append(8)
    request.append(2)
    assert (request.finish_reason, request.token_ids) == ("stop", [5, 6, 7, 8, 2])


def test_a_stop_token_in_the_last_position_gives_reason_stop() -> None:
    request = sequence(max_tokens=1, stop_token_ids=(2,))
    request.append(2)
    assert request.finish_reason == "stop"


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    request = sequence(stop_token_ids=(7,))
    request.append(8)
    assert request.finish_reason == ""


def test_sequences_do_not_share_their_blocks() -> None:
    first, second = sequence(), sequence()
    first.blocks.append(1)
    assert second.blocks == []


def test_tokens_in_flight_count_for_the_length_and_against_the_limit_but_are_not_generated_yet() -> None:
    request = sequence(max_tokens=2)
    request.num_in_flight = 1
    assert (request.length, request.num_output_tokens, request.has_sampled_last_token) == (4, 0, False)
    request.num_in_flight = 2
    assert (request.length, request.num_output_tokens, request.has_sampled_last_token) == (5, 0, True)


def test_a_received_token_is_no_longer_in_flight() -> None:
    request = sequence(max_tokens=2)
    request.num_in_flight = 2
    request.receive(8)
    assert (request.token_ids, request.num_in_flight, request.length, request.has_sampled_last_token) == (
        [5, 6, 7, 8],
        1,
        5,
        True,
    )
    request.receive(9)
    assert (request.num_in_flight, request.length, request.finish_reason) == (0, 5, "length")


def test_a_token_that_is_not_in_flight_cannot_be_received() -> None:
    with pytest.raises(AssertionError):
        sequence().receive(8)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_no_token_is_received_after_the_end(reason: str) -> None:
    request = sequence()
    request.num_in_flight, request.finish_reason = 1, reason
    with pytest.raises(AssertionError):
        request.receive(8)
    assert request.token_ids == [5, 6, 7]
