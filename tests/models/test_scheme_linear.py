"""A quantised weight is one case of a table: what is derived from a scheme of tests, which the package does not know.

Starts are in tests/start/test_scheme_starts.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tcdeploy.bench.floor import count_weights
from tcdeploy.engine.check.precise_math import precise_math
from tcdeploy.errors import ModelError
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.kernels.linear.scheme_linear import scheme_linear
from tcdeploy.models import traced_model
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import count_elements
from tcdeploy.models.formats.methods import EXPLICIT
from tcdeploy.models.load_model import load_model
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.weights.digest import weights_digest
from tcdeploy.planning.memory import gib
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.schemes import SCHEMES, Scheme
from tcdeploy.start.decide import decide
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.workers.parallel import make_short_copy
from tests.conftest import TINY
from tests.int8_checkpoint import METHOD, WEIGHTS, Pair, change_config, change_tensors, registered, save_pair
from tests.int8_rows import SCHEME, dequantise, kernel, quantise
from tests.machines import decision_named
from tests.models.test_traced_model import save_model

FAMILIES = ("tiny", "qwen2", "mixtral", "qwen2_moe", "gpt_oss")  # the last three have experts, which stay dense
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def scheme() -> Iterator[None]:
    with registered():
        yield


def make_pair(family: str, folder: Path) -> Pair:
    source = BUILTIN_MODELS[TINY] if family == "tiny" else save_model(family, folder / "source")
    return save_pair(source, folder)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair("tiny", tmp_path)


def plan(folder: Path, **flags: Any) -> PlannedModel:
    flags = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128, **flags}
    return decide(build_recipe({"model": str(folder), **flags}, environ={}))


def load(planned: PlannedModel) -> PreTrainedModel:
    packed_linears = planned.architecture.packed_linears
    return load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, packed_linears, planned.traced_model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Each tied one once."""
    return dict([*model.named_parameters(), *model.named_buffers()])


# Loading


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_and_the_loaded_model_have_the_bytes_of_the_scheme(family: str, dtype: str, tmp_path: Path) -> None:
    pair = make_pair(family, tmp_path)
    planned = plan(pair.quantised, dtype=dtype)
    assert planned.architecture.schemes == {SCHEME.name: len(pair.paths)} and pair.paths
    assert decision_named(planned.plan, "weights").value == f"{len(pair.paths)} linear layers in {SCHEME.name}"
    layers = [item for item in load(planned).modules() if isinstance(item, SchemeLinear)]
    assert planned.architecture.largest_scheme_elements == max(item.rows * item.in_features for item in layers)
    model, dense = load(planned), load(plan(pair.dense, dtype=dtype))
    loaded_bytes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    assert planned.plan.weight_bytes == loaded_bytes < sum(tensor.nbytes for tensor in tensors_of(dense).values())
    stored, expected = load_file(pair.quantised / WEIGHTS), load_file(pair.dense / WEIGHTS)
    for path in pair.paths:
        layer = model.get_submodule(path)
        assert isinstance(layer, SchemeLinear)
        assert [tensor.dtype for tensor in layer.tensors] == [torch.int8, torch.float32]
        assert torch.equal(layer.weight[layer.start : layer.stop], stored[f"{path}.weight"])
        assert torch.equal(layer.dequantised(torch.float32), expected[f"{path}.weight"])
    assert len(weights_digest(model)) == 64 and weights_digest(model) == weights_digest(load(planned))
    assert weights_digest(model) != weights_digest(dense)


