"""Model folders whose files do not fit together: each is refused while planning, before a weight is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tcdeploy.errors import ModelError
from tcdeploy.models.load import load_config, resolve_model_path
from tcdeploy.models.load_model import load_model
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.weights import checkpoint
from tcdeploy.models.weights.checkpoint import read_stored_tensors, stored_dtype
from tcdeploy.models.weights.files import Checkpoint, TensorHeader
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tests.coverage.campaign import save_model
from tests.coverage.small_configs import small_config
from tests.model_families import SUPPORTED

QUERY, WEIGHTS, INDEX = "model.layers.0.self_attn.q_proj", "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model, with six layers in one file."""
    target = tmp_path / "model"
    shutil.copytree(resolve_model_path("builtin:tiny"), target)
    return target


def plan(folder: Path, **fields: Any) -> None:
    decide(Recipe(model=str(folder), buckets=(32,), batch_sizes=(1,), **fields))


def refuse_files(model: str, revision: str | None, config: Any) -> None:
    refusals = Refusals(model)
    checkpoint.check_files(model, revision, config, refusals)
    refusals.raise_all()


def are_compared(folder: Path) -> bool:
    return decide(Recipe(model=str(folder), buckets=(32,), batch_sizes=(1,))).traced_model is not None


def rejection(folder: Path, **fields: Any) -> str:
    with pytest.raises(ModelError) as error:
        plan(folder, **fields)
    assert error.value.hint
    return error.value.message


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def shard(folder: Path) -> list[Path]:
    """Split the weights into two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names, weight_map = sorted(tensors), {}
    files = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return files


# Tensors


def test_whole_checkpoints_pass(folder: Path) -> None:
    assert are_compared(folder)
    shard(folder)
    assert are_compared(folder)


def test_either_of_two_tied_tensors_may_be_missing_but_not_both(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    assert are_compared(folder)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert are_compared(folder)
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks 2 of the model's tensors" in rejection(folder)


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_checkpoint_that_transformers_saved_passes(family: str, tmp_path: Path) -> None:
    """Among them experts that are stored separately and loaded as one tensor. With a tensor less, it is refused."""
    config = AutoConfig.for_model(family, **SUPPORTED[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert are_compared(tmp_path)
    change_tensors(
        tmp_path, lambda tensors: tensors.pop(next(name for name in tensors if "norm" in name or "ln" in name))
    )
    assert "lacks 1 of the model's tensors" in rejection(tmp_path)


def test_a_checkpoint_with_both_of_two_tied_tensors_passes(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: tensors.update({
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone()
    }))  # fmt: skip
    assert are_compared(folder)


def test_a_single_file_is_read_and_not_an_old_index_beside_it(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    assert are_compared(folder)


@pytest.mark.parametrize("downloaded", ["all", "one of two shards", "config only"])
def test_the_headers_of_a_hub_model_are_read_once_it_is_downloaded(
    folder: Path, downloaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = shard(folder)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(folder / "config.json"))
    if downloaded != "all":
        files[1].unlink()
    if downloaded == "config only":
        files[0].unlink()
        (folder / INDEX).unlink()
    config = AutoConfig.from_pretrained(folder)
    assert (read_stored_tensors("someone/model", None, config) is not None) == (downloaded == "all")


@pytest.fixture(autouse=True)
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "uses_local_files_only", lambda *_: False)


def test_a_hub_model_with_weights_is_not_looked_up_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, huggingface_hub would retry for 23 s."""
    config = load_config(Recipe(model=str(folder)))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(folder / "config.json"))
    requests: list[str] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda _, model, **__: requests.append(model))
    refuse_files("someone/model", None, config)
    assert requests == []
    (folder / WEIGHTS).unlink()
    refuse_files("someone/model", None, config)
    assert requests == ["someone/model"]


def test_a_tensor_that_the_model_does_not_use_is_named(folder: Path) -> None:
    """For example a bias without `attention_bias` in the config."""
    change_tensors(folder, lambda tensors: tensors.update({f"{QUERY}.bias": torch.ones(192)}))
    assert f"has tensors that the model does not use (1): {QUERY}.bias" in rejection(folder)


