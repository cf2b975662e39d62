"""The response template of a model: how its output delimits reasoning and tool calls.

It is an attribute of the tokenizer. For families that are not in tool_formats.py, it comes from transformers' table of
model families.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tcdeploy.text.stored_tokenizer import StoredTokenizer
from tcdeploy.text.tool_formats import template_text, tool_format


def response_template(tokenizer: Any, model_type: str) -> dict[str, Any] | None:
    """The template of `tokenizer`, else of its family, or None. Imports transformers if it is needed.

    Also None if a format of tool_formats.py is detected from the chat template: it needs no response template.
    """
    if isinstance(tokenizer, StoredTokenizer):  # its template was looked up when the tokenizer was stored
        return tokenizer.response_template
    template = getattr(tokenizer, "response_template", None)
    if template is None and tool_format("auto", template_text(getattr(tokenizer, "chat_template", None))) is None:
        template = _template_of_family(tokenizer, model_type)
    return None if template is None else dict(template)


def _template_of_family(tokenizer: Any, model_type: str) -> Any:
    """transformers' internal table of response templates. None if the internal has moved: tools are then rejected."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return None
    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))  # it reads nothing else of a model
    return get_response_template(tokenizer, model)
