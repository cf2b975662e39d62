"""Defaults of the sampling parameters and the end-of-sequence ids of a model, from its generation_config.json.

A parameter that a request omits takes the file's value, else the server's default, as in other servers (vLLM:
`--generation-config auto`). `do_sample: false` makes the default greedy, and the file's temperature is ignored, as in
transformers. Without `do_sample`, the file's temperature applies: transformers' `generate` would be greedy, but servers
sample by default. With `do_sample: true` and no temperature, it is 1.0, as in transformers, whose other defaults, such
as top_k = 50, are not applied. `max_length` is ignored, because it includes the prompt. Other keys that change the text
and are not supported are a warning in the plan.

`--generation-config none` ignores the sampling defaults. It keeps the file's end-of-sequence ids, as vLLM does: they
often include the end of a chat turn, without which a chat model does not stop. A file that lacks `eos_token_id` takes
them from config.json. The tokenizer's `eos_token` ends a request too: many fine-tuned models set the end of a chat turn
only in tokenizer_config.json.

No program depends on these values, so they are not in the plan's key. Does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcdeploy.engine.schedule.sequence import DEFAULTS, PARAM_CHECKS, SamplingParams
from tcdeploy.errors import ModelError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.recipe import GenerationConfigSource, Recipe

if TYPE_CHECKING:  # imports torch
    from transformers import PreTrainedConfig

    from tcdeploy.text.generation_config import GenerationConfigFile

MAX_STOP_TOKEN_IDS = 128  # per model; those of a request come in addition
HINT = "correct the file, or use --generation-config none, which does not apply its sampling defaults"
CONFIG_HINT = "correct config.json"
FILE, CONFIG = "generation_config.json", "config.json"
SAMPLING_ONLY = {"temperature", "top_k", "top_p", "min_p"}  # unused by greedy generation
# Keys that change the text of transformers' `generate` and are not supported, with the values that change nothing.
# null changes nothing in any of them.
UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {
    "min_length": (0,), "max_time": (), "stop_strings": ([], ""), "suppress_tokens": ([],), "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],), "sequence_bias": ({}, []), "no_repeat_ngram_size": (0,), "num_beams": (1,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "guidance_scale": (1,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "forced_bos_token_id": (), "forced_eos_token_id": ([],),
    "forced_decoder_ids": ([],), "force_words_ids": ([],), "constraints": ([],), "penalty_alpha": (0,),
    "dola_layers": ([],), "exponential_decay_length_penalty": ([],), "token_healing": (False,),
    "watermarking_config": ({},),
}  # fmt: skip
UNSUPPORTED_SAMPLING_KEYS: dict[str, tuple[Any, ...]] = {  # unused by greedy generation
    "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (),
}  # fmt: skip
# Keys of the file whose parameter has another name.
RENAMED_KEYS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
NOT_DOWNLOADED = f"{FILE} was not downloaded"


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Defaults for sampling parameters that a request omits. None: the file does not set the parameter.

    The fields have the names of the file's keys.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # they end every request that does not ignore them

    def sampling_params(self) -> dict[str, float | int]:
        """The parameters that the file sets, by its keys."""
        values = {key: getattr(self, key) for key in _PARAM_KEYS}
        return {key: value for key, value in values.items() if value is not None}

    def params_of_request(self, given: Mapping[str, Any], max_tokens_limit: int) -> SamplingParams:
        """`given` over the model's defaults, for `tcdeploy generate` and the library.

        A default length is cut to `max_tokens_limit`, and a default minimum to the length; a given length is not cut.
        """
        defaults = {RENAMED_KEYS.get(key, key): value for key, value in self.sampling_params().items()}
        params: dict[str, Any] = {**DEFAULTS, **defaults}
        params["max_tokens"] = given.get("max_tokens", max(1, min(params["max_tokens"], max_tokens_limit)))
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        return SamplingParams(**{**params, **given})

    def with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the model's end-of-sequence ids as stop tokens, unless they ignore these."""
        if params.ignore_eos or not self.stop_token_ids:
            return params
        return dataclasses.replace(params, stop_token_ids=(*self.stop_token_ids, *params.stop_token_ids))

    def describe(self) -> str:
        """`temperature 0.6, top_k 20`, or "none"."""
        return ", ".join(f"{name} {value}" for name, value in self.sampling_params().items()) or "none"


_PARAM_KEYS = [
    item.name
    for item in dataclasses.fields(GenerationDefaults)
    if RENAMED_KEYS.get(item.name, item.name) in PARAM_CHECKS
]


def read_model_defaults(
    recipe: Recipe, config: PreTrainedConfig, architecture: Architecture, tokenizer: Any
) -> tuple[GenerationDefaults, tuple[Decision, ...]]:
    """As `resolve_defaults`, for the recipe's model. `tokenizer`: None if the command generates no text."""
    from tcdeploy.text.generation_config import config_stop_token_ids, read_generation_config  # imports transformers

    stop_id = getattr(tokenizer, "eos_token_id", None)
    return resolve_defaults(
        recipe.generation_config,
        read_generation_config(recipe.model, recipe.revision),
        config_stop_token_ids(config),
        architecture.vocab_size,
        None if tokenizer is None else () if stop_id is None else (stop_id,),
    )


