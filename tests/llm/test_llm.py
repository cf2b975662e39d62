"""`LLM`: answers to batches and chats are those of the engine, as text; errors and Ctrl-C leave it usable."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy import LLM, SamplingParams
from tcdeploy.errors import ModelError, RecipeError, SpaceError, UsageError
from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS, cli_environment
from tests.engine_loop import generate_tokens
from tests.fork_server import ForkServer

TEXT = "This module provides"
IDS = [40, 41, 42]
QUESTION = [{"role": "user", "content": "What is a list?"}]
PLAIN = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def leaves_the_engine_idle(llm: LLM) -> Iterator[None]:
    yield
    allocator = llm.engine.allocator
    assert (llm.engine.num_open_requests, allocator.num_allocatable) == (0, allocator.capacity)


def decode(llm: LLM, token_ids: list[int]) -> str:
    return str(llm.tokenizer.decode(token_ids, skip_special_tokens=True))


# Answers


def test_answers_have_the_tokens_of_the_engine_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [TEXT, IDS, "Return the", [7] * 200, TEXT]
    answers = llm.generate(prompts, PLAIN)
    all_ids = [llm.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in prompts]
    assert [answer.token_ids for answer in answers] == generate_tokens(llm.engine, all_ids, PLAIN)
    assert [answer.text for answer in answers] == [decode(llm, answer.token_ids) for answer in answers]
    assert [answer.prompt for answer in answers] == [TEXT, None, "Return the", None, TEXT]
    assert [answer.prompt_token_ids for answer in answers] == all_ids
    assert {(answer.finish_reason, answer.stop_reason) for answer in answers} == {("length", None)}


@pytest.mark.parametrize("prompt", [TEXT, IDS, [TEXT], [IDS], tuple(IDS)])
def test_one_prompt_in_any_form_gives_a_list_of_one_answer(llm: LLM, prompt: Any) -> None:
    [answer] = llm.generate(prompt, PLAIN)
    assert answer.prompt_token_ids == (IDS if answer.prompt is None else llm.tokenizer(TEXT).input_ids)
    assert llm.generate([], PLAIN) == []


def test_a_stop_string_ends_the_text_before_it_and_aborts_the_request(llm: LLM) -> None:
    [plain, other] = llm.generate([TEXT, IDS], PLAIN)
    stop = plain.text[20:23]
    assert plain.text.index(stop) == 20
    answers = llm.generate([TEXT, IDS], [dataclasses.replace(PLAIN, stop=["never", stop]), PLAIN])
    assert (answers[0].text, answers[0].finish_reason, answers[0].stop_reason) == (plain.text[:20], "stop", stop)
    assert answers[0].token_ids == plain.token_ids[: len(answers[0].token_ids)] != plain.token_ids
    assert answers[1] == other
    assert llm.generate(TEXT, dataclasses.replace(PLAIN, stop=stop))[0] == answers[0]


def test_text_that_is_held_back_for_a_stop_string_appears_if_the_answer_ends(llm: LLM) -> None:
    [plain] = llm.generate(TEXT, PLAIN)
    [answer] = llm.generate(TEXT, dataclasses.replace(PLAIN, stop=plain.text[-3:] + "!"))
    assert (answer.text, answer.finish_reason) == (plain.text, "length")


def test_the_models_end_of_sequence_ids_end_an_answer_unless_they_are_ignored(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200)
    [eos] = llm.deployment.planned.generation_defaults.stop_token_ids
    answer = llm.chat(QUESTION, params)
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", eos, eos)
    ignoring = llm.chat(QUESTION, dataclasses.replace(params, ignore_eos=True))
    assert ignoring.finish_reason == "length" and ignoring.token_ids[: len(answer.token_ids)] == answer.token_ids
    stop = answer.token_ids[4]
    stopped = llm.chat(QUESTION, dataclasses.replace(params, stop_token_ids=[stop]))
    assert stopped.stop_reason == stop and stopped.token_ids == answer.token_ids[: answer.token_ids.index(stop) + 1]


def test_logprobs_are_reported_for_each_token_and_for_the_prompt(llm: LLM) -> None:
    asking = dataclasses.replace(PLAIN, logprobs=2, prompt_logprobs=0)
    [plain], [answer] = llm.generate(IDS, PLAIN), llm.generate(IDS, asking)
    assert plain.logprobs is None and plain.prompt_logprobs is None
    assert answer.logprobs is not None and answer.prompt_logprobs is not None
    assert (len(answer.logprobs), len(answer.prompt_logprobs)) == (len(answer.token_ids), len(IDS) - 1)
    assert [entry.top[0][0] for entry in answer.logprobs] == answer.token_ids == plain.token_ids, "greedy"
    assert all(entry.chosen == entry.top[0][1] for entry in answer.logprobs)


def test_without_parameters_the_models_defaults_apply_and_the_length_is_cut_to_the_context(llm: LLM) -> None:
    assert llm.default_params == SamplingParams()
    context = llm.deployment.plan.context
    [short, long] = llm.generate([TEXT, [7] * (context - 5)])
    assert short.token_ids == llm.generate(TEXT, llm.default_params)[0].token_ids
    assert len(long.token_ids) == 5 and long.finish_reason == "length"


# Chats


def test_a_chat_is_rendered_with_the_models_template(llm: LLM) -> None:
    answer = llm.chat(QUESTION, PLAIN)
    rendered = llm.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert answer.prompt == rendered
    assert answer.prompt_token_ids == llm.tokenizer(rendered, add_special_tokens=False).input_ids
    assert answer.token_ids == llm.generate(answer.prompt_token_ids, PLAIN)[0].token_ids


def test_a_list_of_conversations_gives_a_list_of_answers(llm: LLM) -> None:
    conversations = [QUESTION, [*QUESTION, {"role": "assistant", "content": "A type."}, QUESTION[0]]]
    assert llm.chat(conversations, PLAIN) == [llm.chat(conversation, PLAIN) for conversation in conversations]


def test_the_chat_template_gets_further_variables(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ending }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    answer = llm.chat(QUESTION, PLAIN, chat_template_kwargs={"ending": " It"})
    assert answer.prompt == "What is a list? It"
    with pytest.raises(UsageError, match="cannot set messages"):
        llm.chat(QUESTION, PLAIN, chat_template_kwargs={"messages": []})
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="builtin:tiny has no chat template"):
        llm.chat(QUESTION, PLAIN)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"content": "Hi"}], r"messages\[0\] is .*must have a role"),
        ([*QUESTION, {"role": "user", "content": 3}], r"messages\[1\].content is 3; it must be a text"),
        ([QUESTION, [{"role": "user"}]], r"conversation 1: messages\[0\].content is None"),
        ([QUESTION, ["Hi"]], r"conversation 1: messages\[0\] is 'Hi'"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises((UsageError, ModelError), match=message):
        llm.chat(messages, PLAIN)


# Errors


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([IDS, []], "prompt 1: the prompt is empty"),
        ([IDS, [5] * 2000], "prompt 1: 2000 prompt tokens and 24 new tokens exceed the context"),
        ([5] * 2000, "^2000 prompt tokens"),
        ([IDS, [10**9]], "prompt 1: the prompt contains a value that is not a token id"),
        ([IDS, 3.5], r"prompt 1: a prompt is 3.5; it must be a text or a list of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named_and_no_other_is_generated(
    llm: LLM, prompts: Any, message: str
) -> None:
    steps = llm.engine.runner.step_counts.total()
    with pytest.raises((UsageError, SpaceError), match=message) as caught:
        llm.generate(prompts, PLAIN)
    assert caught.value.hint and llm.engine.runner.step_counts.total() == steps


def test_as_many_parameters_as_prompts_are_required(llm: LLM) -> None:
    with pytest.raises(UsageError, match="3 sampling parameters for 2 prompts"):
        llm.generate([TEXT, IDS], [PLAIN] * 3)


def test_arguments_of_another_type_are_errors(llm: LLM) -> None:
    with pytest.raises(UsageError, match="it must be a text, a list of token ids"):
        llm.generate(torch.tensor([3, 4]), PLAIN)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="it must be a SamplingParams"):
        llm.generate([TEXT], [{"max_tokens": 5}])  # type: ignore[list-item]
    for params in ({"max_tokens": 5}, 5, "x"):
        with pytest.raises(UsageError, match="it must be a SamplingParams, or a list"):
            llm.generate(TEXT, params)  # type: ignore[arg-type]
    for messages in (QUESTION[0], "hello"):
        with pytest.raises(UsageError, match="it must be a list of messages"):
            llm.chat(messages)  # type: ignore[call-overload]


def test_open_requests_of_another_loop_are_an_error_because_their_tokens_would_be_lost(llm: LLM) -> None:
    request_id = llm.engine.submit(IDS, PLAIN)
    with pytest.raises(UsageError, match="1 open requests of another loop"):
        llm.generate(TEXT, PLAIN)
    llm.engine.abort(request_id)
    assert len(llm.generate(TEXT, PLAIN)[0].token_ids) == 24


def test_an_unknown_field_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="LLM: unknown key 'batch_size'; the nearest is 'batch_sizes'"):
        LLM(TINY, batch_size=(1, 4))
    with pytest.raises(RecipeError, match="LLM: max_model_len is an option of vLLM") as refusal:
        LLM(TINY, max_model_len=100)
    assert refusal.value.hint == "use context"
    with pytest.raises(RecipeError, match="LLM: context is 'long', which is not a whole number"):
        LLM(TINY, context="long")


# Interrupts, threads, closing


def test_ctrl_c_aborts_the_batch_and_leaves_the_llm_usable(llm: LLM) -> None:
    """The signal comes while a step runs, as it nearly always does, and takes effect after it."""
    expected = llm.generate([TEXT, IDS], PLAIN)
    runner, num_steps = llm.engine.runner, 0
    run = runner.run

    def interrupted(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return run(*arguments)

    runner.run = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT, IDS, [7] * 30], PLAIN)
    finally:
        del runner.run
    assert num_steps == 5 and llm.engine.num_open_requests == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate([TEXT, IDS], PLAIN) == expected


def test_calls_from_two_threads_run_one_after_another(llm: LLM) -> None:
    expected = [llm.generate(prompt, PLAIN) for prompt in (TEXT, IDS)]
    barrier = threading.Barrier(2)

    def generate(prompt: Any) -> Any:
        barrier.wait()
        return [llm.generate(prompt, PLAIN) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(generate, (TEXT, IDS)))
    assert results == [[answers] * 3 for answers in expected]


CLOSE = """
import gc, weakref
from tcdeploy import LLM, SamplingParams
from tcdeploy.errors import UsageError

