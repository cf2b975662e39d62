"""JSON schemas of responses, and the limits of request fields, for /openapi.json.

The limits repeat what validation.py and the engine check. pydantic's models contain only types, because pydantic's
errors would not have OpenAI's format. tests/server/test_openapi.py compares the two. Combinations of fields are not
described.
"""

from __future__ import annotations

from typing import Any

from tcdeploy.engine.schedule.sequence import MAX_LOGPROBS, MAX_TOP_K
from tcdeploy.server.apis.openai.protocol import MAX_LOGIT_BIASES
from tcdeploy.server.apis.openai.validation import MAX_CHOICES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TOOLS
from tcdeploy.server.output.structured.bad_words import MAX_BAD_WORDS

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def field_limits(vocab_size: int | None) -> dict[str, Schema]:
    """Limits by field name, as JSON schema keywords. `add_limits` adds each keyword to the types that it applies to.

    `vocab_size`: None while the model is loading.
    """
    token_id: Schema = {"minimum": 0, **({} if vocab_size is None else {"maximum": vocab_size - 1})}
    logprobs: Schema = {"minimum": 0, "maximum": MAX_LOGPROBS}
    return {
        "n": {"minimum": 1, "maximum": MAX_CHOICES},
        "max_tokens": {"minimum": 1},
        "max_completion_tokens": {"minimum": 1},
        "max_output_tokens": {"minimum": 1},
        "min_tokens": {"minimum": 0},
        "temperature": {"minimum": 0},
        "top_k": {"minimum": -1, "maximum": MAX_TOP_K},
        "top_p": {"minimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "exclusiveMaximum": 1},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "stop": {"minLength": 1, "maxItems": MAX_STOP_STRINGS, "items": {"minLength": 1}},
        "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": token_id},
        "bad_words": {"maxItems": MAX_BAD_WORDS, "items": {"minLength": 1}},
        "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
        "logit_bias": {
            "maxProperties": MAX_LOGIT_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"minimum": -100, "maximum": 100},
        },
        "prompt": {"minItems": 1, "items": {"minItems": 1, "items": token_id, **token_id}},
        "messages": {"minItems": 1},
        "tools": {"maxItems": MAX_TOOLS},
        "tokens": {"items": token_id},
    }


