"""litellm, with its providers `openai` and `anthropic`."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be downloaded

import litellm  # noqa: E402 - the variable is set above
from checks import CLOCK_SCHEMA, LONG_TEXT, MODEL, QUESTION, URL, check, run_checks  # noqa: E402

litellm.suppress_debug_info = True
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_retries": 0}
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": CLOCK_SCHEMA}}]


@check("chat, stream")
def chat() -> None:
    for provider in (OPENAI, ANTHROPIC):
        assert litellm.completion(messages=MESSAGES, max_tokens=16, **provider).usage.completion_tokens
        chunks = litellm.completion(messages=MESSAGES, max_tokens=16, stream=True, **provider)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("tools")
def tools() -> None:
    for provider in (OPENAI, ANTHROPIC):
        options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}
        message = litellm.completion(messages=MESSAGES, **options, **provider).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["clock"]


@check("responses")
def responses() -> None:
    assert litellm.responses(input=QUESTION, max_output_tokens=16, **OPENAI).usage.output_tokens
    events = [event.type for event in litellm.responses(input=QUESTION, max_output_tokens=16, stream=True, **OPENAI)]
    assert "response.output_text.delta" in [str(getattr(event, "value", event)) for event in events]


@check("context fallback")
def context_fallback() -> None:
    """The fallback is another name for the same server, with a shorter prompt's room: only its use is checked."""
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": dict(OPENAI)},
            {"model_name": "large", "litellm_params": {**OPENAI, "mock_response": "from the fallback"}},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    response = router.completion(model="small", messages=[{"role": "user", "content": LONG_TEXT}])
    assert response.choices[0].message.content == "from the fallback"
    for provider in (OPENAI, ANTHROPIC):
        try:
            litellm.completion(messages=[{"role": "user", "content": LONG_TEXT}], max_tokens=8, **provider)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError("no ContextWindowExceededError")


run_checks()
