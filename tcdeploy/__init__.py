"""Compiles and serves Hugging Face causal LMs with torch.compile, in plain PyTorch.

As a library:

    from tcdeploy import LLM, SamplingParams

    with LLM("builtin:tiny") as llm:
        for answer in llm.generate(["This module", "Return the"], SamplingParams(max_tokens=16)):
            print(answer.text)

`AsyncLLM` streams answers within an event loop. `prepare` and `Engine` are the parts below them, for a loop of your
own. docs/library.md in the repository has complete programs. The names below are imported lazily, so that
`tcdeploy --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tcdeploy.engine.engine import Engine
    from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams, TokenLogprobs
    from tcdeploy.errors import TcdeployError
    from tcdeploy.llm.async_llm import AnswerStream, AsyncLLM
    from tcdeploy.llm.llm import LLM
    from tcdeploy.llm.outputs import Answer, AnswerPiece
    from tcdeploy.planning.recipe import Recipe
    from tcdeploy.start.deployment import Deployment
    from tcdeploy.start.prepare import prepare

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "Answer",
    "AnswerPiece",
    "AnswerStream",
    "AsyncLLM",
    "Deployment",
    "Engine",
    "NewToken",
    "Recipe",
    "SamplingParams",
    "TcdeployError",
    "TokenLogprobs",
    "prepare",
]

LAZY_EXPORTS = {
    "LLM": "tcdeploy.llm.llm",
    "Answer": "tcdeploy.llm.outputs",
    "AnswerPiece": "tcdeploy.llm.outputs",
    "AnswerStream": "tcdeploy.llm.async_llm",
    "AsyncLLM": "tcdeploy.llm.async_llm",
    "Deployment": "tcdeploy.start.deployment",
    "Engine": "tcdeploy.engine.engine",
    "NewToken": "tcdeploy.engine.schedule.sequence",
    "Recipe": "tcdeploy.planning.recipe",
    "SamplingParams": "tcdeploy.engine.schedule.sequence",
    "TcdeployError": "tcdeploy.errors",
    "TokenLogprobs": "tcdeploy.engine.schedule.sequence",
    "prepare": "tcdeploy.start.prepare",
}


if not TYPE_CHECKING:  # a type checker would take every name for one of this package

    def __getattr__(name: str) -> object:
        if name not in LAZY_EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(LAZY_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
