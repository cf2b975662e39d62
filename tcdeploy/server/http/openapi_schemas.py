"""JSON schemas of responses, for /openapi.json. Those of requests are derived from pydantic's models."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}


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
