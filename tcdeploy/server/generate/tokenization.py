"""Prompts to token ids and back: chat templates, tokenizer calls, and checks of token ids.

The length of a prompt is checked before it is tokenized. Long texts are tokenized in threads (text_encoder.py).
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError
from tcdeploy.server.apis.openai.field_types import dump_tools
from tcdeploy.server.apis.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    TemplateRequest,
    TokenizeRequest,
    bad_request,
)
from tcdeploy.server.apis.openai.validation import ModelLimits, context_length_error, first_given, num_kept_tokens
from tcdeploy.server.generate.text_encoder import TextEncoder, TooManyTokensError
from tcdeploy.server.output.structured.bad_words import MAX_WORD_TOKENS, spellings
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text.chat_template import render_pool, reserved_names
from tcdeploy.text.conversation import render_conversation
from tcdeploy.text.stored_tokenizer import StoredTokenizer
from tcdeploy.text.template_form import RefusedMessageError

SLICE_TOKENS = 8192  # token ids that are checked or written as JSON in one call; other threads can run between calls
INFO_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None  # as sent, or as rendered by the chat template; None if only ids are known


@dataclass(frozen=True)
class PromptTokenizer:
    """`tokenizer`: of the model, of transformers or stored; `model_name` is used in error messages."""

    tokenizer: Any
    encoder: TextEncoder
    limits: ModelLimits
    model_name: str
    tools: ToolSupport

    async def prompts(self, request: CompletionRequest | ChatRequest) -> list[Prompt]:
        """One entry per prompt of the request. Raises ApiError 400."""
        try:
            if isinstance(request, ChatRequest):
                text = await self._render_chat(request, request.messages, request.usable_tools)
                return [await self._encode(request, text, "messages")]
            return await self._completion_prompts(request)
        except TooManyTokensError as error:
            if request.truncate_prompt_tokens is not None:
                raise  # the text is too long to be tokenized before it is truncated
            raise context_length_error(request, self.limits, error.num_tokens, is_minimum=error.is_minimum) from None

    async def _encode(self, request: CompletionRequest | ChatRequest, text: str, field: str) -> Prompt:
        """The prompt of a text, truncated to `truncate_prompt_tokens`."""
        num_kept = num_kept_tokens(request, self.limits)
        max_tokens = self.limits.context if num_kept is None else self.limits.tokenize_tokens
        adds_special_tokens = first_given(request.add_special_tokens, isinstance(request, CompletionRequest))
        token_ids = await self.encoder.encode(text, max_tokens, field, adds_special_tokens, num_kept)
        return Prompt(token_ids, text)

    async def _completion_prompts(self, request: CompletionRequest) -> list[Prompt]:
        prompts = []
        for content in request.prompts:
            if isinstance(content, str):
                prompt = await self._encode(request, content, "prompt")
            else:
                await self._check_token_ids(content)
                num_kept = num_kept_tokens(request, self.limits) or len(content)
                prompt = Prompt(content[-num_kept:], None)
            if not prompt.token_ids:
                raise bad_request("the prompt has 0 tokens; it must have at least 1", "prompt")
            if request.echo and (prompt.text is None or request.truncate_prompt_tokens is not None):
                has_text = prompt.text is not None  # without the special tokens that were added to it
                text = await self._decode(prompt.token_ids, skip_special_tokens=has_text)
                prompt = Prompt(prompt.token_ids, text)
            prompts.append(prompt)
            await asyncio.sleep(0)  # short prompts are tokenized on the event loop, and there may be hundreds of them
        return prompts

    def _template_variables(self, request: TemplateRequest) -> dict[str, Any]:
        """Variables of the chat template. Names that the renderer uses are rejected, because they could replace the
        messages. As in vLLM, `reasoning_effort` is a variable, and replaces one of that name.
        """
        variables = request.chat_template_kwargs or {}
        if conflicts := sorted(reserved_names(self.tokenizer) & variables.keys()):
            raise bad_request(f"chat_template_kwargs cannot set {conflicts[0]}", "chat_template_kwargs")
        if request.reasoning_effort is not None:
            variables = {**variables, "reasoning_effort": request.reasoning_effort}
        continues = request.continue_final_message is True
        if continues and request.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true"
            raise bad_request(message, "continue_final_message")
        return {**variables, "add_generation_prompt": request.add_generation_prompt is not False and not continues}

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("exactly one of prompt and messages is required", "prompt")
        for name in TemplateRequest.model_fields if request.messages is None else ():
            if getattr(request, name):
                raise bad_request(f"{name} requires messages", name)
        if request.messages is not None:
            tools = dump_tools(request.tools)
            text, field = await self._render_chat(request, request.messages, tools), "messages"
        else:
            text, field = request.prompt or "", "prompt"
        adds_special_tokens = first_given(request.add_special_tokens, request.messages is None)
        return await self.encoder.encode(text, self.limits.tokenize_tokens, field, adds_special_tokens)

    async def bad_words(self, words: list[str]) -> list[list[int]]:
        """The token ids of each spelling of each word. Raises ApiError 400 for a word of too many tokens."""
        ids = []
        for word in words:
            for text in spellings(word):
                try:
                    ids.append(await self.encoder.encode(text, MAX_WORD_TOKENS, "bad_words", add_special_tokens=False))
                except TooManyTokensError:
                    message = f"bad_words contains a text of more than {MAX_WORD_TOKENS} tokens"
                    raise bad_request(message, "bad_words") from None
        return [word_ids for word_ids in ids if word_ids]

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included. Raises ApiError 400."""
        if len(token_ids) > self.limits.tokenize_tokens:
            message = f"tokens has {len(token_ids)} token ids; the limit is {self.limits.tokenize_tokens}"
            raise bad_request(message, "tokens")
        await self._check_token_ids(token_ids, "tokens")
        return await self._decode(token_ids, skip_special_tokens=False)

    async def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        decode = functools.partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return str(await self.encoder.run(len(token_ids), decode))

    async def tokens_json(self, token_ids: list[int]) -> bytes:
        """The response body of /tokenize."""

        def write() -> bytes:
            slices = (json.dumps(part)[1:-1] for part in _slices(token_ids))
            others = json.dumps({"count": len(token_ids), "max_model_len": self.limits.context})
            return f'{{"tokens": [{", ".join(slices)}], {others[1:]}'.encode()

        return await self.encoder.run(len(token_ids), write)

    def info(self) -> dict[str, Any]:
        """vLLM's /tokenizer_info, without paths of this machine."""
        tokenizer = self.tokenizer
        class_name = tokenizer.class_name if isinstance(tokenizer, StoredTokenizer) else type(tokenizer).__name__
        return {"tokenizer_class": class_name, **{name: getattr(tokenizer, name) for name in INFO_FIELDS}}

    async def _check_token_ids(self, token_ids: list[int], field: str = "prompt") -> None:
        largest = self.limits.vocab_size - 1

        def are_valid() -> bool:
            return all(0 <= min(part) <= max(part) <= largest for part in _slices(token_ids))

        if not await self.encoder.run(len(token_ids), are_valid):
            raise bad_request(f"{field} contains token ids outside 0..{largest}", field)

    async def _render_chat(self, request: TemplateRequest, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        variables = self._template_variables(request)
        if not messages:
            raise bad_request("messages is empty", "messages")
        if not self.tokenizer.chat_template:
            raise bad_request(f"{self.model_name} has no chat template", "messages")
        if tools:
            await asyncio.get_running_loop().run_in_executor(render_pool, self.tools.check, tools)
            variables = {**variables, "tools": tools}

        def render() -> str:
            conversation = [message.for_template() for message in messages]
            continues = request.continue_final_message is True
            return render_conversation(self.tokenizer, conversation, variables, continues=continues)

        try:
            return await asyncio.get_running_loop().run_in_executor(render_pool, render)
        except RefusedMessageError as error:
            raise bad_request(error.message, f"messages[{error.number}].{error.field}") from None
        except ModelError as error:
            raise bad_request(error.message, "messages") from None


def _slices(token_ids: list[int]) -> Iterator[list[int]]:
    return (token_ids[start : start + SLICE_TOKENS] for start in range(0, len(token_ids), SLICE_TOKENS))