def test_packed_layers_share_their_tensors(pair: Pair) -> None:
    attention = load(plan(pair.quantised)).get_submodule("model.layers.0.self_attn")
    q, k, v, o = (attention.get_submodule(f"{name}_proj") for name in "qkvo")
    assert q.weight is k.weight is v.weight and q.weight_scale is v.weight_scale and q.weight is not o.weight
    assert [(layer.start, layer.stop, layer.rows) for layer in (q, k, v, o)] == [
        (0, 192, 320), (192, 256, 320), (256, 320, 320), (0, 192, 192),
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_the_tensors_of_loaded_ones(family: str, tmp_path: Path) -> None:
    """Compile workers use them."""
    folder = make_pair(family, tmp_path).quantised
    loaded, random = load(plan(folder)), load(plan(folder, load_format="dummy"))
    described = [
        {name: (item.dtype, item.shape) for name, item in tensors_of(model).items()} for model in (loaded, random)
    ]
    assert described[0] == described[1]


def test_the_copy_of_compile_workers_is_quantised_and_has_all_kinds_of_layers(pair: Pair) -> None:
    settings = json.loads((pair.quantised / "config.json").read_text())["quantization_config"]
    planned, dense = plan(pair.quantised), plan(pair.dense)
    copy, dense_copy = (make_short_copy(item.fake_model, item) for item in (planned, dense))
    stated = copy.config["quantization_config"]
    schemes = dict.fromkeys(pair.paths, [SCHEME.name, 0])
    assert stated == {"quant_method": EXPLICIT, "schemes": schemes, "fp8_inputs": False}
    assert "quantization_config" not in dense_copy.config
    assert copy.num_layers == dense_copy.num_layers < 4 and copy.weight_bytes < dense_copy.weight_bytes
    ignore = [*settings["ignore"], "model.layers.3.self_attn.o_proj"]
    change_config(pair.quantised, quantization_config={**settings, "ignore": ignore})
    planned = plan(pair.quantised, load_format="dummy")
    assert planned.architecture.schemes == {SCHEME.name: len(pair.paths) - 1}
    assert make_short_copy(planned.fake_model, planned).num_layers >= 4


def test_the_floor_counts_bytes_as_stored_and_products_as_dense(pair: Pair) -> None:
    quantised, dense = (plan(folder) for folder in pair[:2])
    sizes = [count_weights(load(planned), planned.plan.weight_bytes) for planned in (quantised, dense)]
    assert sizes[0].body_parameters == sizes[1].body_parameters == count_elements(load(dense)) - 2048 * 192
    saved = sum(item.nbytes for item in load_file(pair.dense / WEIGHTS).values()) - sum(
        item.nbytes for item in load_file(pair.quantised / WEIGHTS).values()
    )
    assert sizes[1].step_bytes - sizes[0].step_bytes == saved > 0


def test_the_floor_counts_a_quantised_head_as_read(pair: Pair) -> None:
    """Its tensors may have other names than `weight`."""
    model = load(plan(pair.dense))
    tied, embedding = count_weights(model, 1 << 30), model.get_input_embeddings().weight
    scheme = replace(SCHEME, tensors=(SCHEME.tensors[0]._replace(suffix="qweight"), SCHEME.tensors[1]))
    model.set_output_embeddings(SchemeLinear(scheme, quantise(embedding), None))
    sizes = count_weights(model, 1 << 30)
    assert sizes == tied._replace(step_bytes=tied.step_bytes - embedding.nbytes)


# Errors


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(f"{QUERY}.weight_scale"), f"lacks {QUERY}.weight_scale"),
        (lambda tensors: tensors.pop(f"{QUERY}.weight"), f"lacks {QUERY}.weight"),
        (
            lambda tensors: tensors.update({f"{QUERY}.weight_scale": torch.ones(8)}),
            f"shapes that are impossible in int8_rows: {QUERY}.weight [192, 192], {QUERY}.weight_scale [8]",
        ),
        (
            lambda tensors: tensors.update({f"{QUERY}.weight": tensors[f"{QUERY}.weight"].view(torch.uint8)}),
            f"{QUERY}.weight of MODEL is stored as uint8 [192, 192]; it must be int8",
        ),
        (
            lambda tensors: tensors.update({f"{QUERY}.weight": torch.ones(8, dtype=torch.int8)}),
            f"shapes that are impossible in int8_rows: {QUERY}.weight [8]",
        ),
        (
            lambda tensors: tensors.update({f"{QUERY}.weight": torch.ones(192, 191, dtype=torch.int8)}),
            f"{QUERY}.weight ([192, 191] instead of [192, 192])",
        ),
        (
            lambda tensors: tensors.update(
                {f"{QUERY}.weight": torch.ones(192, 192), f"{QUERY}.weight_scale": torch.ones(192)}
            ),
            f"{QUERY}.weight of MODEL is stored as float32 [192, 192]; it must be int8",
        ),
        (
            lambda tensors: tensors[f"{QUERY}.weight_scale"][7:8].fill_(math.nan),
            f"{QUERY}.weight_scale of MODEL has a scale that is not a number",
        ),
        (
            lambda tensors: tensors[f"{QUERY}.weight_scale"][7:8].fill_(-math.inf),
            f"{QUERY}.weight_scale of MODEL has a scale that is infinite",
        ),
        (
            lambda tensors: tensors[f"{QUERY}.weight_scale"][7:8].fill_(0),
            f"{QUERY}.weight_scale of MODEL has a scale that is zero",
        ),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_an_error_of_the_plan(
    change: Callable[[dict[str, Tensor]], object], text: str, pair: Pair
) -> None:
    change_tensors(pair.quantised, change)
    assert text.replace("MODEL", str(pair.quantised)) in error_of(lambda: plan(pair.quantised))


