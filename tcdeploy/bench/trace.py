"""Traces of requests in JSONL, one request per line. Does not import torch.

    {"timestamp": 0.8, "input_length": 900, "output_length": 120, "session": "a", "kind": "chat"}

`timestamp` is the arrival in seconds; times count from the earliest of the file. `output_length` is in tokens.
`input_length` is the length of the prompt in tokens, which is random unless `prompt` is text or a list of token ids.
Beside `prompt` it is optional, and beside text it is not used. Requests of one `session` are sent in the order of their
timestamps, each after the response to the previous one, and their random prompts continue each other: a longer one
begins with the shorter. Latencies are also reported for each `kind`.

A line with `hash_ids` is in the format of Mooncake's traces, which always have this key: `timestamp` is in
milliseconds, and each id stands for 512 tokens of the prompt, so equal ids are equal tokens.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tcdeploy.bench.loads import ClientSession, LoadRequest, TokenStream
from tcdeploy.errors import UsageError

KEYS = ("timestamp", "input_length", "output_length", "prompt", "session", "kind", "hash_ids")
MOONCAKE_BLOCK = 512  # tokens per id
FORMAT_HINT = '{"timestamp": SECONDS, "input_length": TOKENS, "output_length": TOKENS}, one per line'


def read_trace(path: str, seed: int) -> list[ClientSession]:
    """The sessions of a trace, in the order of their first requests. Raises UsageError with file and line."""
    sessions: dict[str, tuple[TokenStream, ClientSession]] = {}
    for number, record in _read_records(path):
        name = f"line {number}" if "session" not in record else f"session {record['session']}"
        stream, session = sessions.setdefault(name, (TokenStream(f"{seed} {name}"), []))
        session.append(_make_request(record, stream, seed))
    start = min((request.earliest for _, session in sessions.values() for request in session), default=None)
    if start is None:
        raise UsageError(f"{path} contains no requests", FORMAT_HINT)
    traced = [_sort_session(session, start) for _, session in sessions.values()]
    return sorted(traced, key=lambda session: session[0].earliest)


def _sort_session(session: ClientSession, start: float) -> ClientSession:
    ordered = sorted(session, key=lambda request: request.earliest)
    return [
        LoadRequest(request.prompt, request.output_length, request.earliest - start, request.kind)
        for request in ordered
    ]


def _read_records(path: str) -> list[tuple[int, dict[str, Any]]]:
    """The lines that are not empty, with their numbers."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "--trace FILE") from None
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append((number, _check_record(json.loads(line))))
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: {error}", FORMAT_HINT) from None
    return records


def _check_record(record: Any) -> dict[str, Any]:
    """The record. Raises ValueError; so does `json`."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if unknown := sorted(record.keys() - set(KEYS)):
        raise ValueError(f"unknown key {unknown[0]!r}")
    timestamp: Any = record.get("timestamp")
    if not _is_number(timestamp) or not math.isfinite(timestamp):
        raise ValueError(f"timestamp is {timestamp!r}, expected a number")
    needed = ("output_length",) if "prompt" in record else ("output_length", "input_length")
    for key in needed:
        if not _is_count(record.get(key)):
            raise ValueError(f"{key} is {record.get(key)!r}, expected an integer above 0")
    if not isinstance(record.get("kind", ""), str) or not isinstance(record.get("session", ""), str | int):
        raise ValueError("kind must be a string, and session a string or an integer")
    _check_prompt(record)
    return record


def _check_prompt(record: dict[str, Any]) -> None:
    prompt, length = record.get("prompt", " "), record.get("input_length")
    if isinstance(prompt, list):
        if not prompt or not all(_is_count(token) or token == 0 for token in prompt):
            raise ValueError("prompt must be text, or a list of token ids")
        if length not in (None, len(prompt)):
            raise ValueError(f"input_length is {length}, and prompt has {len(prompt)} tokens")
    elif not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be text, or a list of token ids")
    if "hash_ids" in record:
        _check_hash_ids(record["hash_ids"], record)


def _check_hash_ids(hash_ids: Any, record: dict[str, Any]) -> None:
    if "prompt" in record or "session" in record:
        raise ValueError("hash_ids excludes prompt and session")
    if not isinstance(hash_ids, list) or len(hash_ids) * MOONCAKE_BLOCK < record["input_length"]:
        raise ValueError(f"hash_ids must have an id per {MOONCAKE_BLOCK} tokens of input_length")


def _make_request(record: dict[str, Any], stream: TokenStream, seed: int) -> LoadRequest:
    seconds = record["timestamp"] / 1e3 if "hash_ids" in record else record["timestamp"]
    return LoadRequest(_make_prompt(record, stream, seed), record["output_length"], seconds, record.get("kind", ""))


def _make_prompt(record: dict[str, Any], stream: TokenStream, seed: int) -> str | list[int]:
    if "prompt" in record:
        prompt: str | list[int] = record["prompt"]
        return prompt
    length: int = record["input_length"]
    if "hash_ids" not in record:
        return stream.first(length)
    blocks = (TokenStream(f"{seed} block {block}").first(MOONCAKE_BLOCK) for block in record["hash_ids"])
    return [token for block in blocks for token in block][:length]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
