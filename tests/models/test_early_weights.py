"""Tensors that are read early give the model that transformers loads from the files, here on a CPU."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, LlamaForCausalLM, PreTrainedModel

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import ModelError, UsageError
from tcdeploy.models import load
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.load import load_model
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.weights import early_weights
from tcdeploy.models.weights import reader as checkpoint_reader
from tcdeploy.models.weights.early_weights import EarlyWeights, PreloadedSlice, start_reading
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.start import model_code
from tcdeploy.start import prepare as start
from tcdeploy.start.record.factors import weight_files
from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS
from tests.engine_loop import generate_tokens
from tests.model_families import probe
from tests.models.test_weight_bytes import FAMILIES

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def save_model(family: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A checkpoint without equal tensors, all in one dtype."""
    torch.manual_seed(1)
    model = auto_class(AutoConfig.for_model(family, **FAMILIES[family]), False).from_config(
        AutoConfig.for_model(family, **FAMILIES[family])
    )
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


def plan_of(folder: Path, dtype: str = "float32") -> Any:
    return SimpleNamespace(
        model=str(folder),
        revision="main",
        trust_remote_code=False,
        device="cpu",
        weight_dtype=dtype,
        load_format="auto",
    )


def read_early(folder: Path, dtype: str = "float32") -> EarlyWeights:
    return EarlyWeights(folder, weight_files(folder), CPU, (dtype,))