def test_layers_beyond_those_of_the_config_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5)
    assert "tensors that the model does not use (9): model.layers.5." in rejection(folder)
    change_config(folder, num_nextn_predict_layers=1)  # but no tensor of the layer is specific to prediction
    assert "tensors that the model does not use (9): model.layers.5." in rejection(folder)


@pytest.mark.parametrize("name", ["eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens"])
def test_layers_for_multi_token_prediction_are_ignored_and_no_others(folder: Path, name: str) -> None:
    change_config(folder, num_hidden_layers=5, num_nextn_predict_layers=1)
    change_tensors(folder, lambda tensors: tensors.update({f"model.layers.5.{name}.weight": torch.ones(16)}))
    assert are_compared(folder)
    change_config(folder, num_hidden_layers=4)
    assert "tensors that the model does not use (19): model.layers.4." in rejection(folder)


@pytest.mark.parametrize("nested", [False, True])
def test_the_number_of_prediction_layers_is_read_from_the_text_config(nested: bool, tmp_path: Path) -> None:
    config = small_config("mistral3")
    text_config = config.get_text_config()
    (text_config if nested else config).num_nextn_predict_layers = 1
    save_model(config, tmp_path)
    layer = f"model.language_model.layers.{text_config.num_hidden_layers}"
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update({f"{layer}.{name}.weight": torch.ones(16) for name in ("enorm", "mlp.down")}),
    )
    if nested:
        assert are_compared(tmp_path)
    else:
        assert f"tensors that the model does not use (2): {layer}.enorm.weight" in rejection(tmp_path)


def test_missing_and_mismatched_tensors_are_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(f"{QUERY}.weight"))
    assert f"lacks 1 of the model's tensors: {QUERY}.weight" in rejection(folder)
    change_tensors(folder, lambda tensors: tensors.update({f"{QUERY}.weight": torch.ones(4, 192)}))
    assert f"config.json describes (1): {QUERY}.weight ([4, 192] instead of [192, 192])" in rejection(folder)


