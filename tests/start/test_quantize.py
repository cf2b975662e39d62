"""Serving a model with `--quantize`, and serving the folder that `tcdeploy quantize` writes, give the same tokens."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcdeploy.errors import SpaceError, TcdeployError, UsageError
from tcdeploy.host.progress import NullProgress, StageProgress
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models.formats.methods import has_fp8_inputs
from tcdeploy.models.load_model import load_model
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.weights.weight_paths import INDEX
from tcdeploy.planning.recipe import Recipe
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.start import quantize
from tcdeploy.start.decide import RequestedModel, decide
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.quantize import SavedModel, save_quantised
from tcdeploy.start.record.lookup import NoRecord, find_record
from tests.conftest import TINY
from tests.exported_programs import exported_programs
from tests.int8_checkpoint import WEIGHTS, change_config
from tests.model_families import LAYERS
from tests.models.test_traced_model import save_model
from tests.start.test_scheme_starts import BUCKETS, PROMPTS, outcomes, start, tokens_of

TINY_FOLDER = BUILTIN_MODELS[TINY]
REQUESTS = ("fp8", "int8", "int4:64")
each_request = pytest.mark.parametrize("to", REQUESTS)


def save(out: Path, to: str, model: str | Path = TINY, **options: Any) -> SavedModel:
    skipped = options.pop("skip", None)
    return save_quantised(Recipe(model=str(model), quantize=to, quantize_skip=skipped), out, NullProgress(), **options)


def tensors_of(model: str | Path, **flags: Any) -> dict[str, Tensor]:
    """Of the loaded model, whose linear layers are packed."""
    limits = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128}
    planned = decide(Recipe(model=str(model), **{**limits, **flags}))
    packed_linears = planned.architecture.packed_linears
    loaded = load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, packed_linears, planned.traced_model)
    return loaded.state_dict()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name


# Tensors


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@each_request
def test_a_saved_model_has_the_tensors_of_the_request(to: str, dtype: str, tmp_path: Path) -> None:
    """Bit by bit, in any dtype of the plan."""
    saved = save(tmp_path / "out", to)
    assert (saved.quantised, saved.dense, saved.format) == (42, (), to)
    assert_equal(tensors_of(tmp_path / "out", dtype=dtype), tensors_of(TINY, quantize=to, dtype=dtype))


def test_a_saved_model_has_the_order_of_its_format(tmp_path: Path) -> None:
    """Loaded layers with groups of 128 have another one, those of `down_proj` in this model."""
    save(tmp_path / "out", "int4")
    name = "model.layers.0.mlp.down_proj"
    codes, _ = SCHEMES["int4_bfloat16"].quantise(load_file(TINY_FOLDER / WEIGHTS)[f"{name}.weight"], 128)
    assert torch.equal(load_file(tmp_path / "out" / WEIGHTS)[f"{name}.weight_packed"], codes.view(torch.int32))
    found, expected = tensors_of(tmp_path / "out"), tensors_of(TINY, quantize="int4")
    assert_equal(found, expected)
    assert not torch.equal(found[f"{name}.weight"], codes)


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("family", "to"), [("qwen2_moe", "int8"), ("mixtral", "int4:32"), ("qwen2", "fp8")])
def test_families_are_saved_with_the_names_of_the_checkpoint(
    family: str, to: str, stored_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Experts are stored one by one, each with its own scales. Routers stay dense."""
    source = save_model(family, tmp_path / "model", stored_dtype)
    save(tmp_path / "out", to, source)
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(source, quantize=to))
    stored, dense = load_file(tmp_path / "out" / WEIGHTS), load_file(source / WEIGHTS)
    kept = {name for name in dense if "gate." in name or "norm" in name or "embed" in name}
    expert = {"qwen2_moe": "mlp.experts.1.up_proj", "mixtral": "block_sparse_moe.experts.1.w3"}.get(family)
    assert expert is None or f"model.layers.0.{expert}.weight_packed" in stored
    assert {name for name in kept if not torch.equal(stored[name], dense[name])} == set() and kept
    assert {re.sub(r"_(scale|packed|shape)$", "", name) for name in stored} == dense.keys()


