"""Each defect of a GGUF file, and each disagreement with config.json, is an error that names it and the next step."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tcdeploy.errors import ModelError
from tests.formats.checkpoint import SIZES, change_json, save_source
from tests.formats.gguf import FILE, StoredTensor, metadata, store_model, text, write_file, write_gguf
from tests.formats.test_readers import plan

Entries = dict[str, tuple[str, Any]]
Stored = dict[str, StoredTensor]
NORM, QUERY = "blk.1.attn_norm.weight", "blk.1.attn_q.weight"
ROPE = StoredTensor("F32", (16,), bytes(64))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "model", tie_word_embeddings=False)


def error_of(model: Path, **flags: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        plan(model, **flags)
    assert caught.value.hint
    return caught.value


CONTENTS: dict[str, tuple[Callable[[Entries, Stored], object], str]] = {
    "a type that is not read": (
        lambda entries, stored: stored.update({QUERY: StoredTensor("IQ2_XXS", (256, 256), bytes(256 * 66))}),
        f"{QUERY} in FILE has the type IQ2_XXS, which is not supported",
    ),
    "rows of partial blocks": (
        lambda entries, stored: stored.update({QUERY: StoredTensor("Q8_0", (64, 240), bytes(64 * 255))}),
        f"FILE is damaged: {QUERY} of the type Q8_0 has the shape [64, 240]",
    ),
    "an unknown tensor": (
        lambda entries, stored: stored.update({"blk.0.attn_magic.weight": stored[NORM]}),
        "FILE has tensors whose names the architecture llama lacks (1): blk.0.attn_magic.weight",
    ),
    "rotary factors without rope scaling": (
        lambda entries, stored: stored.update({"rope_freqs.weight": ROPE}),
        "FILE has rope_freqs.weight, but config.json has the rope_type default, not llama3",
    ),
    "no head": (
        lambda entries, stored: stored.pop("output.weight"),
        "the checkpoint of MODEL lacks 1 of the model's tensors: lm_head.weight",
    ),
    "a layer too many": (
        lambda entries, stored: stored.update({"blk.2.attn_norm.weight": stored[NORM]}),
        "the checkpoint of MODEL has tensors that the model does not use (1): model.layers.2.input_layernorm.weight",
    ),
    "fewer rows": (
        lambda entries, stored: stored.update({QUERY: StoredTensor("Q8_0", (128, 256), bytes(128 * 272))}),
        "model.layers.1.self_attn.q_proj.weight ([128, 256] instead of [256, 256])",
    ),
    "rows that are no heads": (
        lambda entries, stored: stored.update({QUERY: StoredTensor("Q8_0", (250, 256), bytes(250 * 272))}),
        "q_proj.weight of MODEL is stored as uint8 [250, 272]; it must have the rows of 8 heads",
    ),
    "experts in a matrix": (
        lambda entries, stored: stored.update({"blk.1.ffn_up_exps.weight": stored[QUERY]}),
        "experts.up_exps of MODEL is stored as uint8 [256, 272]; it must be the weights [experts, rows, columns]",
    ),
    "another architecture": (
        lambda entries, stored: entries.update({"general.architecture": ("STRING", "mamba")}),
        "FILE has the architecture mamba, which is not supported in GGUF",
    ),
    "no architecture": (
        lambda entries, stored: entries.pop("general.architecture"), "FILE has the architecture None",
    ),
    "the architecture of another config": (
        lambda entries, stored: entries.update({"general.architecture": ("STRING", "qwen3")}),
        "FILE has the architecture qwen3, but config.json has the model_type llama",
    ),
    "other heads": (
        lambda entries, stored: entries.update({"llama.attention.head_count": ("U32", 4)}),
        "FILE has llama.attention.head_count = 4, but config.json has num_attention_heads = 8",
    ),
    "other rotary frequencies": (
        lambda entries, stored: entries.update({"llama.rope.freq_base": ("F32", 500000.0)}),
        "FILE has llama.rope.freq_base = 500000, but config.json has rope_theta = 10000",
    ),
    "one of several files": (
        lambda entries, stored: entries.update({"split.count": ("U32", 3)}), "FILE is one of 3 files",
    ),
    "an impossible alignment": (
        lambda entries, stored: entries.update({"general.alignment": ("U32", 0)}),
        "FILE is damaged: general.alignment is 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", CONTENTS)
def test_a_defect_of_the_content_is_an_error_of_the_plan(defect: str, source: Path, tmp_path: Path) -> None:
    change, message = CONTENTS[defect]
    config = json.loads((source / "config.json").read_text())
    (stored, _), entries = store_model(source, "Q8_0"), metadata(config, 7)
    change(entries, stored)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    write_file(folder / FILE, entries, stored)
    assert message.replace("FILE", str(folder / FILE)).replace("MODEL", str(folder)) in error_of(folder).message


UP, UP_BIAS, GATE_UP = "blk.1.ffn_up_exps.weight", "blk.1.ffn_up_exps.bias", "blk.1.ffn_gate_up_exps.weight"
EXPERTS: dict[str, tuple[str, Callable[[Stored], object], str]] = {
    "a projection is missing": (
        "qwen3_moe", lambda stored: stored.pop(UP), "the checkpoint of MODEL lacks model.layers.1.mlp.experts.up_exps",
    ),
    "a projection is stored twice": (
        "qwen3_moe",
        lambda stored: stored.update({GATE_UP: StoredTensor("F32", (4, 256, 256), bytes(1 << 20))}),
        "it must not be there beside model.layers.1.mlp.experts.",
    ),
    "biases are transposed": (
        "gpt_oss", lambda stored: stored.update({UP_BIAS: stored[UP_BIAS]._replace(shape=(384, 4))}),
        "experts.up_exps_bias of MODEL is stored as float32 [384, 4]; it must have the shape [4, 384]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", EXPERTS)
def test_a_defect_of_stacked_experts_is_an_error_of_the_plan(defect: str, tmp_path: Path) -> None:
    family, change, message = EXPERTS[defect]
    model = save_source(tmp_path / "source", family)
    stored, _ = store_model(model, "Q8_0")
    change(stored)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    write_file(folder / FILE, metadata(json.loads((model / "config.json").read_text()), 7), stored)
    assert message.replace("MODEL", str(folder)) in error_of(folder).message


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda content: content[:-5000], "is damaged: it ends before the end of "),
    "a truncated header": (lambda content: content[:500], "is damaged: its header ends early or has invalid text"),
    "nothing": (lambda content: b"", "is not a GGUF file: it does not begin with GGUF"),
    "another file": (lambda content: b"GGML" + content[4:], "is not a GGUF file"),
    "version 1": (lambda content: content[:4] + b"\1\0\0\0" + content[8:], "has version 1 of GGUF"),
    "big-endian": (lambda content: content[:4] + b"\0\0\0\3" + content[8:], "is big-endian, which is not supported"),
    "a name of one tensor for two": (
        lambda content: content.replace(text("blk.1.attn_k.weight"), text("blk.1.attn_v.weight")),
        "is damaged: it has the tensor blk.1.attn_v.weight twice",
    ),
    "a type of metadata": (
        lambda content: content.replace(text("llama.block_count") + b"\4", text("llama.block_count") + b"\x40"),
        "a value of its metadata has the unknown type 64",
    ),
    "a pointer": (lambda content: b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    "endless tensors": (lambda content: content[:8] + b"\xff" * 8 + content[16:], "is damaged: "),
    "an endless string": (
        lambda content: content.replace(text("llama"), b"\xff" * 8 + b"llama"),
        "its header ends early or has invalid text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", BYTES)
def test_a_damaged_file_is_an_error_of_the_plan(defect: str, source: Path, tmp_path: Path) -> None:
    change, message = BYTES[defect]
    write_gguf(source, tmp_path / "model", "Q8_0")
    path = tmp_path / "model" / FILE
    content = path.read_bytes()
    assert change(content) != content
    path.write_bytes(change(content))
    assert str(path) in error_of(path).message and message in error_of(path).message


def test_every_part_of_a_model_is_needed(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "model", "Q8_0", parts=3)
    assert plan(tmp_path / "model").architecture.schemes
    (tmp_path / "model/model-00002-of-00003.gguf").unlink()
    problem = f"{tmp_path / 'model'} lacks model-00002-of-00003.gguf, a part of its weights"
    assert error_of(tmp_path / "model").message == problem


def test_a_tensor_in_two_parts_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_gguf(source, folder, "Q8_0", parts=2)
    shutil.copy(folder / "model-00001-of-00002.gguf", folder / "model-00002-of-00002.gguf")
    assert "is in two files: " in error_of(folder).message


def test_a_folder_with_several_models_needs_the_name_of_one(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_gguf(source, folder, "Q8_0")
    shutil.copy(folder / FILE, folder / "other.gguf")
    shutil.copy(folder / FILE, folder / "mmproj-model.gguf")
    error = error_of(folder)
    assert error.message == f"{folder} has several GGUF models: model.gguf, other.gguf"
    assert error.hint == f"pass one of them: {folder}/model.gguf"
    assert plan(folder / "other.gguf").architecture.schemes


def test_a_file_that_does_not_exist_is_no_id_of_the_hub() -> None:
    assert error_of(Path("missing.gguf")).message == "file missing.gguf does not exist"


def test_a_multimodal_config_beside_a_text_model_is_refused(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "gemma3_text")
    write_gguf(source, tmp_path / "model", "Q8_0")
    path = tmp_path / "model/config.json"
    text_config = json.loads(path.read_text())
    path.unlink()
    change_json(path, {"model_type": "gemma3", "text_config": text_config, "architectures": ["Gemma3ForConditional"]})
    error = error_of(tmp_path / "model")
    assert error.message.endswith(
        "has the architecture gemma3, but config.json has the model_type gemma3 of a multimodal model"
    )
    assert error.hint == "replace config.json by the text_config in it"


def test_settings_of_other_weights_in_config_json_are_replaced(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "model", "Q8_0")
    change_json(tmp_path / "model/config.json", {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert plan(tmp_path / "model").architecture.quantisation == "gguf"


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG, SHORT = [1.0 + index / 4 for index in range(16)], [1.0 + index / 8 for index in range(16)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": LONG, "short_factor": SHORT}


def write_with_factors(
    family: str, rope: dict[str, Any], factors: dict[str, list[float]], folder: Path, extra: Entries | None = None
) -> Path:
    source = save_source(folder / "source", family, rope_parameters=rope, original_max_position_embeddings=64)
    config = json.loads((source / "config.json").read_text())
    stored, _ = store_model(source, "Q8_0")
    for name, values in factors.items():
        stored[name] = StoredTensor("F32", (len(values),), struct.pack(f"<{len(values)}f", *values))
    (folder / "model").mkdir()
    shutil.copy(source / "config.json", folder / "model")
    write_file(folder / "model" / FILE, {**metadata(config, 7), **(extra or {})}, stored)
    return folder / "model"


def llama3_factors(config: PreTrainedConfig, theta: float = 10000.0) -> list[float]:
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return list((1.0 / theta ** (torch.arange(0, 32, 2) / 32) / scaled).tolist())


@pytest.mark.parametrize("change", [1.0, 1.01])
def test_rotary_factors_of_llama_3_must_be_those_of_the_config(change: float, tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **{**SIZES, "rope_parameters": LLAMA3})
    factors = llama3_factors(config)
    assert factors[0] == pytest.approx(1) and factors[-1] == pytest.approx(8) and len({*factors}) > 4
    factors[-1] *= change
    model = write_with_factors("llama", LLAMA3, {"rope_freqs.weight": factors}, tmp_path)
    if change == 1:
        assert plan(model).architecture.schemes
    else:
        message = "has rope_freqs.weight with other rotary factors than config.json describes"
        assert error_of(model).message == f"{model / FILE} {message}"


@pytest.mark.parametrize("is_swapped", [False, True])
def test_factors_of_longrope_must_be_those_of_the_config(is_swapped: bool, tmp_path: Path) -> None:
    long, short = (SHORT, LONG) if is_swapped else (LONG, SHORT)
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    model = write_with_factors("phi3", LONGROPE, factors, tmp_path)
    if is_swapped:
        assert "has rope_factors_long.weight with other rotary factors" in error_of(model).message
    else:
        assert plan(model, context=64).architecture.schemes


def test_a_merged_file_states_that_it_has_no_parts(source: Path, tmp_path: Path) -> None:
    """As `llama-gguf-split --merge` writes it."""
    entries = metadata(json.loads((source / "config.json").read_text()), 7) | {"split.count": ("U32", 0)}
    (tmp_path / "model").mkdir()
    shutil.copy(source / "config.json", tmp_path / "model")
    write_file(tmp_path / "model" / FILE, entries, store_model(source, "Q8_0")[0])
    assert plan(tmp_path / "model").architecture.schemes == {"int8": 15}


@pytest.mark.parametrize(
    ("family", "kind", "schemes", "expert_schemes"),
    [
        ("llama", "Q8_0", {"int8": 14}, {}),
        ("qwen3_moe", "Q8_0", {"int8": 8}, {"int8": 4}),
        ("mixtral", "Q4_0", {"int4_float16": 8}, {"int4_float16": 4}),
        ("qwen3_moe", "Q4_K_M", {}, {"int8": 2}),
        ("gpt_oss", "Q8_0", {"int8": 8}, {}),
    ],
)
@pytest.mark.parametrize("is_fused", [False, True])
def test_random_weights_have_the_schemes_of_the_file(
    family: str, kind: str, is_fused: bool, schemes: dict[str, int], expert_schemes: dict[str, int], tmp_path: Path
) -> None:
    """So programs that were compiled without the weights are those of the file. 128 columns are no block of Q4_K."""
    source = save_source(tmp_path / "source", family, tie_word_embeddings=True)
    write_gguf(source, tmp_path / "model", kind, is_fused=is_fused)
    loaded, random = (plan(tmp_path / "model", load_format=form) for form in ("auto", "dummy"))
    assert loaded.architecture.schemes == random.architecture.schemes == schemes
    assert loaded.architecture.expert_schemes == random.architecture.expert_schemes == expert_schemes
    assert (loaded.plan.key, loaded.plan.weight_bytes) == (random.plan.key, random.plan.weight_bytes)
