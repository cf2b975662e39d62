"""A GGUF file alone has the config, the tokens of text and the tokens of answers that its model has as safetensors."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig

from tcdeploy.errors import ModelError
from tcdeploy.models.gguf import config as gguf_config
from tcdeploy.models.gguf import tokenizer as gguf_tokenizer
from tcdeploy.models.load import config_to_dict, load_config
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.text.tokenizer import load_tokenizer
from tests.exported_programs import exported_programs
from tests.formats.checkpoint import SIZES, change_json, write_dense
from tests.formats.gguf import FILE, metadata, store_model, write_file, write_gguf
from tests.formats.gguf_tokenizer import CORPUS, PATTERNS, TEMPLATE, TEXTS, byte_level, metadata_of, sentencepiece
from tests.formats.test_format_starts import tokens_of, tokens_of_transformers
from tests.formats.test_gguf_errors import LLAMA3, LONG, LONGROPE, SHORT, error_of, llama3_factors, write_with_factors
from tests.formats.test_gguf_models import FAMILIES, save_varied

ROWS = 560
# Entries that llama.cpp's converter writes for an architecture, and the value in config.json
WINDOW = {"sliding_window": 64}
ENTRIES: dict[str, dict[str, tuple[str, Any]]] = {
    "gemma2": {
        "gemma2.attention.sliding_window": ("U32", 64), "gemma2.attn_logit_softcapping": ("F32", 50.0),
        "gemma2.final_logit_softcapping": ("F32", 30.0),
    },
    "gemma3_text": {"gemma3.attention.sliding_window": ("U32", 64)},
    "phi3": {"phi3.attention.sliding_window": ("U32", 64)},
    "gpt_oss": {
        "gpt-oss.attention.sliding_window": ("U32", 64), "gpt-oss.expert_feed_forward_length": ("U32", 384),
        "gpt-oss.rope.scaling.type": ("STRING", "yarn"), "gpt-oss.rope.scaling.factor": ("F32", 32.0),
        "gpt-oss.rope.scaling.original_context_length": ("U32", 4096),
    },
    "qwen2_moe": {"qwen2moe.expert_shared_feed_forward_length": ("U32", 256)},
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-5},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 64},
    "qwen3_moe": {"norm_topk_prob": True}, "gemma2": {**WINDOW, "query_pre_attn_scalar": 32},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 32}, "phi3": WINDOW, "gpt_oss": WINDOW,
}  # fmt: skip
# What neither the weights nor the tokens of an answer depend on, or the file's own settings
UNCOMPARED = {
    "architectures", "dtype", "quantization_config", "transformers_version", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "pretraining_tp", "model_type",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@cache
def tokenizer_of(pre: str) -> Tokenizer:
    return byte_level(pre) if pre in PATTERNS else sentencepiece(has_prefix=pre != "gemma", strips=pre == "phi3")


def entries_of(pre: str) -> dict[str, tuple[str, Any]]:
    entries = metadata_of(tokenizer_of(pre), pre if pre in PATTERNS else "", ROWS)
    return entries | ({"tokenizer.ggml.add_space_prefix": ("BOOL", False)} if pre == "gemma" else {})


def write_alone(
    folder: Path, family: str, pre: str = "qwen2", kind: str = "Q8_0", parts: int = 1, **changes: Any
) -> tuple[Path, Path, dict[str, Any]]:
    """The path of a file without config.json, the folder of its model, and the file's dense weights."""
    settings = {"vocab_size": ROWS, **FAMILIES[family], **CHANGES.get(family, {}), **changes}
    source = save_varied(folder / "source", family, **settings)
    extra = {**ENTRIES.get(family, {}), **entries_of(pre)}
    dense = write_gguf(source, folder / "model", kind, parts, extra=extra)
    (folder / "model/config.json").unlink()
    return folder / "model" / (FILE if parts == 1 else f"model-00001-of-{parts:05}.gguf"), source, dense


