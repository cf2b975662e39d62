"""JSON schemas of responses, for /openapi.json. Those of requests are derived from pydantic's models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def record(optional: Iterable[str] = (), /, **fields: Schema) -> Schema:
    """An object with these fields, of which the `optional` ones may be missing. It may have other fields too."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "required": required, "properties": fields}


TEXT_OR_NULL = nullable(STRING)
TOKEN_IDS = array(COUNT)
FINISH_REASON = enum("stop", "length", "tool_calls")
USAGE = record(
    prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
)  # fmt: skip
PROMPT_LOGPROBS = nullable(array(nullable({"type": "object"})))
COMPLETION_LOGPROBS = record(
    tokens=array(STRING), token_logprobs=array(nullable(NUMBER)), text_offset=array(COUNT),
    top_logprobs=nullable(array(nullable({"type": "object", "additionalProperties": NUMBER}))),
)  # fmt: skip
COMPLETION_CHOICE = record(
    ("token_ids", "prompt_token_ids", "prompt_logprobs"),
    index=COUNT, text=STRING, logprobs=nullable(COMPLETION_LOGPROBS), finish_reason=nullable(FINISH_REASON),
    token_ids=TOKEN_IDS, prompt_token_ids=TOKEN_IDS, prompt_logprobs=PROMPT_LOGPROBS,
)  # fmt: skip
TOOL_CALL = record(id=STRING, type=enum("function"), function=record(name=STRING, arguments=STRING))
STREAMED_CALL = {**TOOL_CALL, "properties": {"index": COUNT, **TOOL_CALL["properties"]}}
TOKEN_LOGPROB = {"token": STRING, "logprob": NUMBER, "bytes": array(COUNT)}
CHAT_LOGPROBS = nullable(record(content=array(record(**TOKEN_LOGPROB, top_logprobs=array(record(**TOKEN_LOGPROB))))))
ANSWER = record(
    ("reasoning_content", "tool_calls"),
    role=enum("assistant"), content=TEXT_OR_NULL, refusal={"type": "null"}, reasoning_content=STRING,
    tool_calls=array(TOOL_CALL),
)  # fmt: skip
CHAT_CHOICE = record(
    ("token_ids",),
    index=COUNT, message=ANSWER, logprobs=CHAT_LOGPROBS, finish_reason=FINISH_REASON, token_ids=TOKEN_IDS,
)  # fmt: skip
DELTA = {
    "role": enum("assistant"), "content": STRING, "reasoning_content": STRING, "tool_calls": array(STREAMED_CALL)
}  # fmt: skip
CHAT_CHUNK_CHOICE = record(
    ("token_ids",),
    index=COUNT, delta=record(DELTA, **DELTA), logprobs=CHAT_LOGPROBS, finish_reason=nullable(FINISH_REASON),
    token_ids=TOKEN_IDS,
)  # fmt: skip


def _completion(object_type: str, choice: Schema, *, is_chunk: bool = False) -> Schema:
    return record(
        ("prompt_token_ids", "prompt_logprobs", *(("usage",) if is_chunk else ())),
        id=STRING, object=enum(object_type), created=COUNT, model=STRING, system_fingerprint=STRING,
        choices=array(choice), usage=USAGE, prompt_token_ids=TOKEN_IDS, prompt_logprobs=PROMPT_LOGPROBS,
    )  # fmt: skip