KEYWORDS_OF_TYPE = {
    "integer": ("minimum", "maximum", "not"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "string": ("minLength",),
    "array": ("minItems", "maxItems"),
    "object": ("maxProperties", "propertyNames"),
}
NESTED_KEYWORDS = {"array": "items", "object": "additionalProperties"}


def add_limits(schema: Schema, limits: Schema) -> None:
    """Add to a field's schema, and to the schemas of its items, the keywords of `limits` that apply to their types."""
    for option in schema.get("anyOf", ()):
        add_limits(option, limits)
    kind = schema.get("type")
    for keyword in KEYWORDS_OF_TYPE.get(kind, ()):  # type: ignore[arg-type]
        if keyword in limits:
            schema[keyword] = limits[keyword]
    nested = NESTED_KEYWORDS.get(kind, "")  # type: ignore[arg-type]
    if isinstance(schema.get(nested), dict) and nested in limits:
        add_limits(schema[nested], limits[nested])


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these fields. It may have other fields too."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


TOKEN_IDS = array(COUNT)
FINISH_REASON = {"enum": ["stop", "length", "tool_calls"]}
USAGE = record(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
    }
)
PROMPT_LOGPROBS = nullable(array(nullable({"type": "object"})))
COMPLETION_CHOICE = record(
    {
        "index": COUNT,
        "text": STRING,
        "logprobs": nullable(
            record(
                {
                    "tokens": array(STRING),
                    "token_logprobs": array(nullable(NUMBER)),
                    "top_logprobs": nullable(array(nullable({"type": "object", "additionalProperties": NUMBER}))),
                    "text_offset": array(COUNT),
                }
            )
        ),
        "finish_reason": nullable(FINISH_REASON),
    },
    {"token_ids": TOKEN_IDS, "prompt_token_ids": TOKEN_IDS, "prompt_logprobs": PROMPT_LOGPROBS},
)
TOOL_CALL = record(
    {"id": STRING, "type": {"const": "function"}, "function": record({"name": STRING, "arguments": STRING})}
)
TOKEN_LOGPROB = {"token": STRING, "logprob": NUMBER, "bytes": array(COUNT)}
CHAT_LOGPROBS = nullable(
    record({"content": array(record({**TOKEN_LOGPROB, "top_logprobs": array(record(TOKEN_LOGPROB))}))})
)
CHAT_CHOICE = record(
    {
        "index": COUNT,
        "message": record(
            {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": {"type": "null"}},
            {"reasoning_content": STRING, "tool_calls": array(TOOL_CALL)},
        ),
        "logprobs": CHAT_LOGPROBS,
        "finish_reason": FINISH_REASON,
    },
    {"token_ids": TOKEN_IDS},
)
CHAT_CHUNK_CHOICE = record(
    {
        "index": COUNT,
        "delta": record(
            {},
            {
                "role": {"const": "assistant"},
                "content": STRING,
                "reasoning_content": STRING,
                "tool_calls": array({**TOOL_CALL, "properties": {"index": COUNT, **TOOL_CALL["properties"]}}),
            },
        ),
        "logprobs": CHAT_LOGPROBS,
        "finish_reason": nullable(FINISH_REASON),
    },
    {"token_ids": TOKEN_IDS},
)


def _completion(object_type: str, choice: Schema, usage: dict[str, Schema], streamed: dict[str, Schema]) -> Schema:
    head = {
        "id": STRING,
        "object": {"const": object_type},
        "created": COUNT,
        "model": STRING,
        "system_fingerprint": STRING,
        "choices": array(choice),
    }
    optional = {"prompt_token_ids": TOKEN_IDS, "prompt_logprobs": PROMPT_LOGPROBS, **streamed}
    return record({**head, **usage}, optional)


MODEL = record(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": STRING,
        "max_model_len": {"type": "integer", "minimum": 1},
    }
)
ERROR = record(
    {"error": record({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})}
)
MESSAGES_USAGE = record(
    dict.fromkeys(("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), COUNT)
)
MESSAGES_END = {
    "stop_reason": nullable(
        {"enum": ["end_turn", "tool_use", "max_tokens", "model_context_window_exceeded", "stop_sequence"]}
    ),
    "stop_sequence": nullable(STRING),
}
MESSAGES_BLOCK = {
    "oneOf": [
        record({"type": {"const": "text"}, "text": STRING}),
        record({"type": {"const": "thinking"}, "thinking": STRING, "signature": STRING}),
        record({"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": {"type": "object"}}),
    ]
}
MESSAGE = record(
    {
        "id": STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": STRING,
        "content": array(MESSAGES_BLOCK),
        **MESSAGES_END,
        "usage": MESSAGES_USAGE,
    }
)
MESSAGES_ERROR = record({"type": {"const": "error"}, "error": record({"type": STRING, "message": STRING})})
MESSAGES_EVENT = {
    "oneOf": [
        record({"type": {"const": "message_start"}, "message": MESSAGE}),
        record({"type": {"const": "content_block_start"}, "index": COUNT, "content_block": MESSAGES_BLOCK}),
        record({"type": {"const": "content_block_delta"}, "index": COUNT, "delta": record({"type": STRING})}),
        record({"type": {"const": "content_block_stop"}, "index": COUNT}),
        record({"type": {"const": "message_delta"}, "delta": record(MESSAGES_END), "usage": MESSAGES_USAGE}),
        record({"type": {"enum": ["message_stop", "ping"]}}),
        MESSAGES_ERROR,
    ]
}
ITEM_STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
ITEM_HEAD = {"id": STRING, "status": ITEM_STATUS}
RESPONSES_ITEM = {
    "oneOf": [
        record(
            {
                **ITEM_HEAD,
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "content": array(record({"type": {"const": "output_text"}, "text": STRING, "annotations": array({})})),
            }
        ),
        record(
            {
                **ITEM_HEAD,
                "type": {"const": "reasoning"},
                "summary": array({}),
                "content": array(record({"type": {"const": "reasoning_text"}, "text": STRING})),
            }
        ),
        record(
            {
                **ITEM_HEAD,
                "type": {"const": "function_call"},
                "call_id": STRING,
                "name": STRING,
                "arguments": STRING,
            }
        ),
    ]
}
RESPONSE = record(
    {
        "id": STRING,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
        "model": STRING,
        "output": array(RESPONSES_ITEM),
        "error": nullable(record({"code": STRING, "message": STRING})),
        "incomplete_details": nullable(record({"reason": {"const": "max_output_tokens"}})),
        "usage": nullable(
            record(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": record({"cached_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": record({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            )
        ),
    }
)
RESPONSES_EVENT = {
    "allOf": [record({"type": STRING, "sequence_number": COUNT})],
    "oneOf": [
        record(
            {
                "type": {
                    "enum": [f"response.{event}" for event in RESPONSE["properties"]["status"]["enum"]]
                    + ["response.created"]
                },
                "response": RESPONSE,
            }
        ),
        record(
            {
                "type": {"enum": ["response.output_item.added", "response.output_item.done"]},
                "output_index": COUNT,
                "item": RESPONSES_ITEM,
            }
        ),
        record(
            {
                "type": {"pattern": r"^response\.(content_part|output_text|reasoning_text|function_call_arguments)\."},
                "item_id": STRING,
                "output_index": COUNT,
            }
        ),
        record({"type": {"const": "error"}, "code": STRING, "message": STRING, "param": nullable(STRING)}),
    ],
}
TEXT_OR_NULL = nullable(STRING)
COMPONENTS: dict[str, Schema] = {
    "Error": ERROR,
    "ResponsesResponse": RESPONSE,
    "ResponsesEvent": RESPONSES_EVENT,
    "DeletedResponse": record({"id": STRING, "object": {"const": "response"}, "deleted": {"const": True}}),
    "MessagesError": MESSAGES_ERROR,
    "MessagesResponse": MESSAGE,
    "MessagesEvent": MESSAGES_EVENT,
    "MessagesTokens": record({"input_tokens": COUNT}),
    "Model": MODEL,
    "ModelList": record({"object": {"const": "list"}, "data": array({"$ref": "#/components/schemas/Model"})}),
    "Completion": _completion("text_completion", COMPLETION_CHOICE, {"usage": USAGE}, {}),
    "CompletionChunk": _completion("text_completion", COMPLETION_CHOICE, {}, {"usage": USAGE}),
    "ChatCompletion": _completion("chat.completion", CHAT_CHOICE, {"usage": USAGE}, {}),
    "ChatCompletionChunk": _completion("chat.completion.chunk", CHAT_CHUNK_CHOICE, {}, {"usage": USAGE}),
    "Tokens": record({"tokens": TOKEN_IDS, "count": COUNT, "max_model_len": COUNT}),
    "Text": record({"prompt": STRING}),
    "TokenizerInfo": record(
        {
            "tokenizer_class": STRING,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"), TEXT_OR_NULL),
        }
    ),
    "Version": record({"version": STRING}),
    "Status": record(
        {
            "model": STRING,
            "state": {"enum": ["ready", "loading", "draining", "dead", "canary failed"]},
            "uptime_seconds": NUMBER,
            **dict.fromkeys(("running", "waiting", "finished", "generation_tokens", "rejections", "recompiles"), COUNT),
            "tokens_per_second": NUMBER,
            "kv_cache_usage": {"type": "number", "minimum": 0, "maximum": 1},
            "tier": {"enum": ["warm", "eager", None]},
            "num_buckets": COUNT,
            "latency": array(record({"name": STRING, "count": COUNT})),
            "buckets": array(record({"bucket": STRING, "outcome": STRING, "steps": COUNT, "variant": STRING})),
            "stage_seconds": {"type": "object", "additionalProperties": NUMBER},
        },
        {"history": record({"interval_seconds": NUMBER, "capacity": COUNT, "end": COUNT, "samples": array({})})},
    ),
}