def test_tensors_that_the_text_does_not_depend_on_pass(folder: Path) -> None:
    names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",  # stored by old versions of transformers
        "model.layers.0.self_attn.rotary_emb.cos_cached", "model.layers.0.self_attn.rotary_emb.sin_cached",
        "model.rotary_emb.cos_cached", "model.layers.0.attn.masked_bias", "model.position_ids", "decoder.version",
        "v_head.summary.weight", "value_head.0.weight", "mtp.fc.weight",
        "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale", "model.layers.0.self_attn.kv_scale",
        "model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.attn.q_scale",
        "model.layers.0.self_attn.prob_scale",
    ]  # fmt: skip
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(16) for name in names}))
    assert are_compared(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.head_scale", "model.layers.0.mlp.k_scale", "value.weight"])
def test_a_tensor_with_a_similar_name_is_refused(folder: Path, name: str) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    assert f"tensors that the model does not use (1): {name}" in rejection(folder)


def test_loading_checks_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is downloaded while it is loaded has not been checked while planning."""
    change_tensors(folder, lambda tensors: tensors.update({f"{QUERY}.bias": torch.ones(192)}))
    config = load_config(Recipe(model=str(folder)))
    planned = type("Plan", (), {
        "model": str(folder), "revision": None, "trust_remote_code": False, "device": "cpu", "load_format": "auto",
        "weight_dtype": "float32",
    })  # fmt: skip
    with pytest.raises(ModelError, match=f"{QUERY}.bias"):
        load_model(planned, config, "sdpa", ())  # type: ignore[arg-type]


# Dtypes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_the_first_floating_tensor_counts_if_the_config_states_none(
    folder: Path, stored: torch.dtype
) -> None:
    change_tensors(folder, lambda tensors: [tensors.update({name: tensors[name].to(stored)}) for name in tensors])
    change_config(folder, dtype=None)
    planned = decide(Recipe(model=str(folder)))
    [decision] = [decision for decision in planned.plan.decisions if decision.name == "checkpoint dtype"]
    name = str(stored).removeprefix("torch.")
    assert (planned.architecture.dtype, decision.value) == (name, name)
    assert "config.json states none" in decision.reason
    with_random_weights = decide(Recipe(model=str(folder), load_format="dummy"))
    assert with_random_weights.architecture.dtype == ""  # the checkpoint is not read
    assert with_random_weights.plan.key == planned.plan.key


def test_the_dtype_that_the_config_states_counts(folder: Path) -> None:
    change_tensors(folder, lambda tensors: [tensors.update({name: tensors[name].half()}) for name in tensors])
    planned = decide(Recipe(model=str(folder)))
    assert planned.architecture.dtype == "bfloat16"
    assert [decision for decision in planned.plan.decisions if decision.name == "checkpoint dtype"] == []


def test_integers_and_float8_are_not_the_dtype_of_a_checkpoint() -> None:
    tensors = {"a": TensorHeader("I64", (1,)), "b": TensorHeader("F8_E4M3", (1,)), "c": TensorHeader("F16", (1,))}
    assert stored_dtype(Checkpoint(tensors, [])) == "float16"
    assert stored_dtype(Checkpoint({}, [])) == ""


# Files


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)[1].unlink()
    assert rejection(folder).endswith("lacks model-00002-of-00002.safetensors, which its index lists")


def test_a_cut_shard_is_named(folder: Path) -> None:
    file = shard(folder)[1]
    content = file.read_bytes()
    for length in (len(content) - 1, len(content) // 2, 100, 4, 0):
        file.write_bytes(content[:length])
        assert rejection(folder).startswith(f"{file} is damaged: "), length


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_damaged_index_is_named(folder: Path, index: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(index)
    assert rejection(folder).startswith(f"{folder / INDEX} is damaged")


@pytest.mark.parametrize("name", ["other.safetensors", "parts/other.safetensors"])
def test_the_file_that_transformers_weights_names_is_read(folder: Path, name: str) -> None:
    """transformers loads it instead of model.safetensors."""
    change_config(folder, transformers_weights=name)
    assert rejection(folder).endswith(f"lacks {name}, which transformers_weights in config.json names")
    (folder / name).parent.mkdir(exist_ok=True)
    shutil.copy(folder / WEIGHTS, folder / name)
    assert are_compared(folder)
    tensors = load_file(folder / name)
    save_file({**tensors, f"{QUERY}.bias": torch.ones(192)}, folder / name, metadata={"format": "pt"})
    assert f"tensors that the model does not use (1): {QUERY}.bias" in rejection(folder)


def test_the_index_that_transformers_weights_names_is_read(folder: Path) -> None:
    files = shard(folder)
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    change_config(folder, transformers_weights="other.safetensors.index.json")
    assert are_compared(folder)
    files[1].unlink()
    assert rejection(folder).endswith(f"lacks {files[1].name}, which its index lists")
    (folder / "other.safetensors.index.json").unlink()
    assert "other.safetensors.index.json, which transformers_weights in config.json names" in rejection(folder)


@pytest.mark.parametrize("value", [1, "weights.bin", "../other.safetensors", "/other.safetensors"])
def test_a_value_of_transformers_weights_that_cannot_be_loaded_is_an_error(folder: Path, value: Any) -> None:
    change_config(folder, transformers_weights=value)
    assert f"transformers_weights is {value!r}; it must name a safetensors file" in rejection(folder)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    """transformers would use the one that it reads last."""
    first, second = shard(folder)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, metadata={"format": "pt"})
    assert rejection(folder).endswith(f"has the tensor {name} in two files: {first.name}, {second.name}")


def test_a_tensor_with_and_without_prefix_is_named(folder: Path) -> None:
    name = f"{QUERY}.weight"
    other = name.removeprefix("model.")
    change_tensors(folder, lambda tensors: tensors.update({other: tensors[name] * 2}))
    assert rejection(folder).endswith(f"has two tensors for one of the model: {other}, {name}")
    change_tensors(folder, lambda tensors: tensors.pop(name))
    assert are_compared(folder)


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}, {"metadata": []}])
def test_an_index_without_metadata_is_named(folder: Path, metadata: dict[str, Any]) -> None:
    shard(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **metadata}))
    assert rejection(folder) == f"{folder / INDEX} has no metadata, which transformers requires"


def as_torch_files(folder: Path) -> list[Path]:
    """Store the weights as two .bin files with an index."""
    files = shard(folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).unlink()
    names = {file.name: f"pytorch_{file.stem}.bin" for file in files}
    for file in files:
        torch.save(load_file(file), folder / names[file.name])
        file.unlink()
    index["weight_map"] = {tensor: names[name] for tensor, name in index["weight_map"].items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return [folder / name for name in names.values()]


def load_cpu(folder: Path) -> Any:
    planned = SimpleNamespace(
        model=str(folder), revision=None, trust_remote_code=False, device="cpu", load_format="auto",
        weight_dtype="float32",
    )  # fmt: skip
    return load_model(planned, load_config(Recipe(model=str(folder))), "sdpa", ())  # type: ignore[arg-type]


def test_a_missing_bin_file_is_named(folder: Path) -> None:
    files = as_torch_files(folder)
    plan(folder)
    assert load_cpu(folder)
    files[1].unlink()
    assert rejection(folder) == f"{folder} lacks {files[1].name}, which its index lists"


def test_a_tensor_of_another_shape_in_a_bin_file_is_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save({**tensors, f"{QUERY}.weight": torch.ones(4, 192)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError) as error:
        load_cpu(folder)
    assert f"{QUERY}.weight ([4, 192] instead of [192, 192])" in error.value.message
    assert "config.json" in error.value.hint


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("consolidated.safetensors", "has weights in the format mistral-inference (consolidated.safetensors)"),
        ("consolidated.00.pth", "has weights in the format PyTorch's .pth (consolidated.00.pth)"),
        ("tf_model.h5", "has weights in the format TensorFlow's .h5 (tf_model.h5)"),
        ("flax_model.msgpack", "has weights in the format Flax's .msgpack (flax_model.msgpack)"),
        ("weights.safetensors", "has weights.safetensors, but no model.safetensors and no index"),
        ("model-00001-of-00002.safetensors", "but not the index model.safetensors.index.json of its files"),
        ("pytorch_model-00001-of-00002.bin", "but not the index pytorch_model.bin.index.json of its files"),
        ("shard-00000-model-00001-of-00001.safetensors", "is a distributed checkpoint (shard-00000-model-00001-of-"),
    ],
)  # fmt: skip
def test_weights_that_transformers_does_not_read_are_named(folder: Path, name: str, problem: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    assert problem in rejection(folder)
    plan(folder, load_format="dummy")


def test_files_of_other_formats_beside_the_weights_are_ignored(folder: Path) -> None:
    for name in ("model.gguf", "consolidated.safetensors", "tf_model.h5", "model-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b"")
    assert are_compared(folder)


@pytest.mark.parametrize("downloaded", [False, True])
def test_a_hub_repository_with_weights_in_another_format_is_refused(
    folder: Path, downloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Recipe(model=str(folder)))
    (folder / WEIGHTS).unlink()
    names = [SimpleNamespace(rfilename=name) for name in ("README.md", "tf_model.h5", "onnx/model.onnx")]
    cached = str(folder / "config.json") if downloaded else None
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: cached)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=names))
    with pytest.raises(ModelError, match="has weights in the format TensorFlow's .h5"):
        refuse_files("someone/model", None, config)
    names.append(SimpleNamespace(rfilename="pytorch_model.bin"))
    refuse_files("someone/model", None, config)


def test_a_download_of_shards_without_their_index_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(Recipe(model=str(folder)))
    shard(folder)
    (folder / INDEX).unlink()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(folder / "config.json"))
    refuse_files("someone/model", None, config)


# Quantisation


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weight_scale", torch.tensor(0.01)), ("weight_scale_inv", torch.ones(2, 2)),
        ("qweight", torch.ones(2, dtype=torch.int32)), ("weight", torch.ones(192, 192, dtype=torch.int8)),
    ],
)  # fmt: skip
def test_quantised_weights_are_recognised_by_names_and_dtypes(folder: Path, name: str, tensor: torch.Tensor) -> None:
    change_tensors(folder, lambda tensors: tensors.update({f"{QUERY}.{name}": tensor}))
    assert f"has quantised weights, which are not supported yet: {QUERY}.{name}" in rejection(folder)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
     torch.bool, torch.float8_e8m0fnu],
)  # fmt: skip
def test_weights_of_any_other_dtype_than_a_floating_one_are_quantised(folder: Path, dtype: torch.dtype) -> None:
    name = f"{QUERY}.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(192, 192).to(dtype)}))
    assert f"has quantised weights, which are not supported yet: {name}" in rejection(folder)


def test_float8_weights_without_scales_are_values_of_their_own(folder: Path) -> None:
    """They are cast to the plan's dtype."""
    name = f"{QUERY}.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    planned = decide(Recipe(model=str(folder), buckets=(32,), batch_sizes=(1,)))
    assert not [decision for decision in planned.plan.decisions if decision.name == "loading"]
    loaded = load_model(planned.plan, planned.config, "eager", (), planned.traced_model)
    assert torch.equal(loaded.get_submodule(QUERY).weight, load_file(folder / "model.safetensors")[name].float())


def test_a_quantised_kv_cache_is_not_quantised_weights(folder: Path) -> None:
    """The cache here has the model's dtype, and does not need the scales."""
    path = folder / "hf_quant_config.json"
    path.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    for load_format in ("auto", "dummy"):
        plan(folder, load_format=load_format)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"), ("[]", "is not a JSON object"), ("version https://git-lfs", "is a Git LFS pointer"),
        ("{}", "does not state quant_algo"), ('{"quantization": []}', "does not state quant_algo"),
    ],
)  # fmt: skip
def test_a_broken_file_of_model_optimizer_is_named(folder: Path, content: str, problem: str) -> None:
    path = folder / "hf_quant_config.json"
    path.write_text(content)
    assert rejection(folder).startswith(f"{path} {problem}")


