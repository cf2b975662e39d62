"""Renamed flags and JSON keys, which keep working for one release under their old names.

A renamed flag is replaced on the command line, with a warning on stderr. A renamed key of a JSON report appears under
both names. Renamed recipe keys and environment variables are handled by planning/recipe.py. To end the transition,
delete this module and its two calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

RENAMED_FLAGS = {"--prefill-burst": "--max-consecutive-prefills"}
RENAMED_JSON_KEYS = {  # new name: old name
    "alternative_attention": "other_attention",
    "already_present": "was_there",
    "changed": "other_bytes",
    "compute_dtype": "dtype",
    "cudagraph_skips": "graph_skips",
    "differences": "factors",
    "eager_greedy_tokens": "oracle",
    "files_not_from_bundle": "made_here",
    "greedy_tokens": "answers",
    "inputs_sha256": "inputs",
    "is_leased": "is_held",
    "matmul_flop_per_second": "matrix_flop_per_second",
    "max_consecutive_prefills": "prefill_burst",
    "max_logprob_difference": "max_difference",
    "max_prefill_sequences": "prefill_sequences",
    "mismatched_tokens": "other_tokens",
    "request_timings": "served",
    "retained": "kept",
    "unique_bytes": "own_bytes",
    "variant": "candidate",
}


def replace_renamed_flags(arguments: Sequence[str]) -> list[str]:
    """The command line with current flag names. Words after `--` are left alone."""
    replaced: list[str] = []
    for position, word in enumerate(arguments):
        if word == "--":
            return [*replaced, *arguments[position:]]
        flag, equals, value = word.partition("=")
        if flag in RENAMED_FLAGS:
            current = RENAMED_FLAGS[flag]
            print(f"warning: {flag} is deprecated and will be removed; use {current}", file=sys.stderr)
            word = f"{current}{equals}{value}"
        replaced.append(word)
    return replaced


def add_old_json_keys(content: Any) -> Any:
    """A copy of a report in which every renamed key also appears under its old name, at any depth."""
    if isinstance(content, dict):
        values = {key: add_old_json_keys(value) for key, value in content.items()}
        old = {RENAMED_JSON_KEYS[key]: value for key, value in values.items() if key in RENAMED_JSON_KEYS}
        return {**old, **values}
    if isinstance(content, list | tuple):
        return [add_old_json_keys(value) for value in content]
    return content
