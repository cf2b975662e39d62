"""Encodes prompts and completes sampling parameters, for `LLM`, `AsyncLLM` and `tcdeploy generate`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import UsageError
from tcdeploy.host.progress import NullProgress, Progress
from tcdeploy.llm.outputs import Request
from tcdeploy.text.chat_template import reserved_names
from tcdeploy.text.conversation import render_conversation

if TYPE_CHECKING:  # imports torch
    from tcdeploy.start.deployment import Deployment

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]  # in OpenAI's format: {"role": "user", "content": "..."}


class EncodedPrompt(NamedTuple):
    text: str | None  # None if the prompt was given as token ids
    token_ids: list[int]


class LoadedModel:
    """Owns the deployment. Its methods raise UsageError or ModelError for a prompt that cannot be used."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.tokenizer = deployment, deployment.tokenizer

    @property
    def defaults(self) -> GenerationDefaults:
        return self.deployment.planned.generation_defaults

    @property
    def default_params(self) -> SamplingParams:
        """The model's defaults. For a request without parameters, `request` also cuts their length to the context."""
        return self.defaults.params_of_request({}, self.deployment.plan.context)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """A text gets the tokenizer's special tokens, such as BOS. Token ids are checked by the engine."""
        if isinstance(prompt, str):
            return EncodedPrompt(prompt, list(self.tokenizer(prompt).input_ids))
        if isinstance(prompt, Sequence):
            return EncodedPrompt(None, list(cast("Sequence[int]", prompt)))
        problem = f"a prompt is {prompt!r:.80}; it must be a text or a list of token ids"
        raise UsageError(problem, 'generate("Once upon a time")')

    def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> EncodedPrompt:
        """The prompt of a conversation, after which the model answers. `variables`: further ones of its template.

        Blocks until the template is rendered, in another process.
        """
        conversation = [_check_message(number, message) for number, message in enumerate(messages)]
        if not conversation:
            raise UsageError("messages is empty", '[{"role": "user", "content": "Hello"}]')
        if not self.tokenizer.chat_template:
            problem = f"{self.deployment.plan.model} has no chat template"
            raise UsageError(problem, "pass the text to `generate`; on the command line, omit --chat")
        if conflicts := sorted(reserved_names(self.tokenizer) & variables.keys()):
            raise UsageError(f"chat_template_kwargs cannot set {conflicts[0]}", "remove it")
        text = render_conversation(self.tokenizer, conversation, {"add_generation_prompt": True, **variables})
        return EncodedPrompt(text, list(self.tokenizer(text, add_special_tokens=False).input_ids))

    def request(
        self, prompt: EncodedPrompt, params: SamplingParams | None, given: Mapping[str, Any] | None = None
    ) -> Request:
        """With `params` None: the model's defaults, except for the parameters in `given`."""
        if params is None:
            limit = self.deployment.plan.context - len(prompt.token_ids)
            params = self.defaults.params_of_request(given or {}, limit)
        return Request(prompt.text, prompt.token_ids, self._with_stop_tokens(params))

    @functools.cached_property
    def _with_stop_tokens(self) -> Any:
        """`with_stop_tokens`, cached: a batch shares few SamplingParams, and checking 512 logit biases takes 0.5 ms."""
        return functools.lru_cache(maxsize=16)(self.defaults.with_stop_tokens)


def progress_of_start(progress: Progress | bool) -> Progress | None:
    """What to pass to `prepare`. True: its default, lines if stderr is a terminal."""
    if isinstance(progress, bool):
        return None if progress else NullProgress()
    return progress


def _check_message(number: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        problem = f"messages[{number}] is {message!r:.80}; it must have a role"
        raise UsageError(problem, '{"role": "user", "content": "Hello"}')
    content = message.get("content")
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise UsageError(f"messages[{number}].content is {content!r:.80}; it must be a text", '"content": "Hello"')
    return {**message, "content": content or ""}