def test_rows_of_which_four_make_no_word_are_padded(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    assert config["intermediate_size"] == 96
    change_config(source, intermediate_size=94)
    tensors = load_file(source / WEIGHTS)
    cut = {
        name: tensor[:, :94].contiguous() if "down_proj" in name else tensor[:94].contiguous()
        for name, tensor in tensors.items()
        if ".mlp." in name
    }
    save_file({**tensors, **cut}, source / WEIGHTS, {"format": "pt"})
    save(tmp_path / "out", "int8", source)
    assert load_file(tmp_path / "out" / WEIGHTS)["model.layers.0.mlp.down_proj.weight_packed"].shape == (64, 24)
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(source, quantize="int8"))


def test_a_scale_of_the_next_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_tensors = quantize.stored_tensors

    def shifted(*arguments: Any) -> dict[str, Tensor]:
        tensors = stored_tensors(*arguments)
        return {**tensors, "weight_scale": tensors["weight_scale"].roll(1, 0)}

    monkeypatch.setattr(quantize, "stored_tensors", shifted)
    save(tmp_path / "out", "int8")
    with pytest.raises(AssertionError, match="weight_scale"):
        assert_equal(tensors_of(tmp_path / "out"), tensors_of(TINY, quantize="int8"))


# The folder


def test_the_folder_has_the_config_and_all_small_files(tmp_path: Path) -> None:
    saved = save(tmp_path / "out", "int4", skip=("layers.0",))
    names = {path.name for path in TINY_FOLDER.iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names - {WEIGHTS, "config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (TINY_FOLDER / name).read_bytes()
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", TINY_FOLDER))
    settings = config.pop("quantization_config")
    assert config == original
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "pack-quantized")
    layers = [f"model.layers.{number}" for number in range(6)]
    names = {f"self_attn.{name}_proj" for name in "qkvo"} | {"mlp.gate_proj", "mlp.up_proj"}
    dense = {f"{layer}.{name}" for layer in layers for name in names} | {"model.layers.0.mlp.down_proj", "lm_head"}
    assert set(settings["ignore"]) == dense and len(settings["ignore"]) == len(dense)
    assert saved.quantised == 5
    assert [(line.value, line.reason) for line in saved.dense] == [
        ("7", "requested to stay dense"), ("30", "groups of 128 do not divide their 192 columns"),
    ]  # fmt: skip
    assert saved.written_bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / WEIGHTS).values())


def ignored_expressions(folder: Path) -> list[str]:
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    return [name.removeprefix("re:") for name in ignored if name.startswith("re:")]


def test_all_experts_of_a_layer_are_one_ignored_expression(tmp_path: Path) -> None:
    """For each of their names: those of the checkpoint and those of the model."""
    save(tmp_path / "out", "int8", save_model("mixtral", tmp_path / "model"), skip=("experts",))
    expressions = ignored_expressions(tmp_path / "out")
    assert len(expressions) == 2 * LAYERS
    for path in ("model.layers.0.block_sparse_moe.experts.11.w1", "model.layers.1.mlp.experts.11.down_proj"):
        assert [bool(re.match(expression, path)) for expression in expressions].count(True) == 1
    assert not any(re.match(expression, "model.layers.0.self_attn.q_proj") for expression in expressions)


def test_quantised_projections_of_experts_are_not_ignored_because_others_are_dense(tmp_path: Path) -> None:
    save(tmp_path / "out", "int8", save_model("qwen2_moe", tmp_path / "model"), skip=("experts.down_proj",))
    expressions = ignored_expressions(tmp_path / "out")
    path = "model.layers.0.mlp.experts.3"
    assert any(re.match(expression, f"{path}.down_proj") for expression in expressions)
    assert not any(re.match(expression, f"{path}.{name}_proj") for expression in expressions for name in ("gate", "up"))