def test_a_quantised_layer_that_the_reader_leaves_out_is_refused(pair: Pair) -> None:
    settings = json.loads((pair.quantised / "config.json").read_text())["quantization_config"]
    change_config(pair.quantised, quantization_config={**settings, "ignore": ["q_proj"]})
    assert f"{QUERY}.weight has the dtype I8" in error_of(lambda: plan(pair.quantised))


def test_a_method_whose_tensors_are_others_is_refused(pair: Pair) -> None:
    change_config(pair.quantised, quantization_config={"quant_method": "awq"})
    message = error_of(lambda: plan(pair.quantised))
    assert "has quantised weights, which are not supported yet: model.layers.0.mlp.down_proj.weight" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.view(2, -1, 192).transpose(0, 1).reshape(192, 192),
        lambda weight: torch.cat([weight[64:], weight[:64]]),
    ],
    ids=["permuted", "merged"],
)  # fmt: skip
def test_a_weight_that_transformers_reorders_is_dequantised(
    change: Callable[[Tensor], Tensor], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model_of_tensors = f"{QUERY}.weight", traced_model.model_of_tensors

    def convert(plan: Any, config: Any, attn_implementation: str, tensors: dict[str, Tensor]) -> PreTrainedModel:
        return model_of_tensors(plan, config, attn_implementation, {**tensors, name: change(tensors[name])})

    monkeypatch.setattr(traced_model, "model_of_tensors", convert)
    planned = plan(pair.quantised)
    assert planned.architecture.schemes == {SCHEME.name: len(pair.paths) - 1}
    decision = decision_named(planned.plan, "dequantised to float32")
    assert decision.value == gib(192 * 192 * 4) and "linear layers" in decision.reason
    layer = load(planned).get_submodule(QUERY)
    assert torch.equal(layer.weight, change(load_file(pair.dense / WEIGHTS)[name]))


def test_a_quantised_embedding_is_dequantised(pair: Pair) -> None:
    name = "model.embed_tokens"

    def change(tensors: dict[str, Tensor]) -> None:
        weight, scale = quantise(tensors[f"{name}.weight"])
        tensors.update({f"{name}.weight": weight, f"{name}.weight_scale": scale})

    change_tensors(pair.quantised, change)
    stored = load_file(pair.quantised / WEIGHTS)
    expected = dequantise((stored[f"{name}.weight"], stored[f"{name}.weight_scale"]), torch.float32)
    assert torch.equal(load(plan(pair.quantised)).get_submodule(name).weight, expected)


def test_a_quantised_head_that_is_tied_to_a_dense_embedding_is_refused(pair: Pair) -> None:
    """transformers compares the values of the two if the checkpoint has both."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = quantise(tensors["model.embed_tokens.weight"])

    change_tensors(pair.quantised, change)
    settings = {"quant_method": METHOD, "ignore": []}
    change_config(pair.quantised, quantization_config=settings, tie_word_embeddings=True)
    assert "lm_head.weight is stored in another format" in error_of(lambda: plan(pair.quantised))


def test_weights_that_cannot_be_traced_are_refused_with_the_reason(pair: Pair) -> None:
    planned = plan(pair.quantised)
    torch.save(load_file(pair.quantised / WEIGHTS), pair.quantised / "pytorch_model.bin")
    (pair.quantised / WEIGHTS).unlink()
    reason = "cannot be loaded: it has no safetensors files, or they are not downloaded yet"
    assert reason in error_of(lambda: plan(pair.quantised))
    [finding] = decide(planned.recipe, is_dry_run=True).findings
    assert reason in finding.message
    assert "cannot be loaded: they are not traced" in error_of(lambda: load(replace(planned, traced_model=None)))


def test_remote_code_with_a_scheme_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_model, "model_class", lambda *_: None)
    assert "cannot be loaded: its code is not part of transformers" in error_of(lambda: plan(pair.quantised))


# Packing


def quantised_group(rows: list[int], scheme: Scheme = SCHEME, columns: int = 8) -> nn.ModuleDict:
    torch.manual_seed(4)
    layers = {f"l{number}": nn.Linear(columns, count).requires_grad_(False) for number, count in enumerate(rows)}
    return nn.ModuleDict(
        {name: SchemeLinear(scheme, scheme.quantise(layer.weight), layer.bias) for name, layer in layers.items()}
    )


def blocks_of_4_rows(name: str, row_block: int = 4) -> Scheme:
    """One scale for four rows."""

    def quantise_blocks(weight: Tensor) -> list[Tensor]:
        return [(10 * weight).round().to(torch.int8), torch.rand(-(-len(weight) // 4))]

    def dequantise_blocks(tensors: Any, dtype: torch.dtype) -> Tensor:
        return tensors[0].to(dtype) * tensors[1].to(dtype).repeat_interleave(4)[: len(tensors[0]), None]

    scale = SCHEME.tensors[1]._replace(shape=lambda rows, columns: (-(-rows // 4),))
    return replace(
        SCHEME, name=name, tensors=(SCHEME.tensors[0], scale), quantise=quantise_blocks, dequantise=dequantise_blocks,
        row_block=row_block,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "row_block", "is_packed"),
    [([8, 4], 4, True), ([6, 4], 4, False), ([7, 7], 4, False), ([3, 3], 4, False), ([8, 4], 0, False)],
)
def test_only_whole_blocks_of_rows_are_packed(
    rows: list[int], row_block: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = blocks_of_4_rows("blocks", row_block)
    monkeypatch.setitem(SCHEMES, "blocks", scheme)
    group, x = quantised_group(rows, scheme), torch.randn(3, 8)
    expected = [layer(x) for layer in group.values()]
    pack_linears(group, (tuple(group),))
    assert (group["l0"].weight is group["l1"].weight) == is_packed
    for layer, output in zip(group.values(), expected, strict=True):
        torch.testing.assert_close(layer(x), output)
        op_output = scheme_linear(x, layer.tensors, layer.packed_bias, layer.scheme)
        torch.testing.assert_close(op_output[:, layer.start : layer.stop], output)


def test_a_quantised_and_a_dense_layer_are_not_packed() -> None:
    group = quantised_group([4, 4])
    group["l1"] = nn.Linear(8, 4)
    pack_linears(group, (("l0", "l1"),))
    assert type(group["l1"]) is nn.Linear and group["l0"].stop == group["l0"].rows == 4


# Eager mode, and the op


def test_eager_mode_runs_no_kernel() -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError("a kernel runs")

    with registered(fail):
        layer, x = quantised_group([4])["l0"], torch.randn(2, 3, 8)
        weight = dequantise(layer.tensors, torch.float32)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight, layer.bias))


def test_the_weight_is_dequantised_in_the_higher_precision() -> None:
    layer, x = quantised_group([16], columns=64)["l0"].bfloat16(), torch.randn(5, 64).bfloat16()
    layer.weight_scale = nn.Parameter(layer.weight_scale.float() * 1.2345678, requires_grad=False)
    weight = layer.weight.double() * layer.weight_scale.double()[:, None]
    expected = x.double() @ weight.T + layer.bias.double()
    with precise_math(torch.bfloat16, torch.float32):
        precise = layer(x)
    assert precise.dtype == torch.float32
    torch.testing.assert_close(precise.double(), expected, rtol=1e-5, atol=1e-5)
    assert (layer(x).double() - expected).abs().max() > 1e-3


@pytest.mark.parametrize("function", [kernel, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck_passes_with_and_without_a_kernel(function: Any, dtype: torch.dtype, has_bias: bool) -> None:
    bias = torch.randn(16).to(dtype) if has_bias else None
    tensors = list(quantise(torch.randn(16, 8)))
    with registered(function):
        for x in (torch.randn(5, 8), torch.randn(1, 1, 8), torch.randn(2, 5, 8).transpose(0, 1)):
            x = x.to(dtype)
            torch.library.opcheck(scheme_linear.overload, (x, tensors, bias, SCHEME.name))
            weight = dequantise(tensors, torch.float32)
            expected = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(dtype)
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(scheme_linear(x, tensors, bias, SCHEME.name), expected, **tolerance)


def test_a_kernel_runs_for_its_device_and_its_rows_only() -> None:
    rows: list[int] = []

    def count(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
        rows.append(len(x))
        return kernel(x, tensors, bias)

    tensors = list(quantise(torch.randn(16, 8)))
    with registered(count, max_rows=4):
        for number in (1, 4, 5):
            scheme_linear(torch.randn(1, number, 8), tensors, None, SCHEME.name)
    assert rows == [1, 4]
