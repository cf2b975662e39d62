"""Fields that would change the answer are refused by name; values that change nothing are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tcdeploy.server.messages_protocol import MESSAGES_INERT_VALUES
from tcdeploy.server.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from tcdeploy.server.request_parsing import parse
from tcdeploy.server.responses_protocol import RESPONSES_INERT_VALUES
from tcdeploy.server.unsupported_fields import (
    ALTERNATIVES,
    CONSTRAINT_INERT_VALUES,
    INERT_VALUES,
    OUR_NAMES,
    SWITCHES,
)
from tcdeploy.server.validation import check


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Hi", **fields}).encode())


def refusal(request: GenerationRequest) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as rejection:
        check(request)
    assert (rejection.value.status, rejection.value.code) == (400, "unsupported_parameter")
    return rejection.value.param, rejection.value.message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grammar", "root ::= [0-9]+", "grammar is not supported; use response_format or structured_outputs"),
        ("mirostat", 2, "mirostat is not supported"), ("mirostat_tau", 3.0, "mirostat_tau is not supported"),
        ("dry_multiplier", 0.8, "dry_multiplier is not supported"), ("dry_base", 2, "dry_base is not supported"),
        ("xtc_probability", 0.5, "xtc_probability is not supported"), ("typical_p", 0.9, "typical_p is not supported"),
        ("n_probs", 3, "n_probs is not supported; use logprobs"), ("samplers", ["top_k"], "samplers is not supported"),
        ("use_beam_search", True, "use_beam_search is not supported"), ("best_of", 2, "best_of is not supported"),
        ("length_penalty", 0.5, "length_penalty is not supported"), ("top_a", 0.1, "top_a is not supported"),
        ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag is not supported"),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "},
         "structured_outputs.whitespace_pattern is not supported"),
        ("structured_outputs", {"regex": "a", "lark": "a"}, "structured_outputs.lark is not supported"),
        ("guided_decoding_backend", "outlines", "guided_decoding_backend is not supported"),
        ("guided_whitespace_pattern", " ", "guided_whitespace_pattern is not supported"),
        ("structural_tag", "{}", "structural_tag is not supported"),
        ("n_predict", 5, "n_predict is not supported; use max_tokens"),
        ("repeat_penalty", 1.1, "repeat_penalty is not supported; use repetition_penalty"),
        ("enable_thinking", False, "enable_thinking is not supported; send it in chat_template_kwargs"),
        ("extra_body", {"top_k": 1}, "extra_body is not supported; send its fields beside the others"),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any, message: str) -> None:
    for make in (chat, completion):
        assert refusal(make(**{field: value})) == (field, message)


@pytest.mark.parametrize("make", [chat, completion])
def test_null_and_every_value_that_changes_nothing_are_accepted_and_others_are_not(make: Any) -> None:
    unknown = [name for name in INERT_VALUES if name not in make().__class__.model_fields]
    assert len(unknown) > 90
    for name in unknown:
        check(make(**{name: None}))
        for value in INERT_VALUES[name]:
            check(make(**{name: value}))
        assert refusal(make(**{name: {"another": "value"}}))[0] == name


def test_a_client_may_send_all_sliders_turned_off() -> None:
    check(
        completion(
            mirostat=0, mirostat_tau=3, mirostat_eta=1, dry_multiplier=0.0, dry_base=3, dry_allowed_length=9,
            dry_sequence_breakers=["a"], dry_penalty_last_n=64, xtc_probability=0, xtc_threshold=0.3,
            repeat_penalty=1.0, repeat_last_n=64, do_sample=False, temperature=0, dynatemp_range=0, dynatemp_exponent=2,
            typical_p=1.0, tfs_z=1, top_a=0, top_n_sigma=-1, use_beam_search=False, length_penalty=2.0, n_predict=7,
            max_new_tokens=7, max_tokens=7,
        )
    )  # fmt: skip
    assert refusal(completion(mirostat=1, mirostat_tau=3))[0] == "mirostat"
    assert refusal(completion(dry_base=3, dry_multiplier=0.5))[0] in ("dry_base", "dry_multiplier")
    assert refusal(completion(n_predict=8, max_tokens=7))[0] == "n_predict"
    check(chat(n_predict=8, max_completion_tokens=8))
    assert refusal(completion(do_sample=False))[0] == "do_sample"


def test_the_tables_agree_with_each_other_and_with_the_schemas() -> None:
    assert {*SWITCHES, *SWITCHES.values(), *OUR_NAMES} <= INERT_VALUES.keys()
    other_apis = {*CONSTRAINT_INERT_VALUES, "output_format"}
    assert ALTERNATIVES.keys() - other_apis <= INERT_VALUES.keys()
    assert (
        other_apis <= MESSAGES_INERT_VALUES.keys() and CONSTRAINT_INERT_VALUES.keys() <= RESPONSES_INERT_VALUES.keys()
    )
    assert CONSTRAINT_INERT_VALUES.keys() <= ChatRequest.model_fields.keys()
    supported = ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
    assert not supported & INERT_VALUES.keys(), "a supported field is listed as unsupported"
