"""pydantic-ai: an agent with a tool, and structured output."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, QUESTION, URL, check, run_checks
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
SETTINGS = {"max_tokens": 300, "temperature": 0}


class Answer(BaseModel):
    ok: bool
    size: Literal["small", "large"]  # a tiny model never ends a number


@check("chat")
def chat() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output


@check("structured output")
def structured_output() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=NativeOutput(Answer), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Answer)


@check("tools")
def tools() -> None:
    """Structured output through a call that the server forces."""
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=Answer, model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Answer)


@check("responses")
def responses() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output


run_checks()