def load_both(folder: Path, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model from the files, and that from tensors that were read early."""
    plan, config = plan_of(folder, dtype), AutoConfig.from_pretrained(folder)
    with read_early(folder, dtype) as early:
        model = load_model(plan, config, "eager", early)
        assert early.weights_read is not None, "the tensors were used"
        num_bytes = sum(tensor.nbytes for file in weight_files(folder) for tensor in load_file(file).values())
        assert early.weights_read.num_bytes == num_bytes and early.weights_read.seconds > 0
    return load_model(plan, config, "eager"), model


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """Of all parameters and buffers: the name, the kind, the content, and the first name of a tied one."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (
            type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad,
            first.setdefault(id(tensor), name), tensor.detach().contiguous().view(-1).view(torch.uint8).tolist(),
        )
        for name, tensor in tensors
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_equals_one_from_the_files(family: str, dtype: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    expected, model = load_both(save_model(family, tmp_path, getattr(torch, dtype)), dtype)
    assert type(model) is type(expected) and not model.training
    assert describe(model) == describe(expected)


def test_all_shards_are_read(tmp_path: Path) -> None:
    folder = save_model("mixtral", tmp_path, max_shard_size="100KB")
    assert len(weight_files(folder)) > 1
    expected, model = load_both(folder)
    assert describe(model) == describe(expected)


def test_transformers_does_not_move_the_tensors(folder: Path) -> None:
    """The device `meta` stands for a GPU."""
    tensors = {name: PreloadedSlice(tensor.to("meta")) for name, tensor in load_file(folder / WEIGHTS).items()}
    config = AutoConfig.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(None, state_dict=tensors, config=config, dtype=torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


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
def test_mismatched_tensors_raise_the_same_error_as_a_load_from_files(
    change: Callable[[dict[str, Tensor]], object], text: str, folder: Path
) -> None:
    change_tensors(folder, change)
    plan, config = plan_of(folder), AutoConfig.from_pretrained(folder)
    expected = error_of(lambda: load_model(plan, config, "eager"))
    assert text in expected
    with read_early(folder) as early:
        tensors = early.take(folder, "cpu", torch.float32)
        assert error_of(lambda: load._pretrained_model(plan, config, torch.float32, "eager", tensors)) == expected
    with read_early(folder) as early:
        assert error_of(lambda: load_model(plan, config, "eager", early)) == expected
        assert early.weights_read is None


def test_a_truncated_file_raises_the_same_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate((folder / WEIGHTS).stat().st_size - 1)
    plan, config = plan_of(folder), AutoConfig.from_pretrained(folder)
    expected = error_of(lambda: load_model(plan, config, "eager"))
    with caplog.at_level(logging.DEBUG), read_early(folder) as early:
        assert error_of(lambda: load_model(plan, config, "eager", early)) == expected
    assert [record.levelno for record in caplog.records if "could not be read early" in record.message] == [30]


def test_out_of_memory_during_the_load_falls_back_to_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, config = plan_of(folder), AutoConfig.from_pretrained(folder)

    def fail(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with caplog.at_level(logging.DEBUG), read_early(folder) as early:
        monkeypatch.setattr(PreloadedSlice, "to", fail)
        model = load_model(plan, config, "eager", early)
        assert early.weights_read is None
    assert describe(model) == describe(load_model(plan, config, "eager"))
    assert "no memory" in caplog.text


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_tensors_for_another_device_or_dtype_are_dropped(folder: Path, device: str, dtype: torch.dtype) -> None:
    with read_early(folder) as early:
        assert early.take(folder, device, dtype) == {} and early.weights_read is None
        assert early.take(folder, "cpu", torch.float32) == {}, "they are gone"


def test_tensors_of_an_earlier_commit_are_dropped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading begins with the commit that is cached. transformers may then find a new one on the Hub."""
    new = Path(shutil.copytree(folder, tmp_path / "new"))
    change_tensors(new, lambda tensors: tensors.update({QUERY: tensors[QUERY] + 1}))
    monkeypatch.setattr(load, "local_folder", lambda model, revision: new)
    plan, config = plan_of(new), AutoConfig.from_pretrained(new)
    with read_early(folder) as early:
        model = load_model(plan, config, "eager", early)
        assert early.weights_read is None and early.num_bytes == 0
    assert describe(model) == describe(load_model(plan, config, "eager"))


def test_a_failed_read_frees_its_tensors_although_objects_are_frozen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start freezes its objects after its imports, so the garbage collector would not free a cycle."""
    allocated: list[weakref.ref[Tensor]] = []
    empty = torch.empty

    def allocate(*arguments: Any, **options: Any) -> Tensor:
        tensor = empty(*arguments, **options)
        allocated.append(weakref.ref(tensor))
        return tensor

    def fail(*_: Any) -> None:
        raise OSError("cannot read")

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(checkpoint_reader, "_read", fail)
    with read_early(folder) as early:
        early._thread.join()
        gc.freeze()
        try:
            gc.collect()
            assert allocated and not [tensor for tensor in allocated if tensor() is not None]
        finally:
            gc.unfreeze()


def test_memory_of_tensors_that_the_model_does_not_use_is_freed(tmp_path: Path) -> None:
    """Merged (experts), packed (q, k, v) and unknown tensors are freed; the others are used without a copy."""
    folder = save_model("mixtral", tmp_path)
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({unused: torch.ones(8)}))
    arrays = {name: tensor.numpy().copy() for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors = {name: PreloadedSlice(torch.from_numpy(array)) for name, array in arrays.items()}
    early: Any = SimpleNamespace(take=lambda folder, device, dtype: tensors.copy(), weights_read=None)
    owners = {name: weakref.ref(array) for name, array in arrays.items()}  # a tensor's memory refers to its array
    config = AutoConfig.from_pretrained(folder)
    model = load_model(plan_of(folder), config, "eager", early)
    tensors.clear()
    arrays.clear()
    pack_linears(model, probe(config).packed_linears)
    kept = {name for name, owner in owners.items() if owner() is not None}
    replaced = {name for name in owners if "experts" in name or name.endswith(("q_proj.weight", "k_proj.weight"))}
    assert unused not in kept and replaced and not kept & replaced
    assert {"model.embed_tokens.weight", "model.layers.3.self_attn.o_proj.weight"} <= kept


def test_leaving_the_block_stops_the_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, ended, read = threading.Event(), threading.Event(), checkpoint_reader._read
    count = []

    def wait_and_read(*arguments: Any) -> None:
        count.append(1)
        has_begun.set()
        assert ended.wait(60)
        read(*arguments)

    monkeypatch.setattr(checkpoint_reader, "_read", wait_and_read)
    early = read_early(folder)
    assert has_begun.wait(60)
    closing = threading.Thread(target=early.__exit__, args=(None, None, None))
    closing.start()
    assert early._stop.wait(20)
    ended.set()
    closing.join()
    assert len(count) <= checkpoint_reader.THREADS < len(load_file(folder / WEIGHTS))
    assert early.take(folder, "cpu", torch.float32) == {}


@pytest.mark.parametrize(
    ("change", "dtypes", "reason"),
    [
        (lambda tensors: None, ("bfloat16", "float16"), "exactly one of ['bfloat16', 'float16'] is needed"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].half()}), ("float32",), "are ['float16', 'float32']"),
        (
            lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.float8_e4m3fn)}),
            ("float32",),
            "unknown dtype",
        ),
    ],
)
def test_tensors_of_other_dtypes_are_not_read(
    change: Callable[[dict[str, Tensor]], object],
    dtypes: tuple[str, ...],
    reason: str,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change_tensors(folder, change)
    with caplog.at_level(logging.DEBUG), EarlyWeights(folder, weight_files(folder), CPU, dtypes) as early:
        assert early.take(folder, "cpu", torch.float32) == {}
    assert reason in caplog.text


@pytest.mark.parametrize(("free_bytes", "is_read"), [(1.9, False), (2.1, True)])
def test_a_checkpoint_may_take_half_of_the_free_memory(
    free_bytes: float, is_read: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = checkpoint_reader.stored_tensors(weight_files(folder))
    num_bytes = sum(item.end - item.begin for item in stored.values())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_bytes * num_bytes), 0))
    reason = early_weights._why_not_read(weight_files(folder), stored, torch.device("cuda", 0), ("float32",))
    assert (reason == "") == is_read


