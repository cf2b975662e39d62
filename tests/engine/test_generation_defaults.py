"""Defaults of a model's generation_config.json: which values apply, and which files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.generation_defaults import (
    MAX_STOP_TOKEN_IDS,
    UNSUPPORTED_KEYS,
    UNSUPPORTED_SAMPLING_KEYS,
    GenerationDefaults,
    resolve_defaults,
)
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import ModelError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.text.generation_config import GenerationConfigFile, config_stop_token_ids, read_generation_config

VOCAB_SIZE, CONFIG_ID = 100, 7
COMMIT = 40 * "a"


def resolve(values: dict[str, Any] | None, source: Any = "model", config_ids: Any = CONFIG_ID) -> GenerationDefaults:
    file = None if values is None else GenerationConfigFile("folder/generation_config.json", values)
    return resolve_defaults(source, file, config_ids, VOCAB_SIZE)[0]


# Values


def test_the_parameters_of_the_file_are_the_defaults() -> None:
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    lengths = {"max_new_tokens": 64, "min_new_tokens": 2}
    defaults = resolve({**values, **lengths, "do_sample": True, "eos_token_id": [3, 5, 3]})
    assert defaults.sampling_params() == {**values, **lengths}
    assert defaults.stop_token_ids == (3, 5)


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({"temperature": 0.6, "do_sample": True}, 0.6), ({"temperature": 0.6}, 0.6), ({"do_sample": True}, 1.0),
        ({"temperature": 0.6, "do_sample": False}, 0.0), ({"do_sample": False}, 0.0), ({}, None),
        ({"temperature": None, "do_sample": None}, None), ({"temperature": 1}, 1),
    ],
)  # fmt: skip
def test_do_sample_selects_the_default_temperature(values: dict[str, Any], temperature: float | None) -> None:
    assert resolve(values).temperature == temperature


def test_a_request_takes_the_defaults_and_cuts_default_lengths_only() -> None:
    defaults = GenerationDefaults(temperature=0.6, max_new_tokens=50, min_new_tokens=6, stop_token_ids=(2,))
    expected = SamplingParams(temperature=0.6, max_tokens=50, min_tokens=6)
    assert defaults.params_of_request({}, 64) == expected
    assert defaults.params_of_request({}, 30) == replace(expected, max_tokens=30)
    assert defaults.params_of_request({"max_tokens": 70}, 30) == replace(expected, max_tokens=70), "the engine refuses"
    assert defaults.params_of_request({"max_tokens": 4}, 64) == replace(expected, max_tokens=4, min_tokens=4)
    assert defaults.params_of_request({"temperature": 0.0}, 64).temperature == 0.0
    assert GenerationDefaults().params_of_request({}, 100) == SamplingParams(max_tokens=100)
    assert GenerationDefaults().params_of_request({}, 0) == SamplingParams(max_tokens=1), "the engine refuses"


def test_stop_tokens_are_added_unless_they_are_ignored() -> None:
    defaults, params = GenerationDefaults(stop_token_ids=(2, 3)), SamplingParams(stop_token_ids=[7])
    assert defaults.with_stop_tokens(params) == SamplingParams(stop_token_ids=(2, 3, 7))
    ignoring = SamplingParams(stop_token_ids=[7], ignore_eos=True)
    assert defaults.with_stop_tokens(ignoring) == ignoring


def test_minus_one_as_top_k_keeps_all_tokens() -> None:
    assert resolve({"top_k": -1}).top_k == 0


@pytest.mark.parametrize("values", [None, {}, {"temperature": None, "max_length": 20, "num_beams": 4}])
def test_a_file_that_sets_nothing_leaves_the_defaults_of_the_server(values: dict[str, Any] | None) -> None:
    defaults = resolve(values)
    assert defaults.sampling_params() == {} and defaults.describe() == "none"


@pytest.mark.parametrize(
    ("in_file", "in_config", "expected"),
    [
        (5, 7, (5,)), ([5, 6], 7, (5, 6)), (None, 7, (7,)), ([], [7, 8], (7, 8)), (None, None, ()), (0, 7, (0,)),
        (None, [7, VOCAB_SIZE], (7,)), (None, VOCAB_SIZE, ()),
    ],
)  # fmt: skip
def test_end_of_sequence_ids_are_those_of_the_file_and_else_of_the_config(
    in_file: Any, in_config: Any, expected: tuple[int, ...]
) -> None:
    assert resolve({"eos_token_id": in_file}, config_ids=in_config).stop_token_ids == expected


@pytest.mark.parametrize(
    ("in_file", "in_config", "value", "dropped"),
    [
        (None, [7, 50256], "7", "50256"), (None, -1, "none", "-1"), ([5, -1, VOCAB_SIZE], 7, "5", f"-1,{VOCAB_SIZE}"),
        (-1, 7, "7", "-1"), (VOCAB_SIZE, [7, -1], "7", f"{VOCAB_SIZE},-1"),
    ],
)  # fmt: skip
def test_ids_outside_the_vocabulary_are_dropped_with_a_warning(
    in_file: Any, in_config: Any, value: str, dropped: str
) -> None:
    """Other servers accept such files; config.json often has an id of the class's defaults, or -1 for none."""
    file = GenerationConfigFile("generation_config.json", {"eos_token_id": in_file})
    _, (_, decision) = resolve_defaults("model", file, in_config, VOCAB_SIZE)
    assert decision.is_fallback and decision.value == value
    assert f"{dropped} not in the vocabulary of {VOCAB_SIZE}" in decision.reason


