"""A traced model's weights, read from its files, are those that transformers loads; otherwise transformers loads it."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import ModelError, SpaceError, UsageError
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models import load_model as loader
from tcdeploy.models import traced_model
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.convert.packed_linears import PackedSlice
from tcdeploy.models.load_model import load_model, loading_model
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.weights import reader as checkpoint_reader
from tcdeploy.models.weights import sources as weight_sources
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start import model_code
from tcdeploy.start import prepare as start
from tcdeploy.start.decide import decide
from tcdeploy.start.planned import PlannedModel
from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS
from tests.engine_loop import generate_tokens
from tests.models.test_weight_bytes import FAMILIES

WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
# Families whose weights are also converted from bfloat16 to float32 by default: dense, fused, experts, routers.
CONVERTED = ("llama", "phi3", "mixtral", "ernie4_5_moe")


def save_model(family: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A checkpoint without equal tensors, all in one dtype."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = auto_class(config, False).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.to(dtype).save_pretrained(folder, **options)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path / "model")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def plan(folder: Path, **flags: Any) -> PlannedModel:
    """With few buckets and blocks, so that any size of KV cache fits."""
    flags = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128, **flags}
    return decide(build_recipe({"model": str(folder), **flags}, environ={}))


def load_both(planned: PlannedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model that transformers loads, and the traced one."""
    packed_linears = planned.architecture.packed_linears
    assert planned.traced_model is not None
    return tuple(
        load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, packed_linears, traced)
        for traced in (None, planned.traced_model)
    )  # type: ignore[return-value]


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """Of all parameters and buffers: the name, the kind, the content, and the first name of a tied one."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (
            type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor._is_view(),
            first.setdefault(id(tensor), name),
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in tensors
    }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if dtype == "bfloat16" or family in CONVERTED else pytest.mark.long)
        for family in FAMILIES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_model_equals_the_one_that_transformers_loads(family: str, dtype: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    expected, model = load_both(plan(save_model(family, tmp_path, torch.bfloat16), dtype=dtype))
    assert type(model) is type(expected) and not model.training
    assert [type(module) for module in model.modules()] == [type(module) for module in expected.modules()]
    assert describe(model) == describe(expected)


def test_all_shards_are_read(tmp_path: Path) -> None:
    folder = save_model("mixtral", tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    expected, model = load_both(plan(folder))
    assert describe(model) == describe(expected)


@pytest.mark.parametrize("is_equal", [True, False])
def test_two_stored_tensors_are_tied_only_if_they_are_equal(folder: Path, is_equal: bool) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    head = load_file(folder / WEIGHTS)["model.embed_tokens.weight"] + (not is_equal)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    expected, model = load_both(plan(folder))
    assert describe(model) == describe(expected)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_equal


def test_the_packed_matrix_is_the_only_copy_of_its_parts(folder: Path) -> None:
    planned = plan(folder)
    assert planned.traced_model is not None
    with loading_model(planned.traced_model, planned.plan) as (model, total):
        pass
    slices = [module for module in model.modules() if isinstance(module, PackedSlice)]
    assert len({id(module.packed_weight) for module in slices}) < len(slices)
    tensors = {id(item): item for item in model.parameters()}
    assert sum(item.nbytes for item in tensors.values()) == planned.traced_model.num_bytes
    assert total is not None and total.num_bytes == sum(item.nbytes for item in load_file(folder / WEIGHTS).values())
    assert total.seconds > 0


def test_a_traced_model_can_be_loaded_again(folder: Path) -> None:
    """As a start does if its programs differ from the stored reference."""
    planned = plan(folder)
    first, again = (load_both(planned)[1] for _ in range(2))
    assert describe(first) == describe(again)
    assert not {item.data_ptr() for item in first.parameters()} & {item.data_ptr() for item in again.parameters()}
    memory = weakref.ref(next(first.parameters()))
    del first
    gc.collect()
    assert memory() is None, "neither the plan nor the traced model refers to it"


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(QUERY), f"lacks 1 of the model's tensors: {QUERY}"),
        (lambda tensors: tensors.update({QUERY: torch.ones(8, 64)}), rf"{QUERY} ([8, 64] instead of [64, 64])"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}), "does not use (1): model.extra.weight"),
    ],
)
def test_mismatched_tensors_raise_the_error_of_a_load_by_transformers(
    change: Callable[[dict[str, Tensor]], object], text: str, folder: Path
) -> None:
    planned = plan(folder)
    change_tensors(folder, change)
    expected = error_of(lambda: load_model(planned.plan, planned.config, "eager", ()))
    assert text in expected
    assert error_of(lambda: plan(folder)) == expected


def test_a_file_that_is_truncated_after_the_plan_is_an_error(folder: Path) -> None:
    planned = plan(folder)
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate((folder / WEIGHTS).stat().st_size - 1)
    load = partial(load_model, planned.plan, planned.config, ATTN_IMPLEMENTATION, (), planned.traced_model)
    assert "ends before its last tensor" in error_of(load)


def test_too_little_memory_is_an_error_with_a_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    planned = plan(folder)
    assert planned.traced_model is not None
    monkeypatch.setattr(weight_sources, "_allocate", fail)
    with pytest.raises(SpaceError, match="do not fit into the GPU's free memory"):
        load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, (), planned.traced_model)


def test_an_error_of_the_block_is_not_translated_and_ends_the_reading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end, read, count = threading.Event(), threading.Event(), checkpoint_reader._read, []

    def wait_and_read(*arguments: Any) -> None:
        count.append(1)
        has_begun.set()
        assert may_end.wait(60)
        read(*arguments)

    monkeypatch.setattr(checkpoint_reader, "_read", wait_and_read)
    planned = plan(folder)
    assert planned.traced_model is not None
    with pytest.raises(RuntimeError, match="of the block"), loading_model(planned.traced_model, planned.plan):
        assert has_begun.wait(60)
        threading.Timer(0.1, may_end.set).start()
        raise RuntimeError("an error of the block")
    assert len(count) <= checkpoint_reader.THREADS < len(load_file(folder / WEIGHTS))


# Loaded by transformers


def reason_of(planned: PlannedModel) -> str:
    [reason] = [decision.reason for decision in planned.plan.decisions if decision.name == "loading"]
    assert planned.traced_model is None
    return reason


def test_the_plan_says_that_a_dtype_cannot_be_read(tmp_path: Path) -> None:
    folder, name = save_model("qwen2", tmp_path / "model"), QUERY.replace("weight", "bias")
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.complex64)}))
    assert reason_of(plan(folder)) == f"{name} has the dtype C64"


def test_the_plan_says_that_there_are_no_safetensors_files(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    planned = plan(folder)
    assert reason_of(planned) == "it has no safetensors files, or they are not downloaded yet"
    model = load_model(planned.plan, planned.config, "eager", ())
    assert torch.equal(model.get_parameter(QUERY), torch.load(folder / "pytorch_model.bin")[QUERY])


def test_the_plan_says_that_a_weight_is_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by a conversion of a later transformers."""
    model_of_tensors = traced_model.model_of_tensors

    def scale(plan: Any, config: Any, attn_implementation: str, tensors: dict[str, Tensor]) -> PreTrainedModel:
        return model_of_tensors(plan, config, attn_implementation, {**tensors, QUERY: tensors[QUERY] * 2})

    monkeypatch.setattr(traced_model, "model_of_tensors", scale)
    assert reason_of(plan(folder)) == "aten.mul.Tensor computes values of weights"