@pytest.mark.parametrize(
    ("family", "skipped", "stacks"),
    [
        ("qwen2_moe", "down_proj", LAYERS), ("qwen2_moe", "gate_up_proj", LAYERS),
        ("mixtral", "layers.0", 2 * (LAYERS - 1)), ("mixtral", "down_proj", LAYERS), ("gpt_oss", "experts", 0),
    ],
)  # fmt: skip
def test_random_weights_of_a_saved_model_have_its_schemes(
    family: str, skipped: str, stacks: int, tmp_path: Path
) -> None:
    """So programs that were compiled without the weights are those of the saved model."""
    save(tmp_path / "out", "int8", save_model(family, tmp_path / "model"), skip=(skipped,))
    limits: dict[str, Any] = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128}
    loaded, random = (
        decide(Recipe(model=str(tmp_path / "out"), load_format=form, **limits)) for form in ("auto", "dummy")
    )
    expected = {"int8": stacks} if stacks else {}
    assert loaded.architecture.expert_schemes == random.architecture.expert_schemes == expected
    assert loaded.plan.key == random.plan.key


def test_large_models_have_several_files_and_an_index(tmp_path: Path) -> None:
    save(tmp_path / "out", "fp8", max_file_bytes=1_000_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(TINY, quantize="fp8"))


def test_an_indexed_model_is_read(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "model", max_shard_size="100KB")
    assert (source / INDEX).exists()
    save(tmp_path / "out", "fp8", source)
    assert not (tmp_path / "out" / INDEX).exists()
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(source, quantize="fp8"))