def test_floats_without_a_fraction_are_integers() -> None:
    defaults = resolve({"top_k": 50.0, "max_new_tokens": 64.0, "eos_token_id": [3.0, 5]})
    assert defaults == GenerationDefaults(top_k=50, max_new_tokens=64, stop_token_ids=(3, 5))
    assert type(defaults.top_k) is type(defaults.max_new_tokens) is type(defaults.stop_token_ids[0]) is int
    assert resolve({"top_k": -1.0}).top_k == 0


def test_parameters_that_only_sampling_uses_are_not_checked_if_do_sample_is_false() -> None:
    invalid = {"temperature": -1, "top_p": -1, "top_k": -5, "min_p": 2}
    assert resolve({**invalid, "do_sample": False}) == GenerationDefaults(temperature=0.0, stop_token_ids=(CONFIG_ID,))
    assert resolve({"top_p": 0.9, "do_sample": False}).top_p == 0.9, "the default of requests that set a temperature"
    with pytest.raises(ModelError, match="repetition_penalty"):
        resolve({"repetition_penalty": 0, "do_sample": False})


@pytest.mark.parametrize("source", ["model", "none"])
@pytest.mark.parametrize(
    ("in_file", "in_tokenizer", "expected"),
    [(2, (40,), (2, 40)), ([2, 40], (40,), (2, 40)), (2, (), (2,)), (None, (40,), (CONFIG_ID, 40))],
)
def test_the_end_of_sequence_token_of_the_tokenizer_is_a_stop_token_too(
    source: Any, in_file: Any, in_tokenizer: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    file = GenerationConfigFile("generation_config.json", {"eos_token_id": in_file})
    defaults, (_, decision) = resolve_defaults(source, file, CONFIG_ID, VOCAB_SIZE, in_tokenizer)
    assert defaults.stop_token_ids == expected and decision.value == ",".join(map(str, expected))
    assert ("tokenizer's eos_token" in decision.reason) == (expected[-1] == 40 and in_file != [2, 40])
    assert not decision.is_fallback


def test_an_end_of_sequence_token_of_the_tokenizer_outside_the_vocabulary_is_a_warning() -> None:
    defaults, (_, decision) = resolve_defaults("model", None, 7, VOCAB_SIZE, (VOCAB_SIZE,))
    assert defaults.stop_token_ids == (7,) and decision.is_fallback and str(VOCAB_SIZE) in decision.reason


def test_a_plan_without_the_tokenizer_says_that_its_token_is_added_later() -> None:
    _, (_, decision) = resolve_defaults("model", None, 7, VOCAB_SIZE)
    assert decision.reason == "config.json; generate and serve add the tokenizer's eos_token"


def test_none_ignores_the_sampling_parameters_and_keeps_the_end_of_sequence_ids() -> None:
    """A chat model that lost the end of its turn would not stop."""
    defaults = resolve({"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 5]}, "none")
    assert defaults == GenerationDefaults(stop_token_ids=(3, 5))
    assert resolve({"temperature": "hot", "eos_token_id": 3}, "none").stop_token_ids == (3,)


def test_the_plan_shows_the_defaults() -> None:
    file = GenerationConfigFile("generation_config.json", {"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 5]})
    _, decisions = resolve_defaults("model", file, CONFIG_ID, VOCAB_SIZE)
    assert [(item.name, item.value) for item in decisions] == [
        ("sampling defaults", "temperature 0.6, top_k 20"), ("stop tokens", "3,5")
    ]  # fmt: skip
    assert not any(decision.is_fallback for decision in decisions)


# Keys that are not supported


def ignored(values: dict[str, Any], source: Any = "model") -> list[str]:
    """The keys that the plan shows as ignored."""
    file = GenerationConfigFile("generation_config.json", values)
    decisions = resolve_defaults(source, file, CONFIG_ID, VOCAB_SIZE)[1]
    for decision in decisions:
        if decision.name == "ignored keys of generation_config.json":
            assert decision.is_fallback
            return decision.value.split(", ")
    return []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [1, 2]), ("begin_suppress_tokens", [0]), ("bad_words_ids", [[3]]), ("min_length", 5),
        ("no_repeat_ngram_size", 3), ("stop_strings", ["</s>"]), ("stop_strings", "end"),
        ("sequence_bias", [[[1], 2.0]]), ("typical_p", 0.9), ("epsilon_cutoff", 1e-4), ("eta_cutoff", 1e-3),
        ("top_h", 0.4), ("forced_bos_token_id", 0), ("forced_eos_token_id", 2), ("num_beams", 4),
        ("penalty_alpha", 0.6), ("dola_layers", "low"),
        ("guidance_scale", 1.5), ("max_time", 3.0), ("presence_penalty", 1.5), ("token_healing", True),
    ],
)  # fmt: skip
def test_a_key_that_changes_the_text_and_is_not_supported_is_a_warning(key: str, value: Any) -> None:
    assert ignored({key: value, "top_k": 3}) == [key]
    assert ignored({key: value}, "none") == [], "the file's sampling defaults are ignored on request"


def test_values_that_change_nothing_are_no_warning() -> None:
    from transformers import GenerationConfig

    assert ignored(GenerationConfig().to_dict()) == []
    all_keys = {**UNSUPPORTED_KEYS, **UNSUPPORTED_SAMPLING_KEYS}
    assert ignored(dict.fromkeys(all_keys)) == []
    neutral = {key: values[0] for key, values in all_keys.items() if values}
    assert ignored({**neutral, "num_beams": 1.0, "transformers_version": "4.0.0", "length_penalty": 2.0}) == []


def test_keys_that_only_sampling_uses_are_no_warning_if_do_sample_is_false() -> None:
    assert ignored({"typical_p": 0.9, "eta_cutoff": 0.1, "do_sample": False}) == []
    assert ignored({"top_p": -1, "num_beams": 2, "do_sample": False}) == ["num_beams", "top_p"], "an invalid top_p"


# Files that are refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", "0.6"), ("temperature", float("nan")), ("temperature", True),
        ("top_p", 2), ("top_p", -0.5), ("top_p", [0.9]), ("top_k", -2), ("top_k", 50.5), ("top_k", 2**40),
        ("min_p", 1.0), ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", float("inf")),
        ("max_new_tokens", 0), ("max_new_tokens", 1.5), ("do_sample", "yes"), ("do_sample", 1),
        ("eos_token_id", "</s>"), ("eos_token_id", True), ("eos_token_id", [3, None]), ("eos_token_id", 3.5),
        ("eos_token_id", [[3]]), ("eos_token_id", {"id": 3}), ("eos_token_id", float("nan")),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused_with_file_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(ModelError) as error:
        resolve({name: value})
    assert error.value.message.startswith(f"folder/generation_config.json: {name} is {value!r}; it must be ")
    assert "--generation-config none" in error.value.hint
    assert resolve({name: value}, "none").sampling_params() == {}, "the hint does not help"


def test_too_many_end_of_sequence_ids_are_refused() -> None:
    with pytest.raises(ModelError, match=f"the limit is {MAX_STOP_TOKEN_IDS}"):
        resolve({"eos_token_id": list(range(MAX_STOP_TOKEN_IDS + 1))})


def test_an_invalid_id_in_config_json_is_refused_by_its_name() -> None:
    with pytest.raises(ModelError, match=r"^config\.json: eos_token_id is 'x'"):
        resolve(None, config_ids="x")


# Reading


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "cannot be read"), (b"", "cannot be read"), (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"), (b"[]", "is not a JSON object"), (b"null", "is not a JSON object"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_json_object_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "generation_config.json"
    path.write_bytes(content)
    file = read_generation_config(str(tmp_path), None)
    with pytest.raises(ModelError) as error:
        resolve_defaults("model", file, CONFIG_ID, VOCAB_SIZE)
    assert error.value.message.startswith(f"{path} {problem}") and "--generation-config none" in error.value.hint
    defaults, (_, decision) = resolve_defaults("none", file, CONFIG_ID, VOCAB_SIZE)
    assert defaults.stop_token_ids == (CONFIG_ID,) and decision.is_fallback and problem in decision.reason


def test_an_unreadable_file_is_an_error_and_not_treated_as_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_generation_config(str(tmp_path), None) is None
    (tmp_path / "generation_config.json").symlink_to("gone")
    file = read_generation_config(str(tmp_path), None)
    assert file is not None and file.problem.startswith("cannot be read")


def test_the_file_of_the_embedded_model_sets_only_its_end_of_sequence_id() -> None:
    file = read_generation_config("builtin:tiny", None)
    assert file is not None
    defaults, _ = resolve_defaults("model", file, None, 2048)
    assert defaults == GenerationDefaults(stop_token_ids=(2,))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `someone/model` in a Hub cache, which has an empty snapshot. The Hub is offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--model"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


def test_the_file_of_a_hub_model_is_found_in_the_hubs_cache(repository: Path) -> None:
    (repository / "snapshots" / COMMIT / "generation_config.json").write_text('{"top_k": 3}')
    file = read_generation_config("someone/model", None)
    assert file is not None and file.values == {"top_k": 3} and file.is_downloaded


def test_a_file_whose_absence_the_hubs_cache_records_does_not_exist(repository: Path) -> None:
    absences = repository / ".no_exist" / COMMIT
    absences.mkdir(parents=True)
    (absences / "generation_config.json").touch()
    assert read_generation_config("someone/model", None) is None


@pytest.mark.parametrize("source", ["model", "none"])
def test_a_file_that_was_not_downloaded_is_unknown_and_a_warning(repository: Path, source: Any) -> None:
    file = read_generation_config("someone/model", None)
    defaults, (sampling, stops) = resolve_defaults(source, file, CONFIG_ID, VOCAB_SIZE)
    assert defaults == GenerationDefaults(stop_token_ids=(CONFIG_ID,))
    assert stops.is_fallback and "generation_config.json was not downloaded" in stops.reason
    assert sampling.is_fallback == (source == "model")
    if source == "model":
        assert sampling.value == "unknown" and "generation_config.json was not downloaded; requests" in sampling.reason


def test_the_text_config_has_the_ids_of_a_model_with_several_parts() -> None:
    text = SimpleNamespace(eos_token_id=[1, 106])
    assert config_stop_token_ids(SimpleNamespace(get_text_config=lambda: text)) == [1, 106]  # type: ignore[arg-type]
    both = SimpleNamespace(eos_token_id=5, get_text_config=lambda: text)
    assert config_stop_token_ids(both) == 5  # type: ignore[arg-type]


def test_the_recipe_takes_the_source_from_flag_environment_and_file(tmp_path: Path) -> None:
    assert build_recipe({"model": "x"}, environ={}).generation_config == "model"
    assert build_recipe({"model": "x"}, environ={"TCDEPLOY_GENERATION_CONFIG": "none"}).generation_config == "none"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: x\ngeneration_config: none\n")
    assert build_recipe({}, str(recipe), environ={}).generation_config == "none"


def test_the_plan_key_does_not_depend_on_the_file(tmp_path: Path) -> None:
    from tcdeploy.start.decide import decide
    from tests.model_families import save_config

    folder = save_config("llama", tmp_path)
    keys = set()
    for values, source in (({}, "model"), ({"top_k": 3, "eos_token_id": [3, 4]}, "model"), ({"top_k": 3}, "none")):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        flags = {"model": folder, "load_format": "dummy", "generation_config": source}
        planned = decide(build_recipe(flags, environ={}))
        keys.add(planned.plan.key)
        names = [decision.name for decision in planned.plan.decisions]
        assert names[-2:] == ["sampling defaults", "stop tokens"]
    assert len(keys) == 1