def config_of(model: Path) -> dict[str, Any]:
    return config_to_dict(load_config(build_recipe({"model": str(model)}, environ={})))


def assert_same_config(family: str, folder: Path) -> None:
    path, source, _ = write_alone(folder, family)
    config, expected = config_of(path), config_to_dict(AutoConfig.from_pretrained(source))
    kind = {"mistral": "llama"}.get(family, family)  # the same architecture in GGUF
    names = config_to_dict(AutoConfig.for_model(kind)).keys() & expected.keys() - UNCOMPARED
    assert len(names) > 12 and config["model_type"] == kind
    assert {name: config.get(name) for name in names} == {name: expected[name] for name in names}
    assert config["eos_token_id"] == tokenizer_of("qwen2").token_to_id("<|end|>")
    assert config["bos_token_id"] == tokenizer_of("qwen2").token_to_id("<|begin|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    assert_same_config(family, tmp_path)


def assert_same_text(family: str, pre: str, folder: Path) -> None:
    path, _, _ = write_alone(folder, family, pre)
    expected = tokenizer_of(pre)
    tokenizer = load_tokenizer(build_recipe({"model": str(path)}, environ={}))
    for text in (*TEXTS, *CORPUS):
        ids = expected.encode(text).ids
        assert (text, tokenizer(text)["input_ids"]) == (text, ids)
        assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == expected.decode(ids)
    begin, end = ("<|begin|>", "<|end|>") if pre in PATTERNS else ("<s>", "</s>")
    assert (tokenizer.bos_token, tokenizer.eos_token) == (begin, end)
    messages = [{"role": "user", "content": " Hi\nyou "}, {"role": "assistant", "content": "Yes."}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    turns = "<|start|>user\n Hi\nyou <|end|>\n<|start|>assistant\nYes.<|end|>\n"
    assert tokenizer.chat_template == TEMPLATE and chat == f"{begin}{turns}<|start|>assistant\n"
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    assert ids == expected.encode(chat, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("family", "pre"),
    [
        ("qwen2", "qwen2"), ("qwen3", "qwen2"), ("llama", "llama-bpe"), ("mistral", "tekken"), ("gpt_oss", "gpt-4o"),
        ("llama", "gpt-2"), ("llama", "sentencepiece"), ("gemma2", "gemma"), ("gemma3_text", "gemma"),
        ("phi3", "phi3"), ("phi3", "gpt-4o"), ("phi3", "dbrx"), ("qwen2", "deepseek-r1-qwen"), ("llama", "smollm"),
    ],
)  # fmt: skip
def test_text_has_the_tokens_of_the_models_own_tokenizer(family: str, pre: str, tmp_path: Path) -> None:
    assert_same_text(family, pre, tmp_path)


@pytest.mark.parametrize(
    ("family", "pre", "kind", "parts"),
    [("llama", "llama-bpe", "Q8_0", 2), ("qwen3", "qwen2", "F16", 1), ("gemma3_text", "gemma", "Q4_0", 1)],
)
def test_tokens_are_those_of_the_model_also_from_packages(
    family: str, pre: str, kind: str, parts: int, tmp_path: Path
) -> None:
    path, source, dense = write_alone(tmp_path, family, pre, kind, parts, tie_word_embeddings=False)
    write_dense(source, dense, tmp_path / "dense")
    with exported_programs():
        tokens, first = tokens_of(path, tmp_path / "cache")
        shutil.rmtree(tmp_path / "cache-home")
        again, second = tokens_of(path.parent, tmp_path / "cache")
    assert tokens == again == tokens_of_transformers(tmp_path / "dense") and len({*tokens[0], *tokens[1]}) > 3
    assert first.engine.runner.has_model and not second.engine.runner.has_model


def test_config_json_beside_the_file_wins(tmp_path: Path) -> None:
    path, source, _ = write_alone(tmp_path, "llama", rms_norm_eps=1e-5)
    shutil.copy(source / "config.json", path.parent)
    change_json(path.parent / "config.json", {"max_position_embeddings": 77})
    assert config_of(path)["max_position_embeddings"] == 77
    assert not (tmp_path / "cache-home").exists()


def test_another_file_with_the_same_path_has_another_config(tmp_path: Path) -> None:
    path, source, _ = write_alone(tmp_path, "llama")
    assert config_of(path)["max_position_embeddings"] == 256
    change_json(source / "config.json", {"max_position_embeddings": 512})
    shutil.rmtree(path.parent)
    write_gguf(source, path.parent, "Q8_0", extra=entries_of("qwen2"))
    (path.parent / "config.json").unlink()
    assert config_of(path)["max_position_embeddings"] == 512


def write_scaled(
    folder: Path, family: str, rope: dict[str, Any], tensors: dict[str, list[float]], **extra: Any
) -> Path:
    model = write_with_factors(family, rope, tensors, folder, {**entries_of("qwen2"), **extra})
    (model / "config.json").unlink()
    return model


def test_the_scaling_of_llama_3_follows_from_its_factors(tmp_path: Path) -> None:
    rope = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    expected = AutoConfig.for_model("llama", **{**SIZES, "rope_parameters": dict(rope)})
    model = write_scaled(tmp_path, "llama", dict(rope), {"rope_freqs.weight": llama3_factors(expected, 500000.0)})
    assert config_of(model)["rope_parameters"] == rope


def test_the_scaling_of_phi_3_is_read(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
    original = {"phi3.rope.scaling.original_context_length": ("U32", 64)}
    config = config_of(write_scaled(tmp_path, "phi3", LONGROPE, factors, **original))
    expected = {**LONGROPE, "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}
    assert config["rope_parameters"] == expected and config["original_max_position_embeddings"] == 64


def test_the_scaling_of_gemma_3_is_that_of_layers_without_a_window(tmp_path: Path) -> None:
    scaling = {"gemma3.rope.scaling.type": ("STRING", "linear"), "gemma3.rope.scaling.factor": ("F32", 8.0)}
    config = config_of(write_scaled(tmp_path, "gemma3_text", {}, {}, **ENTRIES["gemma3_text"], **scaling))
    assert config["rope_parameters"]["full_attention"]["factor"] == 8
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path) -> None:
    stops = {"tokenizer.ggml.eot_token_id": ("U32", 7), "tokenizer.ggml.eom_token_id": ("U32", 2)}
    end = {"tokenizer.ggml.eos_token_id": ("U32", 2)}
    assert config_of(write_scaled(tmp_path, "qwen3", {}, {}, **stops, **end))["eos_token_id"] == [2, 7]


GGML = "tokenizer.ggml"
REFUSED: dict[str, tuple[dict[str, tuple[str, Any] | None], str]] = {
    "another kind of tokenizer": ({f"{GGML}.model": ("STRING", "t5")}, f"has {GGML}.model = t5, which is not"),
    "an unknown expression": ({f"{GGML}.pre": ("STRING", "new")}, f"has {GGML}.pre = new, which is not supported"),
    "no expression": ({f"{GGML}.pre": None}, f"has {GGML}.pre = None"),
    "no tokens": ({f"{GGML}.tokens": None}, f"has no list {GGML}.tokens in its metadata"),
    "no merges": ({f"{GGML}.merges": None}, f"has no list {GGML}.merges in its metadata"),
    "no scores": ({f"{GGML}.model": ("STRING", "llama")}, f"has no list {GGML}.scores in its metadata"),
    "types of other tokens": ({f"{GGML}.token_type": ("I32", [1])}, f"560 tokens, but 1 of {GGML}.token_type"),
    "no such token": ({f"{GGML}.eos_token_id": ("U32", 560)}, f"has {GGML}.eos_token_id = 560, but 560 tokens"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "no llama.attention.layer_norm_rms_epsilon in"),
    "no heads": ({"llama.attention.head_count": ("U32", 0)}, "has 0 as llama.attention.head_count in its metadata"),
    "text for a number": ({"llama.block_count": ("STRING", "two")}, "has llama.block_count = 'two', which is not a"),
    "one type": ({f"{GGML}.token_type": ("U32", 1)}, f"has {GGML}.token_type = 1, which is no list"),
    "heads by layer": ({"llama.attention.head_count": ("U32", [8, 8])}, "llama.attention.head_count for each layer"),
    "partial rotation": ({"llama.rope.dimension_count": ("U32", 16)}, "llama.rope.dimension_count = 16, but heads"),
    "another scaling": ({"llama.rope.scaling.type": ("STRING", "su")}, "llama.rope.scaling.type = su, which is not"),
    "another architecture": ({"general.architecture": ("STRING", "mamba")}, "the architecture mamba, which is not"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_names_the_key_and_the_next_step(reason: str, tmp_path: Path) -> None:
    changes, message = REFUSED[reason]
    path, source, _ = write_alone(tmp_path, "llama")
    config = json.loads((source / "config.json").read_text())
    entries = {**metadata(config, 7), **entries_of("qwen2"), **changes}
    write_file(
        path, {key: value for key, value in entries.items() if value is not None}, store_model(source, "Q8_0")[0]
    )
    error = error_of(path)
    assert error.message.startswith(str(path)) and message in error.message
    assert "beside the file" in error.hint or reason == "another architecture"


def test_an_expression_that_transformers_replaces_is_refused(tmp_path: Path) -> None:
    path, _, _ = write_alone(tmp_path, "qwen2", "llama-bpe")
    assert error_of(path).message.endswith("has tokenizer.ggml.pre = llama-bpe, which is not supported for qwen2")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path, _, _ = write_alone(tmp_path, "llama", parts=3)
    path.with_name("model-00003-of-00003.gguf").unlink()
    assert error_of(path).message == f"{path} lacks model-00003-of-00003.gguf, a part of its weights"


def test_a_folder_that_lost_a_file_is_made_again(tmp_path: Path) -> None:
    path, _, _ = write_alone(tmp_path, "llama")
    config = config_of(path)
    next(tmp_path.glob("cache-home/tcdeploy-gguf/*/tokenizer.json")).unlink()
    assert config_of(path) == config
    assert len([*tmp_path.glob("cache-home/tcdeploy-gguf/*/*.json")]) == 3


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write_alone(tmp_path, "llama")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    error = error_of(path)
    assert "or store its config" in error.message and "XDG_CACHE_HOME" in error.hint


VOCABULARY, ROPE = gguf_tokenizer._vocabulary, gguf_config._rope


def _shifted_bytes(*arguments: Any) -> gguf_tokenizer.Vocabulary:
    tokens, types, scores = VOCABULARY(*arguments)
    return gguf_tokenizer.Vocabulary([*tokens[:3], *tokens[4:259], tokens[3], *tokens[259:]], types, scores)


def _without_theta(*arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in ROPE(*arguments).items() if name != "rope_theta"}


def test_mistakes_are_found_by_these_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"llama\.rope\.freq_base"):
        patch.setattr(gguf_config, "_rope", _without_theta)
        assert_same_config("llama", tmp_path / "rope")
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(gguf_config, "STOP_KEYS", ("bos_token_id",))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "eos"))
        assert_same_config("llama", tmp_path / "eos")
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(gguf_tokenizer, "_vocabulary", _shifted_bytes)
        assert_same_text("llama", "sentencepiece", tmp_path / "bytes")
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setitem(gguf_tokenizer.SPLITS, "llama-bpe", gguf_tokenizer.SPLITS["qwen2"])
        assert_same_text("llama", "llama-bpe", tmp_path / "split")
