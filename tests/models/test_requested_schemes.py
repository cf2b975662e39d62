"""`--quantize`: which layers of a model are quantised, to which tensors, and what its plan says.

Starts, and folders that `tcdeploy quantize` writes, are in tests/start/test_quantize.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tcdeploy.errors import UsageError
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import SchemeExperts, SchemeWeight
from tcdeploy.models.load_model import load_model, loading_model
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.weights import conversions, sources
from tcdeploy.planning.recipe import Recipe
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.start.decide import decide
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.workers.parallel import make_short_copy, worker_recipe
from tests.conftest import TINY
from tests.int8_checkpoint import WEIGHTS, change_config
from tests.machines import decision_named
from tests.models.test_traced_model import save_model

LAYER, QUERY = "model.layers.1", "model.layers.1.self_attn.q_proj"
PROJECTIONS = 7  # of a decoder layer
SCHEME_OF = {"fp8": "fp8_channel", "int8": "int8", "int4:64": "int4_bfloat16"}
each_request = pytest.mark.parametrize("quantize", SCHEME_OF)


def plan(model: str | Path = TINY, **flags: Any) -> PlannedModel:
    """Each plan of the embedded model is made once."""
    return (plan_of_tiny if model == TINY else make_plan)(model, **flags)


def make_plan(model: str | Path, **flags: Any) -> PlannedModel:
    flags = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128, **flags}
    return decide(Recipe(model=str(model), **flags))


plan_of_tiny = functools.cache(make_plan)


def load(planned: PlannedModel) -> PreTrainedModel:
    packed_linears = planned.architecture.packed_linears
    return load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, packed_linears, planned.traced_model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Each tied one once."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def quantised_paths(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, SchemeWeight)]


def rows_of(layer: SchemeLinear) -> list[Tensor]:
    return [tensor[layer.start : layer.stop] for tensor in layer.tensors]


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        action()
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [
        *((quantize, "bfloat16") for quantize in SCHEME_OF),
        *(pytest.param(quantize, "float32", marks=[pytest.mark.long] * (quantize != "int8")) for quantize in SCHEME_OF),
    ],
)
def test_the_model_has_the_scheme_of_the_stored_weights_and_no_dense_copy(quantize: str, dtype: Any) -> None:
    """Also of another dtype: the values are those of the checkpoint. Packed layers keep the scales of their rows."""
    planned = plan(quantize=quantize, dtype=dtype)
    model, stored = load(planned), load_file(BUILTIN_MODELS[TINY] / WEIGHTS)
    paths = quantised_paths(model)
    assert len(paths) == 6 * PROJECTIONS and QUERY in paths and "lm_head" not in paths
    loaded_bytes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    dense = {name: tensor for name, tensor in stored.items() if name.removesuffix(".weight") not in paths}
    scheme = SCHEMES[SCHEME_OF[quantize]]
    expected_bytes = sum(tensor.numel() for tensor in dense.values()) * getattr(torch, dtype).itemsize
    for path in paths:
        layer, weight = model.get_submodule(path), stored[f"{path}.weight"]
        expected = scheme.quantise(weight, 64 if ":" in quantize else weight.shape[1])
        expected_bytes += sum(tensor.nbytes for tensor in expected)
        assert layer.scheme == scheme.name and all(
            map(torch.equal, map(as_bytes, rows_of(layer)), map(as_bytes, expected))
        )
    computed_bytes = sum(tensor.nbytes for tensor in dict(model.named_buffers()).values())
    assert planned.plan.weight_bytes == loaded_bytes == expected_bytes + computed_bytes


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_scale_of_the_next_row_changes_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above finds it."""
    stored = load_file(BUILTIN_MODELS[TINY] / WEIGHTS)[f"{QUERY}.weight"]
    quantised_tensors = conversions.quantised_tensors

    def shifted(*arguments: Any) -> list[Tensor]:
        codes, scale = quantised_tensors(*arguments)
        return [codes, scale.roll(-1, 0)]

    def error() -> float:
        weight = load(plan(quantize="int8")).get_submodule(QUERY).dequantised(torch.float32)
        return float((weight - stored.float()).abs().max() / stored.float().abs().max())

    assert error() < 1 / 250
    monkeypatch.setattr(sources, "quantised_tensors", shifted)
    assert error() > 1 / 25


@each_request
def test_the_plan_counts_the_bytes_of_the_scheme_and_says_why(quantize: str) -> None:
    planned, dense = plan(quantize=quantize), plan()
    line = decision_named(planned.plan, "weights")
    assert line.value == f"42 linear layers in {SCHEME_OF[quantize]}"
    assert line.reason == f"quantised with --quantize {quantize}; others are float32"
    assert planned.plan.weight_bytes < dense.plan.weight_bytes / 2
    keys = {item.plan.key for item in (planned, dense, plan(quantize=quantize, quantize_skip=("o_proj",)))}
    assert len(keys) == 3
    dry = decide(planned.recipe, is_dry_run=True)
    assert (dry.plan.weight_bytes, dry.findings) == (planned.plan.weight_bytes, ())


