"""Prompts to token ids and back: chat templates, tokenizer calls, and checks of token ids.

Long texts are tokenized in a thread, so that the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError
from tcdeploy.models.chat_template import render_chat, render_pool
from tcdeploy.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    bad_request,
    dump_tools,
)
from tcdeploy.server.tools import ToolSupport

OFFLOAD_THRESHOLD = 20_000  # characters, or tokens to decode; more run in a thread
INFO_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None  # as sent, or as rendered by the chat template; None if only ids are known


@dataclass(frozen=True)
class PromptTokenizer:
    """`tokenizer` is transformers' tokenizer of the model; `model_name` is used in error messages."""

    tokenizer: Any
    vocab_size: int  # rows of the model's embedding, which may differ from the tokenizer's size
    model_name: str
    tools: ToolSupport

    async def prompts(self, request: CompletionRequest | ChatRequest) -> list[Prompt]:
        """One entry per prompt of the request. Raises ApiError 400."""
        if isinstance(request, ChatRequest):
            template_kwargs = {"add_generation_prompt": request.add_generation_prompt is not False}
            template_kwargs |= self._checked_template_kwargs(request)
            return [await self._render_chat(request.messages, template_kwargs, request.usable_tools)]
        prompts = []
        for content in request.prompts:
            if isinstance(content, str):
                prompts.append(Prompt(await self._encode(content), content))
            else:
                self._check_token_ids(content)
                prompts.append(Prompt(content, await self.detokenize(content, "prompt") if request.echo else None))
            if not prompts[-1].token_ids:
                raise bad_request("the prompt has 0 tokens; it must have at least 1", "prompt")
        return prompts

    def _checked_template_kwargs(self, request: ChatRequest) -> dict[str, Any]:
        """Variables for the template. Arguments of `apply_chat_template` are rejected: one replaces the template."""
        template_kwargs = request.chat_template_kwargs or {}
        reserved = {"tools", "chat_template", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        if conflicts := sorted(reserved & template_kwargs.keys()):
            raise bad_request(f"chat_template_kwargs cannot set {conflicts[0]}", "chat_template_kwargs")
        return template_kwargs

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("exactly one of prompt and messages is required", "prompt")
        if request.messages is not None:
            template_kwargs = {"add_generation_prompt": request.add_generation_prompt is not False}
            return (await self._render_chat(request.messages, template_kwargs, dump_tools(request.tools))).token_ids
        return await self._encode(request.prompt or "", request.add_special_tokens)

    async def detokenize(self, token_ids: list[int], field: str = "tokens") -> str:
        """The text of token ids, special tokens included. Raises ApiError 400 that names `field`."""

        def decode() -> str:
            self._check_token_ids(token_ids, field)
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

        return decode() if len(token_ids) < OFFLOAD_THRESHOLD else await asyncio.to_thread(decode)

    def info(self) -> dict[str, Any]:
        """vLLM's /tokenizer_info, without paths of this machine."""
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            **{name: getattr(self.tokenizer, name) for name in INFO_FIELDS},
        }

    def _check_token_ids(self, token_ids: list[int], field: str = "prompt") -> None:
        last = self.vocab_size - 1
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= last:
            raise bad_request(f"{field} contains token ids outside 0..{last}", field)

    async def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        def encode() -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

        return encode() if len(text) < OFFLOAD_THRESHOLD else await asyncio.to_thread(encode)

    async def _render_chat(
        self, messages: list[Message], template_kwargs: dict[str, Any], tools: list[dict[str, Any]]
    ) -> Prompt:
        if not messages:
            raise bad_request("messages is empty", "messages")
        if not self.tokenizer.chat_template:
            raise bad_request(f"{self.model_name} has no chat template", "messages")
        self.tools.check(tools)
        template_kwargs = {**template_kwargs, "tools": tools} if tools else template_kwargs

        def render() -> str:
            return render_chat(self.tokenizer, [message.for_template() for message in messages], **template_kwargs)

        try:
            text = await asyncio.get_running_loop().run_in_executor(render_pool, render)
        except ModelError as error:
            raise bad_request(error.message, "messages") from None
        return Prompt(await self._encode(text, add_special_tokens=False), text)
