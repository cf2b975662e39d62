"""Checks combinations of request fields, and limits of the model; converts the fields to the engine's SamplingParams.

Limits of a single field are in its type (protocol.py). Does not import torch.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.engine.schedule.constraint import Constraint
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import UsageError
from tcdeploy.server.apis.openai.field_types import TOKEN_ID_KEY_PATTERN
from tcdeploy.server.apis.openai.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    bad_request,
)
from tcdeploy.server.apis.openai.unsupported_fields import check_unsupported_fields

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's error code
MAX_PROMPT_LOGPROBS = 1_000_000  # log-probabilities of prompts in one response: some 80 MB of JSON
MIN_TOKENIZE_TOKENS = 1 << 15  # that /tokenize and /detokenize accept with any context


class ModelLimits(NamedTuple):
    """Limits of the served model, and its values for parameters that a request leaves out."""

    context: int  # tokens of prompt and output together
    vocab_size: int
    defaults: GenerationDefaults = GenerationDefaults()

    @property
    def tokenize_tokens(self) -> int:
        """Of /tokenize and /detokenize: clients tokenize whole documents before they cut them to the context."""
        return max(4 * self.context, MIN_TOKENIZE_TOKENS)


def check_combinations(request: GenerationRequest) -> None:
    """Raises ApiError 400 for unsupported fields, and for combinations that are invalid for every model."""
    check_unsupported_fields(request)
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens is 0; it must be 1 or more, unless echo is true", "max_tokens")
    _check_constraint(request)
    if isinstance(request, ChatRequest):
        _check_tools(request)
        if request.top_logprobs and not request.logprobs:
            raise bad_request(f"top_logprobs is {request.top_logprobs}, but logprobs is not true", "top_logprobs")
    if constraint_field := request.constraint_field:
        if request.bad_words:
            raise bad_request(f"bad_words cannot be combined with {constraint_field}", "bad_words")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(request, name):
                message = f"{name} cannot be combined with {constraint_field}: the output ends where its grammar ends"
                raise bad_request(message, name)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs requires stream to be false", "prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options requires stream to be true", "stream_options")


def _check_constraint(request: GenerationRequest) -> None:
    """Raises ApiError 400 for an unsupported constraint of the output, and for more than one."""
    outputs = request.structured_outputs
    if outputs is not None and (key := outputs.unsupported_key()):
        message = f"structured_outputs.{key:.80} is not supported"
        raise bad_request(message, "structured_outputs", "unsupported_parameter")
    constraints = request.output_constraints
    if outputs is not None and all(constraint.field != "structured_outputs" for constraint in constraints):
        message = "structured_outputs must contain one of json, json_object, regex, choice and grammar"
        raise bad_request(message, "structured_outputs")
    if len(constraints) > 1:
        first, second = (f"{constraint.field} ({constraint.kind})" for constraint in constraints[:2])
        raise bad_request(f"{second} cannot be combined with {first}", constraints[1].field)


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    if len(set(names)) < len(names):
        raise bad_request("tools contains two functions of the same name", "tools")
    missing = request.chosen_names - set(names)
    if missing:
        raise bad_request("tool_choice names a function that is not in tools", "tool_choice")
    if request.tool_mode == "required" and not request.usable_tools:
        raise bad_request("tool_choice requires a call, but tools is empty or missing", "tool_choice")
    constraint = request.output_constraint
    if request.usable_tools and constraint is not None and constraint.kind != "json":
        message = f"{constraint.field} ({constraint.kind}) cannot be combined with tools, unless tool_choice is none"
        raise bad_request(message, constraint.field)


def to_sampling_params(
    request: GenerationRequest, prompt_length: int, limits: ModelLimits, constraint: Constraint | None = None
) -> SamplingParams:
    """Sampling parameters of the first choice of a prompt of `prompt_length` tokens. Raises ApiError 400. A value that
    is left out or null is the model's default, else the API's.
    """
    max_new_tokens_limit = limits.context - prompt_length
    if max_new_tokens_limit < 1:
        raise context_length_error(request, limits, prompt_length)
    max_new_tokens = _max_new_tokens(request, limits.defaults.max_new_tokens, max_new_tokens_limit)
    defaults = limits.defaults
    top_k = first_given(request.top_k, defaults.top_k, 0)
    model_stop_ids = () if request.ignore_eos else defaults.stop_token_ids
    request_stop_ids = tuple(request.stop_token_ids or ())
    if any(not 0 <= token_id < limits.vocab_size for token_id in request_stop_ids):
        raise bad_request(f"stop_token_ids contains ids outside 0..{limits.vocab_size - 1}", "stop_token_ids")
    try:
        params = SamplingParams(
            # The engine samples a token after every prompt. That of a request that only scores its prompt is dropped.
            max_tokens=1 if request.only_scores_prompt else max_new_tokens,
            temperature=first_given(request.temperature, defaults.temperature, 1.0),
            top_k=0 if top_k == -1 else top_k,
            top_p=first_given(request.top_p, defaults.top_p, 1.0),
            min_p=first_given(request.min_p, defaults.min_p, 0.0),
            repetition_penalty=first_given(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            min_tokens=_min_new_tokens(request, defaults.min_new_tokens, max_new_tokens),
            seed=request.seed,
            logprobs=request.num_logprobs,
            prompt_logprobs=_num_prompt_logprobs(request),
            stop_token_ids=tuple(dict.fromkeys((*model_stop_ids, *request_stop_ids))),
            logit_bias=_parse_logit_bias(request, limits.vocab_size),
            constraint=constraint,
        )
    except UsageError as error:  # with min_tokens, stop token ids count towards the limit of logit biases
        raise bad_request(error.message, "logit_bias" if request.logit_bias else "stop_token_ids") from None
    if max_new_tokens > max_new_tokens_limit:
        raise context_length_error(request, limits, prompt_length)
    if (request.min_tokens or 0) > max_new_tokens:
        message = f"min_tokens is {request.min_tokens}, more than {_length_field(request)} ({max_new_tokens})"
        raise bad_request(message, "min_tokens")
    return params


def context_length_message(
    context: int, prompt_field: str, prompt_length: int, completion_length: int, is_minimum: bool
) -> str:
    """The message of `context_length_error`. `completion_length` 0: the request sets none, or it is not known."""
    more = " or more" if is_minimum else ""
    problem, field = f"your {prompt_field} resulted in {prompt_length} tokens{more}", prompt_field
    if completion_length >= 1:
        parts = f"{prompt_length}{more} in the {prompt_field}, {completion_length} in the completion"
        problem = f"you requested {prompt_length + completion_length} tokens{more} ({parts})"
        field = f"{prompt_field} or completion"
    start = f"This model's maximum context length is {context} tokens. However, {problem}."
    return f"{start} Please reduce the length of the {field}."


def context_length_error(
    request: GenerationRequest, limits: ModelLimits, prompt_length: int, *, is_minimum: bool = False
) -> ApiError:
    """The error for a prompt and a completion that exceed the context together. `param` is the field to shorten. The
    words are those of OpenAI and vLLM, because clients search for them: litellm raises ContextWindowExceededError for
    the first ones, and others read the numbers. `is_minimum`: `prompt_length` (tokens) is a lower bound.
    """
    prompt_field = "messages" if isinstance(request, ChatRequest) else "prompt"
    completion_length = _max_new_tokens(request, limits.defaults.max_new_tokens, 0)  # 0: as many as fit
    message = context_length_message(limits.context, prompt_field, prompt_length, completion_length, is_minimum)
    field = prompt_field if prompt_length >= limits.context else _length_field(request)
    return bad_request(message, field, CONTEXT_LENGTH_EXCEEDED)


def check_prompt_logprobs(request: GenerationRequest, prompt_tokens: int) -> None:
    """Raises ApiError 400 if prompts of `prompt_tokens` in total would return too many log-probabilities."""
    if request.prompt_logprobs is None:
        return
    copies = 1 if isinstance(request, ChatRequest) else request.num_choices
    count = prompt_tokens * copies * (request.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        message = f"prompt_logprobs would return {count} values; the limit is {MAX_PROMPT_LOGPROBS} in one response"
        raise bad_request(message, "prompt_logprobs")


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    """Alternatives per token of the prompt: of `prompt_logprobs`, and of `logprobs` if the prompt is echoed."""
    numbers = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        numbers.append(request.logprobs)
    return max((number for number in numbers if number is not None), default=None)


def num_kept_tokens(request: GenerationRequest, limits: ModelLimits) -> int | None:
    """The most tokens of a prompt that `truncate_prompt_tokens` keeps; None: all. Raises ApiError 400. -1 keeps as many
    as leave room for the new tokens: the request's number, else the model's default, else one.
    """
    kept = request.truncate_prompt_tokens
    if kept is None:
        return None
    if kept > limits.context:
        message = f"truncate_prompt_tokens is {kept}, more than the model's context ({limits.context})"
        raise bad_request(message, "truncate_prompt_tokens")
    default = limits.defaults.max_new_tokens
    if kept > 0:
        return kept
    num_new_tokens = max(1, _max_new_tokens(request, default, default or 1))
    if num_new_tokens >= limits.context:
        raise bad_request(
            f"This model's maximum context length is {limits.context} tokens. However, the completion alone may have "
            f"{num_new_tokens} tokens. Please reduce the length of the completion.",
            _length_field(request), CONTEXT_LENGTH_EXCEEDED,
        )  # fmt: skip
    return limits.context - num_new_tokens


def _length_field(request: GenerationRequest) -> str:
    is_renamed = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if is_renamed else "max_tokens"


def _max_new_tokens(request: GenerationRequest, default: int | None, limit: int) -> int:
    """The request's value, else the model's default up to `limit`, else `limit`. For completions the model's default
    can only lower the API's, because clients rely on short answers.
    """
    if isinstance(request, CompletionRequest) and request.max_tokens is None:
        return min(DEFAULT_COMPLETION_TOKENS, default or DEFAULT_COMPLETION_TOKENS)
    if request.max_new_tokens is not None:
        return min(request.max_new_tokens, limit) if request._lowers_max_tokens else request.max_new_tokens
    return min(default or limit, limit)


def _min_new_tokens(request: GenerationRequest, default: int | None, max_new_tokens: int) -> int:
    """The request's value, else the model's default up to `max_new_tokens`, unless a grammar decides where the output
    ends.
    """
    if request.min_tokens is not None or request.constraint_field:
        return request.min_tokens or 0
    return max(0, min(default or 0, max_new_tokens))


def first_given(*values: Any) -> Any:
    """The first value that is not None. Callers pass a default last."""
    return next(value for value in values if value is not None)


def params_of_choices(first: SamplingParams, num_choices: int, scores_once: bool = False) -> list[SamplingParams]:
    """With a seed, choice j > 0 uses (seed + j) modulo 2^63. `scores_once`: only the first choice scores the prompt."""
    other = first
    if scores_once and first.prompt_logprobs is not None and num_choices > 1:
        other = dataclasses.replace(first, prompt_logprobs=None)
    if first.seed is None:
        return [first, *[other] * (num_choices - 1)]
    return [first, *(other.with_seed((first.seed + number) % 2**63) for number in range(1, num_choices))]


def _parse_logit_bias(request: GenerationRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, value in (request.logit_bias or {}).items():
        if not re.fullmatch(TOKEN_ID_KEY_PATTERN, key) or int(key) >= vocab_size:
            message = f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to {vocab_size - 1}"
            raise bad_request(message, "logit_bias")
        biases.append((int(key), value))
    return tuple(biases)


def count_chars(value: Any) -> int:
    """The characters of all texts in a JSON value, keys included. Takes some 0.1 us per value, whatever its length."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(count_chars, value.values()))
    return sum(map(count_chars, value)) if isinstance(value, list) else 0
