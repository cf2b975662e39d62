"""openai-agents: an agent with a tool, and with an output type, by chat completions and by responses."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, QUESTION, URL, check, run_checks
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


@function_tool
def clock(utc: bool) -> str:
    """The time."""
    return "noon"


def run(model_type: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> None:
    """The first turn must call the tool; its result is the output."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="clock", tools=[clock], model=model_type(MODEL, client), tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(max_tokens=200, temperature=0, tool_choice="required", parallel_tool_calls=False),
    )  # fmt: skip
    assert Runner.run_sync(agent, QUESTION).final_output == "noon"


class Answer(BaseModel):
    is_list: bool


def run_with_output_type(model_type: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> None:
    """Every turn has tools and a format. The first turn must call the tool; the last one gives the typed output."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="clock", tools=[clock], model=model_type(MODEL, client), output_type=Answer,
        model_settings=ModelSettings(max_tokens=200, temperature=0, tool_choice="required", parallel_tool_calls=False),
    )  # fmt: skip
    result = Runner.run_sync(agent, QUESTION, max_turns=8)
    assert isinstance(result.final_output, Answer)
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item"


@check("chat, tools and output type")
def chat_with_output_type() -> None:
    run_with_output_type(OpenAIChatCompletionsModel)


@check("responses, tools and output type")
def responses_with_output_type() -> None:
    run_with_output_type(OpenAIResponsesModel)


@check("chat, tools")
def chat() -> None:
    run(OpenAIChatCompletionsModel)


@check("responses, tools")
def responses() -> None:
    run(OpenAIResponsesModel)


run_checks()