def parameter_of(llm):
    return weakref.ref(next(llm.engine.runner.model.parameters()))

first, second = (LLM("builtin:tiny", buckets={buckets}, batch_sizes=sizes, cache_dir={cache!r}) for sizes in {sizes})
expected = [first.generate([40, 41, 42])[0].text, second.generate([40, 41, 42])[0].text]
parameters = parameter_of(first), parameter_of(second)
with first:
    pass
assert parameters[0]() is None, "the weights are freed"
assert second.generate([40, 41, 42])[0].text == expected[1], "another LLM is not affected"
for use in (lambda: first.generate("a"), lambda: first.engine, lambda: first.chat([])):
    try:
        use()
    except UsageError as error:
        assert error.message == "this LLM is closed" and error.hint
    else:
        raise AssertionError("a closed LLM was used")
first.close()
second.close()
assert parameters[1]() is None
"""


def test_a_closed_llm_frees_its_memory_and_affects_no_other(
    fork_server: ForkServer, filled_cache: Path, tmp_path: Path
) -> None:
    cache = str(shutil.copytree(filled_cache, tmp_path / "cache"))
    script = CLOSE.format(buckets=TINY_BUCKETS, sizes=(TINY_BATCH_SIZES, TINY_BATCH_SIZES), cache=cache)
    done = fork_server.run(environ=cli_environment(tmp_path), script=script)
    assert done.returncode == 0, done.stderr