def resolve_defaults(
    source: GenerationConfigSource,
    file: GenerationConfigFile | None,
    config_ids: Any,
    vocab_size: int,
    tokenizer_ids: tuple[int, ...] | None = None,
) -> tuple[GenerationDefaults, tuple[Decision, ...]]:
    """The defaults, and two or three lines of the printed plan.

    `config_ids`: `eos_token_id` of config.json. `tokenizer_ids`: of the tokenizer's `eos_token`; None if it was not
    loaded. Raises ModelError for an invalid value. With the source "none", an invalid file is a warning in the plan.
    """
    sampling: dict[str, Any] = {}
    stop_ids: tuple[int, ...] = ()
    is_unknown = file is not None and not file.is_downloaded
    problem = NOT_DOWNLOADED if is_unknown else ""
    try:
        if file is not None and file.problem:
            raise ModelError(f"{file.path} {file.problem}", HINT)
        if file is not None and not is_unknown:
            stop_ids = _parse_ids(file.path, file.values.get("eos_token_id"), HINT)
            sampling = _read_sampling(file) if source == "model" else {}
    except ModelError as error:
        if source == "model":
            raise
        problem = error.message
    stop_ids, stop_decision = _stop_tokens(stop_ids, config_ids, tokenizer_ids, vocab_size, problem)
    defaults = GenerationDefaults(**sampling, stop_token_ids=stop_ids)
    if source == "none":
        sampling_decision = Decision("sampling defaults", "none", "requested: --generation-config none")
    elif is_unknown:
        reason = f"{NOT_DOWNLOADED}; requests get tcdeploy's own defaults, also if the model has others"
        sampling_decision = Decision("sampling defaults", "unknown", reason, is_fallback=True)
    else:
        reason = f"the model's {FILE}" if file else f"the model has no {FILE}"
        sampling_decision = Decision("sampling defaults", defaults.describe(), reason)
    decisions: tuple[Decision, ...] = (sampling_decision, stop_decision)
    if file is not None and source == "model" and (ignored := _ignored_keys(file.values, defaults)):
        reason = "not supported or not used; text may differ from that of transformers"
        decisions += (Decision(f"ignored keys of {FILE}", ", ".join(ignored), reason, is_fallback=True),)
    return defaults, decisions


def _read_sampling(file: GenerationConfigFile) -> dict[str, Any]:
    """The parameters that the file sets, checked. `null` does not set one.

    With `do_sample: false`, invalid values of parameters that only sampling uses are left out.
    """
    path, values = file.path, file.values
    do_sample = values.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _invalid(path, "do_sample", do_sample, "true or false", HINT)
    params: dict[str, Any] = {}
    for name in _PARAM_KEYS:
        value, check = values.get(name), PARAM_CHECKS[RENAMED_KEYS.get(name, name)]
        number = _integral(value) if check.type_ is int else value
        if name == "top_k" and number == -1:
            number = 0  # vLLM's value for all tokens
        if value is not None and check.accepts(number):
            params[name] = number
        elif value is not None and (do_sample is not False or name not in SAMPLING_ONLY):
            raise _invalid(path, name, value, check.expected, HINT)
    if do_sample is False:
        params["temperature"] = 0.0
    elif do_sample:
        params.setdefault("temperature", 1.0)
    return params


def _ignored_keys(values: dict[str, Any], defaults: GenerationDefaults) -> list[str]:
    """Keys of the file that would change the text and do not apply."""
    is_greedy = values.get("do_sample") is False
    keys = UNSUPPORTED_KEYS if is_greedy else {**UNSUPPORTED_KEYS, **UNSUPPORTED_SAMPLING_KEYS}
    ignored = [key for key in keys if values.get(key) is not None and values[key] not in keys[key]]
    # invalid values, which only sampling requests would have used
    unused = [key for key in sorted(SAMPLING_ONLY) if values.get(key) is not None and getattr(defaults, key) is None]
    return ignored + unused


def _stop_tokens(
    file_ids: tuple[int, ...], config_ids: Any, tokenizer_ids: tuple[int, ...] | None, vocab_size: int, problem: str
) -> tuple[tuple[int, ...], Decision]:
    """The ids of generation_config.json, else of config.json, and that of the tokenizer.

    Ids outside the vocabulary are dropped: they are often a default of the model's class, and cannot be generated.
    """
    vocabulary = range(vocab_size)
    named = list(file_ids)
    ids, reason = [token_id for token_id in file_ids if token_id in vocabulary], f"the model's {FILE}"
    if not ids:
        from_config = _parse_ids(CONFIG, config_ids, CONFIG_HINT)
        named += from_config
        ids, reason = [token_id for token_id in from_config if token_id in vocabulary], CONFIG
    if tokenizer_ids is None:
        reason += "; generate and serve add the tokenizer's eos_token"
    elif added := [token_id for token_id in tokenizer_ids if token_id in vocabulary and token_id not in ids]:
        ids, reason = ids + added, f"{reason}, and the tokenizer's eos_token"
    dropped = [token_id for token_id in [*named, *(tokenizer_ids or ())] if token_id not in vocabulary]
    problems = [problem] if problem else []
    problems += [f"{_join(dropped)} not in the vocabulary of {vocab_size}"] if dropped else []
    reason = "; ".join([reason, *problems])
    return tuple(ids), Decision("stop tokens", _join(ids), reason, is_fallback=bool(problems))


def _parse_ids(path: str, value: Any, hint: str) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: one, a list, or None."""
    if value is None:
        return ()
    ids = [_integral(token_id) for token_id in (value if isinstance(value, list) else [value])]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise _invalid(path, "eos_token_id", value, "a token id or a list of token ids", hint)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ModelError(f"{path}: eos_token_id has {len(ids)} ids; the limit is {MAX_STOP_TOKEN_IDS}", hint)
    return tuple(dict.fromkeys(ids))


def _integral(value: Any) -> Any:
    """A float without a fraction, such as 50.0, as an int; other values as they are. Other servers accept it too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _invalid(path: str, name: str, value: Any, expected: str, hint: str) -> ModelError:
    return ModelError(f"{path}: {name} is {value!r:.80}; it must be {expected}", hint)


def _join(ids: list[int]) -> str:
    return ",".join(map(str, dict.fromkeys(ids))) or "none"