def test_the_progress_names_each_tensor(tmp_path: Path) -> None:
    class Recorder(StageProgress):
        steps: list[tuple[str, int, int, str]] = []

        def step(self, number: int, total: int, name: str) -> None:
            self.steps.append((self.position.stage, number, total, name))

    save_quantised(Recipe(model=TINY, quantize="fp8"), tmp_path / "out", Recorder())
    assert Recorder.steps[0] == ("quantise", 1, 56, "model.embed_tokens.weight") and len(Recorder.steps) == 56


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of tensors that are alive, whenever one is read."""
    alive: list[int] = []
    read_tensor = quantize.read_tensor

    def measured(stored: Any) -> Tensor:
        tensors = [item for item in gc.get_objects() if type(item) is Tensor and item.device.type == "cpu"]
        alive.append(sum(item.untyped_storage().nbytes() for item in tensors))
        return read_tensor(stored)

    monkeypatch.setattr(quantize, "read_tensor", measured)
    yield alive


def test_only_one_tensor_is_in_memory(weights: list[int], tmp_path: Path) -> None:
    save(tmp_path / "out", "int8")
    largest = max(tensor.nbytes for tensor in load_file(TINY_FOLDER / WEIGHTS).values())
    assert len(weights) == 56 and max(weights) - weights[0] <= 2 * largest


# Errors


def message_of(out: Path, to: str = "int8", model: str | Path = TINY, **options: Any) -> str:
    with pytest.raises(TcdeployError) as caught:
        save(out, to, model, **options)
    assert caught.value.hint
    return caught.value.message


def test_a_folder_with_files_is_refused_and_an_empty_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for name in ("full", "full/notes.txt", "link"):
        assert message_of(tmp_path / name) == f"{tmp_path / name} exists already"
    assert message_of(tmp_path / "none" / "out") == f"{tmp_path / 'none'} is no folder"
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    save(tmp_path / "empty", "int8")
    assert (tmp_path / "empty" / WEIGHTS).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "full", "link"}


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def fail(*_: object) -> list[str]:
        seen.append({path.name for path in tmp_path.iterdir()})
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "_copy_files", fail)
    assert message_of(tmp_path / "out") == f"{tmp_path / 'out'} cannot be written: No space left on device"
    assert len(seen[0]) == 1 and "out" not in seen[0]
    assert list(tmp_path.iterdir()) == []


def test_a_full_gpu_is_an_error_with_a_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(quantize, "quantised_tensors", fail)
    with pytest.raises(SpaceError, match="no memory to quantise a tensor of builtin:tiny") as caught:
        save(tmp_path / "out", "int8")
    assert "CUDA_VISIBLE_DEVICES=" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((status.f_bsize, 4096, status.f_blocks, 100, 100, *list(status)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert message_of(tmp_path / "out") == f"{tmp_path / 'out'} takes 0.00 GB, and 0.00 GB are free"
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "out", "fp8")
    message = message_of(tmp_path / "again", model=tmp_path / "out")
    assert message == f"{tmp_path / 'out'} is quantised already, with compressed-tensors"


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "model")
    torch.save(load_file(source / WEIGHTS), source / "pytorch_model.bin")
    (source / WEIGHTS).unlink()
    with pytest.raises(UsageError) as caught:
        save(tmp_path / "out", "fp8", source)
    assert "it has no safetensors files" in caught.value.message and "save_pretrained()" in caught.value.hint


def test_experts_that_are_stored_together_are_refused_and_can_be_skipped(tmp_path: Path) -> None:
    source = save_model("gpt_oss", tmp_path / "model")
    message = message_of(tmp_path / "out", model=source)
    assert message == (
        "experts are not stored one by one, as the saved format requires: model.layers.0.mlp.experts.gate_up_proj"
    )
    save(tmp_path / "out", "int8", source, skip=("experts",))
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(source, quantize="int8", quantize_skip=("experts",)))


def test_a_layer_whose_weight_is_part_of_a_tensor_is_refused() -> None:
    part = ["slice", 0, 0, 8, ["tensor", "qkv.weight"]]
    source = ["cat", 0, [["convert", "quantised", [8, 4], ["int8", 4, 0], [part]]]]
    traced: Any = SimpleNamespace(sources={"q_proj.weight": source})
    with pytest.raises(UsageError, match="is not one tensor of the checkpoint: it is made of qkv.weight"):
        quantize.schemes_by_name(RequestedModel(torch.nn.Module(), traced, (), "cpu"))


# Starts


class Served(NamedTuple):
    """The folder of the builtin model in the format `to`, and the tokens of its start from the folder."""

    to: str
    folder: Path
    tokens: list[list[int]]


@pytest.fixture(scope="module", params=REQUESTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    save(folder / "out", request.param)
    with exported_programs():
        return Served(
            request.param, folder / "out", tokens_of(start(folder / "out", folder / "cache", programs="aot").engine)
        )


def test_both_ways_start_with_the_same_tokens_also_from_packages(served: Served, tmp_path: Path) -> None:
    """Records of starts hold the sources of the scheme, so a start without the model's code quantises too."""
    flags = {"programs": "aot", "quantize": served.to}
    with exported_programs():
        first = start(Path(TINY), tmp_path, **flags)
        assert first.engine.runner.has_model and tokens_of(first.engine) == served.tokens
        again = start(Path(TINY), tmp_path, **flags)
        assert not again.engine.runner.has_model and outcomes(again) == [("hit", 0)] * 2
        assert tokens_of(again.engine) == served.tokens
        assert again.weights_read.num_bytes == first.weights_read.num_bytes
    dense = Recipe(model=TINY, cache_dir=str(tmp_path), **BUCKETS)
    assert find_record(StartRequest(replace(dense, quantize=served.to))).plan.key == again.plan.key
    with pytest.raises(NoRecord):
        find_record(StartRequest(dense))


def test_the_folder_asks_for_inputs_in_fp8_as_the_option_does(served: Served) -> None:
    from transformers import AutoConfig

    assert has_fp8_inputs(AutoConfig.from_pretrained(served.folder)) == (served.to == "fp8")


def test_transformers_generates_the_same_tokens_from_the_folder(served: Served) -> None:
    """With inputs as they are, because tcdeploy does not quantise them on a CPU. Quantised, they change little."""
    pytest.importorskip("compressed_tensors")
    model = transformers_model(served.folder, quantises_inputs=False)
    for prompt, tokens in zip(PROMPTS, served.tokens, strict=True):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=len(tokens), do_sample=False)
        assert output[0, len(prompt) :].tolist() == list(tokens)
    if served.to == "fp8":
        prompt = torch.tensor([PROMPTS[0]])
        with torch.no_grad():
            logits = model(prompt).logits
            change = transformers_model(served.folder, quantises_inputs=True)(prompt).logits - logits
        assert 0.001 < change.norm() / logits.norm() < 0.1


def transformers_model(folder: Path, quantises_inputs: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    for group in config.quantization_config["config_groups"].values():
        group["input_activations"] = group["input_activations"] if quantises_inputs else None
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