def test_plans_differ_if_other_layers_of_the_same_size_are_skipped() -> None:
    first, second = (plan(quantize="int8", quantize_skip=(f"layers.{number}.self_attn.o_proj",)) for number in (1, 2))
    assert first.plan.weight_bytes == second.plan.weight_bytes and first.plan.key != second.plan.key


def test_layers_whose_columns_are_not_whole_groups_stay_dense() -> None:
    planned = plan(quantize="int4")
    line = decision_named(planned.plan, "dense layers")
    assert (line.value, line.reason) == ("36", "groups of 128 do not divide their 192 columns")
    assert quantised_paths(load(planned)) == [f"model.layers.{number}.mlp.down_proj" for number in range(6)]
    message = error_of(lambda: plan(quantize="int4:384"))
    assert message == (
        "int4:384 quantises no linear layer of this model: groups of 384 do not divide their 192 columns; "
        "groups of 384 do not divide their 512 columns"
    )


@pytest.mark.parametrize(
    ("names", "dense"),
    [
        (("q_proj",), 6),
        (("model.layers.1",), PROJECTIONS),
        (("layers.1.mlp", "layers.2.mlp.up_proj"), 4),
        (("*.self_attn.*",), 24),
        (("re:.*layers\\.[12]\\.mlp\\.(up|gate)_proj$",), 4),
    ],
)
def test_layers_are_skipped_by_name_path_wildcard_and_expression(names: tuple[str, ...], dense: int) -> None:
    planned = plan(quantize="int8", quantize_skip=names)
    line = decision_named(planned.plan, "dense layers")
    assert (line.value, line.reason) == (f"{dense}", "requested to stay dense")
    assert len(quantised_paths(load(planned))) == 6 * PROJECTIONS - dense


@pytest.mark.parametrize("name", ["lm_head", "q_prj", "re:(", "model.layers.6"])
def test_a_name_that_is_of_no_layer_is_refused(name: str) -> None:
    message = error_of(lambda: plan(quantize="int8", quantize_skip=("q_proj", name)))
    assert message == f"{name!r}, which was requested to stay dense, is no linear layer of a decoder layer"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "qwen2"])
def test_experts_are_quantised_and_routers_and_the_head_stay_dense(
    family: str, load_format: Any, tmp_path: Path
) -> None:
    planned = plan(save_model(family, tmp_path / "model"), quantize="int8", load_format=load_format)
    model, dense = load(planned), load(plan(tmp_path / "model", load_format=load_format))
    paths = quantised_paths(model)
    stacks = [path for path in paths if ".experts." in path]
    assert planned.architecture.schemes == {"int8": len(paths) - len(stacks)}
    assert planned.architecture.expert_schemes == ({"int8": len(stacks)} if family != "qwen2" else {})
    assert {path.rpartition(".")[2] for path in stacks} == ({"gate_up_proj", "down_proj"} if stacks else set())
    names = {path.rpartition(".")[2] for path in paths if path not in stacks}
    assert names <= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {"q_proj", "o_proj"} <= names
    others = [(name, item.shape, item.dtype) for name, item in tensors_of(model).items() if not in_any(name, paths)]
    expected = [(name, item.shape, item.dtype) for name, item in tensors_of(dense).items() if not in_any(name, paths)]
    assert others == expected
    assert any("gate" in name or "router" in name for name, _, _ in others) == (family != "qwen2")
    if family == "qwen2_moe":
        assert decision_named(planned.plan, "dense layers").reason == "routers of experts"
        assert type(model.get_submodule("model.layers.0.mlp.shared_expert_gate")) is nn.Linear


def in_any(name: str, paths: list[str]) -> bool:
    return name in paths or name.rpartition(".")[0] in paths


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4:32"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_have_the_tensors_of_their_stored_matrices(family: str, quantize: str, tmp_path: Path) -> None:
    """Those of gpt_oss are stored together, and transposed."""
    folder = save_model(family, tmp_path / "model")
    model, dense = load(plan(folder, quantize=quantize)), load(plan(folder))
    experts = {path: module for path, module in model.named_modules() if isinstance(module, SchemeExperts)}
    assert len(experts) == 2 * len(model.get_submodule("model.layers"))
    for path, module in experts.items():
        weight = dense.get_parameter(path)
        matrices = weight.transpose(1, 2) if family == "gpt_oss" else weight
        for number, matrix in enumerate(matrices):
            expected = SCHEMES[module.scheme].quantise(matrix, 32 if ":" in quantize else matrix.shape[1])
            tensors = [tensor[number] for tensor in module.tensors]
            assert all(map(torch.equal, map(as_bytes, tensors), map(as_bytes, expected))), (path, number)


