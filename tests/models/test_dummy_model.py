"""Random weights of a quantised model are made in their scheme: the dense model is never in memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tcdeploy.models import dummy_model
from tcdeploy.models.convert.scheme_weight import SchemeWeight
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.torch_compat.dynamo.fake_tensors import fake_tensors, has_data
from tests.int8_checkpoint import change_config

LAYERS, HIDDEN, INTERMEDIATE, EXPERTS = 8, 128, 256, 8
SIZES = {
    "vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": INTERMEDIATE,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
CHUNK = INTERMEDIATE * HIDDEN
MATRIX_BYTES = 2 * INTERMEDIATE * HIDDEN  # of the largest of a linear layer, in bfloat16; half of that of an expert
ROUNDING = 8  # the memory that drawing and rounding to a scheme may take, in dense weights: several float32 copies
CASES = {
    "llama fp8": ("llama", {"quantize": "fp8"}),
    "llama int4": ("llama", {"quantize": "int4:32"}),
    "qwen3_moe fp8": ("qwen3_moe", {"quantize": "fp8"}),
    "gpt_oss mxfp4": ("gpt_oss", {}),
}
each_case = pytest.mark.parametrize("case", CASES)
Load: TypeAlias = Callable[[], PreTrainedModel]


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Load]:
    return {case: dummy_loader(case, tmp_path_factory.mktemp("model")) for case in CASES}


def dummy_loader(case: str, folder: Path, **values: Any) -> Load:
    """Loads the random model of a case, with packed layers."""
    family, flags = CASES[case]
    AutoConfig.for_model(family, **{**SIZES, **values}).save_pretrained(folder)
    if "mxfp4" in case:
        change_config(folder, quantization_config=MXFP4)
    fields: Any = {"dtype": "bfloat16", "load_format": "dummy", "buckets": (16,), "batch_sizes": (1,), **flags}
    planned = decide(Recipe(model=str(folder), kv_blocks=32, context=128, **fields))
    packed_linears = planned.architecture.packed_linears
    return lambda: load_model(planned.plan, planned.config, "eager", packed_linears)


class CountedBytes(TorchDispatchMode):
    """peak: the most bytes of all CPU tensors that ops have created in the block and that existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self.known.get(id(storage)) is storage:
            return
        self.known[id(storage)] = storage
        size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.current -= size


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Each tied one once."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def peak_and_bytes(load: Load) -> tuple[int, int]:
    """The peak while the model is made, and the bytes of the model."""
    with CountedBytes() as counted:
        model = load()
    return counted.peak, sum(tensor.nbytes for tensor in tensors_of(model).values())


@each_case
def test_nothing_is_drawn_on_the_meta_device(loaders: dict[str, Load], case: str) -> None:
    """transformers would draw each matrix through Python decompositions, although the meta device stores no values."""
    drawn: list[str] = []

    class Draws(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            drawn.extend(tensor.device.type for tensor in args[:1] if "normal" in str(func))
            return func(*args, **(kwargs or {}))

    with Draws():
        loaders[case]()
    assert set(drawn) == {"cpu"}


@each_case
def test_the_peak_is_the_quantised_model_and_one_dense_weight(
    case: str, loaders: dict[str, Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy_model, "CHUNK_ELEMENTS", CHUNK)
    load = loaders[case]
    peak, model_bytes = peak_and_bytes(load)
    most = model_bytes + ROUNDING * MATRIX_BYTES * (1 if "llama" in case else 2)
    assert model_bytes < peak < most
    monkeypatch.setattr(dummy_model, "_matrices_on_meta", contextlib.nullcontext)
    whole_peak, _ = peak_and_bytes(load)
    assert whole_peak > 1.2 * most, "a dense model is found"


@each_case
def test_all_rows_of_quantised_weights_are_drawn(
    case: str, loaders: dict[str, Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in chunks that do not divide them."""
    load = loaders[case]
    for chunk in (CHUNK, 5 * HIDDEN):
        monkeypatch.setattr(dummy_model, "CHUNK_ELEMENTS", chunk)
        model = load()
        weights = {path: module for path, module in model.named_modules() if isinstance(module, SchemeWeight)}
        assert len(weights) >= 2 * LAYERS
        for path, module in weights.items():
            values = module.dequantised(torch.float32).flatten(0, -2)
            stds = values.std(-1) * values.shape[1] ** 0.5
            assert stds.min() > 0.6 and stds.max() < 5, path
            assert len(values.unique(dim=0)) == len(values), path


def test_the_standard_deviations_are_those_of_a_dense_random_model(
    loaders: dict[str, Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    for load in loaders.values():
        model = load()
        monkeypatch.setattr(dummy_model, "_matrices_on_meta", contextlib.nullcontext)
        dense = dict(load().named_modules())
        monkeypatch.undo()
        for path, module in model.named_modules():
            if isinstance(module, SchemeWeight):
                found, expected = (item.dequantised(torch.float32).std() for item in (module, dense[path]))
                torch.testing.assert_close(found, expected, rtol=0.03, atol=0)


@each_case
def test_no_tensor_stays_without_values_and_equal_seeds_give_equal_models(case: str, loaders: dict[str, Load]) -> None:
    load = loaders[case]
    first = tensors_of(load())
    torch.rand(3)
    second = tensors_of(load())
    assert first.keys() == second.keys() and not any(tensor.is_meta for tensor in first.values())
    assert all(torch.equal(as_bytes(first[name]), as_bytes(second[name])) for name in first)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@each_case
def test_buffers_are_those_that_transformers_computes(case: str, loaders: dict[str, Load]) -> None:
    """Such as rotary factors."""
    model = loaders[case]()
    config = AutoConfig.for_model(CASES[case][0], **SIZES)
    expected = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_buffers())
    buffers = dict(model.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    assert all(torch.equal(tensor, expected[name]) for name, tensor in buffers.items())


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tied_head_stays_tied(is_tied: bool, tmp_path: Path) -> None:
    model = dummy_loader("llama fp8", tmp_path, tie_word_embeddings=is_tied)()
    assert type(model.lm_head) is nn.Linear
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied


def test_a_matrix_that_two_layers_share_stays_shared() -> None:
    with dummy_model._matrices_on_meta():
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)])
        model[1].weight = model[0].weight
    assert [layer.weight.is_meta for layer in model] == [True, True, True]
    dummy_model._make_shared_matrices(model, "cpu")
    assert model[0].weight is model[1].weight and [layer.weight.is_meta for layer in model] == [False, False, True]


def test_modules_made_after_the_block_have_values() -> None:
    with pytest.raises(ValueError), dummy_model._matrices_on_meta():
        raise ValueError
    assert not nn.Linear(4, 3).weight.is_meta


@each_case
def test_a_model_without_data_has_the_same_tensors(loaders: dict[str, Load], case: str) -> None:
    with fake_tensors():
        fake = loaders[case]()
    tensors, expected = ({n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (fake, loaders[case]()))
    assert tensors == expected
    assert not any(map(has_data, fake.parameters()))