def test_the_plan_says_that_this_torch_cannot_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_model, "can_trace", lambda: False)
    assert reason_of(plan(folder)) == f"its weights cannot be traced with torch {torch.__version__}"


def test_random_weights_are_not_traced(folder: Path) -> None:
    planned = plan(folder, load_format="dummy")
    assert planned.traced_model is None and planned.checkpoint is None
    assert not [decision for decision in planned.plan.decisions if decision.name == "loading"]


def test_an_adapter_config_without_an_adapter_is_ignored(folder: Path) -> None:
    """transformers would load the base model that it names."""
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/base"}))
    assert plan(folder).traced_model is not None


# Starts


@pytest.fixture
def float32_tiny(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "tiny"))
    change_tensors(folder, lambda tensors: tensors.update({name: item.float() for name, item in tensors.items()}))
    return folder


def test_a_start_reads_the_weights_and_reports_their_bytes(
    float32_tiny: Path, cache_dir: str, tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> PreTrainedModel:
        raise AssertionError("transformers loads the weights")

    monkeypatch.setattr(loader, "pretrained_model", fail)
    flags = {"model": str(float32_tiny), "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES}
    deployment = start.prepare(build_recipe({**flags, "cache_dir": cache_dir}, environ={}))
    assert deployment.weights_read is not None
    assert deployment.weights_read.num_bytes == sum(item.nbytes for item in load_file(float32_tiny / WEIGHTS).values())
    params = SamplingParams(max_tokens=6)
    expected = generate_tokens(tiny_deployment.engine, [[5, 6, 7]], params)
    assert generate_tokens(deployment.engine, [[5, 6, 7]], params) == expected


@pytest.mark.parametrize("error", [UsageError("refused"), KeyboardInterrupt()])
def test_a_start_that_fails_ends_the_reading(
    error: BaseException, float32_tiny: Path, cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(model_code.ModelCode, "load", fail)
    before = set(threading.enumerate())
    with pytest.raises(type(error)):
        start.prepare(build_recipe({"model": str(float32_tiny), "cache_dir": cache_dir, "buckets": (16,)}, environ={}))
    names = {thread.name for thread in {*threading.enumerate()} - before if thread.is_alive()}
    assert not {name for name in names if name.startswith("ThreadPoolExecutor")}
