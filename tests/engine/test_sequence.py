"""What sampling may be asked for, and when a sequence is finished."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from tcdeploy.engine.sequence import SamplingParams, Sequence
from tcdeploy.errors import UsageError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_new_tokens": 0}, "max new tokens is 0"),
        ({"max_new_tokens": -1}, "max new tokens is -1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": -INF}, "temperature is -inf"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": -0.5}, "top-p is -0.5"),
        ({"top_p": 1.0001}, "top-p is 1.0001"),
        ({"top_p": NAN}, "top-p is nan"),
        ({"top_p": INF}, "top-p is inf"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
    ],
)
def test_what_cannot_be_sampled_is_a_usage_error_that_names_it(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        SamplingParams(**asked)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_new_tokens": 1},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 0},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"seed": 0},
        {"seed": 2**63 - 1},
    ],
)
def test_what_stands_at_the_limits_can_be_sampled(asked: dict[str, Any]) -> None:
    params = SamplingParams(**asked)
    assert {name: getattr(params, name) for name in asked} == asked


def test_sampling_params_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def sequence(**asked: Any) -> Sequence:
    return Sequence(0, [5, 6, 7], 3, SamplingParams(**asked))


def test_a_sequence_counts_what_it_generated_after_its_prompt() -> None:
    found = sequence()
    assert (found.generated, found.finish_reason) == (0, "")
    found.append(8)
    assert (found.token_ids, found.generated, found.finish_reason) == ([5, 6, 7, 8], 1, "")


def test_a_sequence_ends_at_its_length() -> None:
    found = sequence(max_new_tokens=2)
    found.append(8)
    assert found.finish_reason == ""
    found.append(9)
    assert (found.finish_reason, found.generated) == ("length", 2)


def test_any_stop_token_ends_a_sequence_and_stays_in_it() -> None:
    found = sequence(stop_token_ids=(1, 2))
    found.append(8)
    found.append(2)
    assert (found.finish_reason, found.token_ids) == ("stop", [5, 6, 7, 8, 2])


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    found = sequence(max_new_tokens=1, stop_token_ids=(2,))
    found.append(2)
    assert found.finish_reason == "stop"


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    found = sequence(stop_token_ids=(7,))
    found.append(8)
    assert found.finish_reason == ""


def test_sequences_do_not_share_their_blocks() -> None:
    first, second = sequence(), sequence()
    first.blocks.append(1)
    assert second.blocks == []