MODEL = record(
    id=STRING, object=enum("model"), created=COUNT, owned_by=STRING, max_model_len={"type": "integer", "minimum": 1}
)
ERROR = record(error=record(message=STRING, type=STRING, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
MESSAGES_USAGE = record(
    input_tokens=COUNT, cache_creation_input_tokens=COUNT, cache_read_input_tokens=COUNT, output_tokens=COUNT
)
STOP_REASON = enum("end_turn", "tool_use", "max_tokens", "model_context_window_exceeded", "stop_sequence")
MESSAGES_END = {"stop_reason": nullable(STOP_REASON), "stop_sequence": TEXT_OR_NULL}
MESSAGES_BLOCK = {
    "oneOf": [
        record(type=enum("text"), text=STRING),
        record(type=enum("thinking"), thinking=STRING, signature=STRING),
        record(type=enum("tool_use"), id=STRING, name=STRING, input={"type": "object"}),
    ]
}
MESSAGE = record(
    id=STRING, type=enum("message"), role=enum("assistant"), model=STRING, content=array(MESSAGES_BLOCK),
    **MESSAGES_END, usage=MESSAGES_USAGE,
)  # fmt: skip
MESSAGES_ERROR = record(type=enum("error"), error=record(type=STRING, message=STRING))
MESSAGES_EVENT = {
    "oneOf": [
        record(type=enum("message_start"), message=MESSAGE),
        record(type=enum("content_block_start"), index=COUNT, content_block=MESSAGES_BLOCK),
        record(type=enum("content_block_delta"), index=COUNT, delta=record(type=STRING)),
        record(type=enum("content_block_stop"), index=COUNT),
        record(type=enum("message_delta"), delta=record(**MESSAGES_END), usage=MESSAGES_USAGE),
        record(type=enum("message_stop", "ping")),
        MESSAGES_ERROR,
    ]
}
ITEM_HEAD = {"id": STRING, "status": enum("in_progress", "completed", "incomplete")}
OUTPUT_TEXT = record(type=enum("output_text"), text=STRING, annotations=array({}))
REASONING_TEXT = record(type=enum("reasoning_text"), text=STRING)
RESPONSES_ITEM = {
    "oneOf": [
        record(**ITEM_HEAD, type=enum("message"), role=enum("assistant"), content=array(OUTPUT_TEXT)),
        record(**ITEM_HEAD, type=enum("reasoning"), summary=array({}), content=array(REASONING_TEXT)),
        record(**ITEM_HEAD, type=enum("function_call"), call_id=STRING, name=STRING, arguments=STRING),
    ]
}
RESPONSES_USAGE = record(
    input_tokens=COUNT, input_tokens_details=record(cached_tokens=COUNT), output_tokens=COUNT,
    output_tokens_details=record(reasoning_tokens=COUNT), total_tokens=COUNT,
)  # fmt: skip
RESPONSE_STATES = ("in_progress", "completed", "incomplete", "failed")
RESPONSE = record(
    id=STRING, object=enum("response"), created_at=COUNT, status=enum(*RESPONSE_STATES), model=STRING,
    output=array(RESPONSES_ITEM), error=nullable(record(code=STRING, message=STRING)),
    incomplete_details=nullable(record(reason=enum("max_output_tokens"))), usage=nullable(RESPONSES_USAGE),
)  # fmt: skip
PART_EVENTS = {"pattern": r"^response\.(content_part|output_text|reasoning_text|function_call_arguments)\."}
RESPONSES_EVENT = {
    "allOf": [record(type=STRING, sequence_number=COUNT)],
    "oneOf": [
        record(type=enum(*(f"response.{event}" for event in (*RESPONSE_STATES, "created"))), response=RESPONSE),
        record(
            type=enum("response.output_item.added", "response.output_item.done"),
            output_index=COUNT, item=RESPONSES_ITEM,
        ),
        record(type=PART_EVENTS, item_id=STRING, output_index=COUNT),
        record(type=enum("error"), code=STRING, message=STRING, param=TEXT_OR_NULL),
    ],
}  # fmt: skip
TOKENIZER_INFO = record(
    tokenizer_class=STRING, bos_token=TEXT_OR_NULL, eos_token=TEXT_OR_NULL, pad_token=TEXT_OR_NULL,
    unk_token=TEXT_OR_NULL, chat_template=TEXT_OR_NULL,
)  # fmt: skip
STATUS = record(
    ("history",),
    model=STRING, state=enum("ready", "loading", "draining", "dead", "canary failed"), uptime_seconds=NUMBER,
    running=COUNT, waiting=COUNT, finished=COUNT, generation_tokens=COUNT, rejections=COUNT, recompiles=COUNT,
    tokens_per_second=NUMBER, kv_cache_usage={"type": "number", "minimum": 0, "maximum": 1},
    tier=enum("warm", "eager", None), num_buckets=COUNT, latency=array(record(name=STRING, count=COUNT)),
    buckets=array(record(bucket=STRING, outcome=STRING, steps=COUNT, variant=STRING)),
    stage_seconds={"type": "object", "additionalProperties": NUMBER},
    history=record(interval_seconds=NUMBER, capacity=COUNT, end=COUNT, samples=array({})),
)  # fmt: skip
READINESS = record(
    ("stage", "step", "step_number", "num_steps", "detail", "seconds", "seconds_left"),
    status=STRING, stage=TEXT_OR_NULL, step=TEXT_OR_NULL, step_number=nullable(COUNT), num_steps=nullable(COUNT),
    detail=TEXT_OR_NULL, seconds=NUMBER, seconds_left=nullable(NUMBER),
)  # fmt: skip
COMPONENTS: dict[str, Schema] = {
    "Error": ERROR, "Model": MODEL, "Readiness": READINESS, "Status": STATUS, "TokenizerInfo": TOKENIZER_INFO,
    "ModelList": record(object=enum("list"), data=array({"$ref": "#/components/schemas/Model"})),
    "Version": record(version=STRING), "Text": record(prompt=STRING),
    "Tokens": record(tokens=TOKEN_IDS, count=COUNT, max_model_len=COUNT),
    "Completion": _completion("text_completion", COMPLETION_CHOICE),
    "CompletionChunk": _completion("text_completion", COMPLETION_CHOICE, is_chunk=True),
    "ChatCompletion": _completion("chat.completion", CHAT_CHOICE),
    "ChatCompletionChunk": _completion("chat.completion.chunk", CHAT_CHUNK_CHOICE, is_chunk=True),
    "ResponsesResponse": RESPONSE, "ResponsesEvent": RESPONSES_EVENT,
    "DeletedResponse": record(id=STRING, object=enum("response"), deleted=enum(True)),
    "MessagesError": MESSAGES_ERROR, "MessagesResponse": MESSAGE, "MessagesEvent": MESSAGES_EVENT,
    "MessagesTokens": record(input_tokens=COUNT),
}  # fmt: skip
