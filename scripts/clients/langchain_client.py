"""langchain-openai, with chat completions and with responses."""

from __future__ import annotations

from typing import Any, Literal

from checks import MODEL, QUESTION, URL, check, run_checks
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    ok: bool
    size: Literal["small", "large"]  # a tiny model never ends a number


@tool
def clock(utc: bool) -> str:
    """The time."""
    return "noon"


def model(**options: Any) -> ChatOpenAI:
    settings = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_tokens": 300, "max_retries": 0}
    return ChatOpenAI(**{**settings, "temperature": 0, **options})


def check_all(**options: Any) -> None:
    assert model(**options).invoke(QUESTION).text
    assert "".join(chunk.text for chunk in model(**options).stream(QUESTION))
    calling = model(**options).bind_tools([clock], tool_choice="required", parallel_tool_calls=False)
    message = calling.invoke(QUESTION)
    [call] = message.tool_calls
    assert isinstance(call["args"]["utc"], bool)
    result = ToolMessage("noon", tool_call_id=call["id"])
    assert model(**options).bind_tools([clock]).invoke([HumanMessage(QUESTION), message, result]).usage_metadata
    assert isinstance(model(**options).with_structured_output(Answer).invoke(QUESTION), Answer)


@check("chat, stream, tools, structured output")
def chat() -> None:
    check_all()


@check("responses")
def responses() -> None:
    check_all(use_responses_api=True)


run_checks()
