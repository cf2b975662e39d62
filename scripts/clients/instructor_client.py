"""instructor: structured output through tools and through JSON schemas."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import MODEL, QUESTION, URL, check, run_checks
from pydantic import BaseModel


class Answer(BaseModel):
    ok: bool
    size: Literal["small", "large"]  # a tiny model never ends a number


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    messages = [{"role": "user", "content": QUESTION}]
    options = {"response_model": Answer, "max_tokens": 300, "max_retries": 0}
    assert isinstance(client.chat.completions.create(model=MODEL, messages=messages, **options), Answer)


@check("tools")
def tools() -> None:
    ask(instructor.Mode.TOOLS)


@check("structured output")
def structured_output() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


run_checks()