@pytest.fixture
def early_weights_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of EarlyWeights, as on a machine with a GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(early_weights, "EarlyWeights", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return calls


@pytest.mark.parametrize(
    ("dtype", "dtypes"), [(None, ("bfloat16", "float16")), ("float32", ("float32",))], ids=["default", "requested"]
)
def test_the_dtypes_are_those_that_the_plan_may_choose(
    dtype: Any, dtypes: tuple[str, ...], folder: Path, early_weights_calls: list[Any]
) -> None:
    start_reading(Recipe(model=str(folder), dtype=dtype), folder, weight_files(folder))
    assert early_weights_calls == [(folder, [folder / WEIGHTS], torch.device("cuda", 0), dtypes)]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"quantization_config": {"quant_method": "mxfp4"}}},
        {"config": {"transformers_weights": "a.safetensors"}},
        {"adapter": True},
        {"recipe": {"trust_remote_code": True}},
        {"damaged": True},
        {"paths": []},
        {"device": 1},
        {"cuda": False},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_unsupported_models_and_machines_read_nothing_early(
    changes: dict[str, Any], folder: Path, early_weights_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((folder / "config.json").read_bytes()) | changes.get("config", {})
    (folder / "config.json").write_text("{" if "damaged" in changes else json.dumps(config))
    if "adapter" in changes:
        (folder / "adapter_config.json").touch()
    if "device" in changes:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: changes["device"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: changes.get("cuda", True))
    recipe = Recipe(model=str(folder), **changes.get("recipe", {}))
    assert (
        start_reading(recipe, folder, changes.get("paths", weight_files(folder))) is None and early_weights_calls == []
    )


@pytest.fixture
def read_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[EarlyWeights]:
    """Makes starts read weights early to the CPU. Returns the EarlyWeights that were started."""
    started: list[EarlyWeights] = []

    def start_on_cpu(recipe: Recipe, folder: Path, paths: list[Path]) -> EarlyWeights:
        started.append(EarlyWeights(folder, paths, CPU, ("float32",)))
        return started[-1]

    monkeypatch.setattr(early_weights, "start_reading", start_on_cpu)
    return started


@pytest.fixture
def float32_tiny(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "tiny"))
    change_tensors(folder, lambda tensors: tensors.update({name: item.float() for name, item in tensors.items()}))
    return folder


def test_a_start_uses_early_weights_and_reports_the_bytes_read(
    float32_tiny: Path, cache_dir: str, tiny_deployment: Any, read_on_cpu: list[EarlyWeights]
) -> None:
    flags = {"model": str(float32_tiny), "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES}
    deployment = start.prepare(build_recipe({**flags, "cache_dir": cache_dir}, environ={}))
    assert len(read_on_cpu) == 1 and deployment.weights_read is not None
    assert deployment.weights_read.num_bytes == sum(item.nbytes for item in load_file(float32_tiny / WEIGHTS).values())
    params = SamplingParams(max_tokens=6)
    expected = generate_tokens(tiny_deployment.engine, [[5, 6, 7]], params)
    assert generate_tokens(deployment.engine, [[5, 6, 7]], params) == expected


@pytest.mark.parametrize("error", [UsageError("refused"), KeyboardInterrupt()])
def test_a_start_that_fails_ends_the_reading(
    error: BaseException, float32_tiny: Path, read_on_cpu: list[EarlyWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        read_on_cpu[0]._thread.join()
        raise error

    monkeypatch.setattr(model_code, "start_from_code", fail)
    with pytest.raises(type(error)):
        start.prepare(Recipe(model=str(float32_tiny)))
    [early] = read_on_cpu
    assert not early._thread.is_alive() and early.take(folder, "cpu", torch.float32) == {}


@pytest.mark.parametrize("fields", [{"load_format": "dummy"}, {"device": "cpu"}])
def test_a_start_without_a_gpu_or_without_weights_reads_nothing(
    fields: dict[str, Any], read_on_cpu: list[EarlyWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_code, "start_from_code", lambda *arguments: arguments[-1])
    assert start.prepare(Recipe(model=TINY, **fields)) is None and read_on_cpu == []