def test_experts_can_stay_dense(tmp_path: Path) -> None:
    planned = plan(save_model("mixtral", tmp_path / "model"), quantize="fp8", quantize_skip=("experts",))
    assert planned.architecture.expert_schemes == {} and planned.architecture.schemes
    line = decision_named(planned.plan, "dense layers")
    assert (line.value, line.reason) == ("8", "requested to stay dense")


@each_request
def test_random_weights_and_compile_workers_have_the_tensors_of_loaded_ones(quantize: str) -> None:
    planned, random = plan(quantize=quantize), plan(quantize=quantize, load_format="dummy")
    described = [
        {name: (item.dtype, item.shape) for name, item in tensors_of(load(item)).items()} for item in (planned, random)
    ]
    assert described[0] == described[1] and planned.plan.key == random.plan.key
    schemes = make_short_copy(planned.fake_model, planned).config["quantization_config"]["schemes"]
    assert schemes[QUERY][0] == SCHEME_OF[quantize] and len(schemes) == 6 * PROJECTIONS
    [worker] = [worker_recipe(item, FewPrompts()) for item in (planned,)]
    assert (worker.quantize, worker.quantize_skip, worker.load_format) == (None, None, "dummy")


class FewPrompts:
    def blocks_needed(self, bucket: object) -> int:
        return 4


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [(torch.float16, "int4_float16"), (torch.bfloat16, "int4_bfloat16"), (torch.float32, "int4_bfloat16")],
)
def test_scales_have_the_dtype_of_the_checkpoint(dtype: torch.dtype, scheme: str, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model", dtype)
    assert plan(folder, quantize="int4:32").architecture.schemes.keys() == {scheme}
    change_config(folder, dtype=None)
    assert plan(folder, quantize="int4:32").architecture.schemes.keys() == {scheme}


def test_a_checkpoint_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    for action in (lambda: plan(folder, quantize="fp8"), lambda: plan(folder, quantize="fp8", load_format="dummy")):
        assert error_of(action) == f"{folder} is quantised already, with gptq"


def test_names_to_skip_need_a_request() -> None:
    assert error_of(lambda: plan(quantize_skip=("q_proj",))) == "--quantize-skip needs --quantize"


def test_a_request_that_no_source_has_checked_is_refused() -> None:
    message = "--quantize is 'fp4'; it must be fp8, int8, int4 or int4:GROUP"
    assert error_of(lambda: plan(quantize="fp4")) == message


def test_weights_that_cannot_be_traced_are_refused_and_found_in_a_dry_run(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    reason = "cannot be quantised while its files are read: it has no safetensors files, or they are not downloaded yet"
    assert error_of(lambda: plan(folder, quantize="int8")) == f"{folder} {reason}"
    dry = decide(Recipe(model=str(folder), quantize="int8"), is_dry_run=True)
    assert [finding.message for finding in dry.findings] == [f"{folder} {reason}"]
    assert dry.architecture.schemes.keys() == {"int8"}


def test_large_weights_are_quantised_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    expected = SCHEMES["int4_bfloat16"].quantise(weight, 32)
    monkeypatch.setattr(conversions, "CHUNK_ELEMENTS", 7 * 64 + 1)
    found = conversions.quantised_tensors(weight, "int4_bfloat16", 32)
    assert all(map(torch.equal, found, expected)) and found[0].shape == (50, 32)
    assert torch.equal(conversions.quantised([weight.T.contiguous().T], "int4_bfloat16", 32, 1), expected[1])


def test_each_weight_is_read_and_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tensors of its scheme are written by one task of a thread, also into packed ones."""
    calls: list[tuple[int, ...]] = []
    quantised_tensors = sources.quantised_tensors

    def counted(weight: Tensor, *arguments: Any) -> list[Tensor]:
        calls.append(tuple(weight.shape))
        return quantised_tensors(weight, *arguments)

    monkeypatch.setattr(sources, "quantised_tensors", counted)
    planned = plan(quantize="fp8")
    with loading_model(planned.traced_model, planned.plan) as loading:
        pass
    assert len(calls) == 42 and calls.count((512, 192)) == 12
    assert loading.total.num_bytes == sum(item.nbytes for item in load_file(BUILTIN_MODELS[TINY] / WEIGHTS).values())


def test_a_float16_checkpoint_is_read_with_all_its_digits(tmp_path: Path) -> None:
    """Codes are computed from the stored values, not from those of the dtype in which the model computes."""
    folder = save_model("llama", tmp_path / "model", torch.float16)
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight"] = torch.linspace(0.1, 0.9, 96 * 64).half().view(96, 64)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    layer = load(plan(folder, quantize="int8", dtype="bfloat16")).get_submodule(name)
    codes, scale = SCHEMES["int8"].quantise(tensors[f"{name}.weight"], 64)
    rounded, _ = SCHEMES["int8"].quantise(tensors[f"{name}.weight"].bfloat16(), 64)
    assert torch.equal(rows_of(layer)[0], codes) and not torch.equal(rounded, codes)