def test_the_file_of_model_optimizer_is_downloaded_before_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Recipe(model=str(folder)))
    names = [SimpleNamespace(rfilename=name) for name in ("hf_quant_config.json", "model.safetensors")]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=names))
    path = folder / "hf_quant_config.json"
    path.write_text('{"quantization": {"quant_algo": null}}')
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(path))
    refuse_files("someone/model", None, config)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelError, match="hf_quant_config.json of someone/model is not downloaded"):
        refuse_files("someone/model", None, config)


@pytest.mark.parametrize("method", ["hqq", "quanto", "no-one-knows-it"])
def test_a_quantisation_method_of_the_config_is_named(folder: Path, method: str) -> None:
    change_config(folder, quantization_config={"quant_method": method})
    for load_format in ("auto", "dummy"):
        assert f"is quantised with {method}, which is not supported yet" in rejection(folder, load_format=load_format)


# Other kinds of folders and files


def test_an_adapter_beside_the_base_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    plan(folder)  # left over after it was merged
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for load_format in ("auto", "dummy"):
        assert "contains a PEFT adapter for someone/base" in rejection(folder, load_format=load_format)


def test_the_hint_about_a_merged_adapter_can_be_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a Hub repository cannot be deleted."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("{}")
    with pytest.raises(ModelError) as error:
        plan(folder)
    assert error.value.hint.endswith("if it is merged already, delete adapter_config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(folder / "config.json"))
    with pytest.raises(ModelError) as error:
        refuse_files("someone/model", None, AutoConfig.from_pretrained(folder))
    assert error.value.hint.endswith("download the repository without adapter_config.json and pass that folder")


def test_a_folder_with_only_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError) as error:
        load_config(Recipe(model=str(tmp_path)))
    assert error.value.message.endswith("contains a PEFT adapter, which is not supported")
    assert error.value.hint.endswith("save that, and pass the new folder"), "there is no merged model beside it"


def test_other_formats_are_named(tmp_path: Path) -> None:
    for name, format_name in (("model.onnx", "ONNX"), ("consolidated.00.pth", "PyTorch's .pth")):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(b"weights")
        assert f"has weights in the format {format_name}" in rejection(folder)
    assert rejection(tmp_path / "consolidated" / "consolidated.00.pth").endswith("is a file, not a model folder")
