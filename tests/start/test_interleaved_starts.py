"""Linear layers store int4 weights in another order than checkpoints, and give the tokens of dequantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tcdeploy.engine.check.parity_check import FAILED
from tcdeploy.errors import CompileError
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.kernels.linear.scheme_linear import KERNELS, SchemeKernel
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import SchemeExperts, SchemeWeight
from tcdeploy.models.load_model import load_model
from tcdeploy.models.weights.conversions import CONVERSIONS
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.start.decide import decide
from tcdeploy.start.prepare import prepare
from tests.exported_programs import exported_programs
from tests.formats import compressed
from tests.formats.checkpoint import save_source, write_checkpoint, write_dense
from tests.formats.test_format_starts import tokens_of, tokens_of_transformers

SCHEME, PLAIN = "int4_bfloat16_interleaved", "int4_bfloat16"


class Folders(NamedTuple):
    source: Path
    quantised: Path
    dense: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A llama with 256 columns: in 16 bits, in groups of 128, and the latter dequantised."""
    root = tmp_path_factory.mktemp("llama")
    source = save_source(root / "source", "llama", tie_word_embeddings=False)
    dense = write_checkpoint(compressed.FORMATS["int4 group 128"], source, root / "quantised")
    write_dense(source, dense, root / "dense")
    return Folders(source, root / "quantised", root / "dense")


def flags_of(folder: Path, **flags: Any) -> dict[str, Any]:
    limits = {"buckets": (32,), "batch_sizes": (4,), "context": 128, "kv_blocks": 32}
    return {"model": str(folder), "dtype": "float32", **limits, **flags}


def loaded_model(folder: Path, **flags: Any) -> Any:
    planned = decide(build_recipe(flags_of(folder, **flags), environ={}))
    packed = planned.architecture.packed_linears
    return load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, packed, planned.traced_model)


def weights_of(model: Any) -> dict[str, SchemeWeight]:
    return {path: item for path, item in model.named_modules() if isinstance(item, SchemeWeight)}


def kernel(scheme: str) -> SchemeKernel:
    """A kernel for the CPU that reads codes in the order of a scheme."""

    def multiply(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, SCHEMES[scheme].dequantise(tensors, x.dtype), bias)

    return SchemeKernel("cpu", multiply)


def test_a_checkpoint_is_interleaved_while_it_is_read(folders: Folders, tmp_path: Path) -> None:
    model = loaded_model(folders.quantised)
    weights, dense = weights_of(model), load_file(folders.dense / "model.safetensors")
    assert {weight.scheme for weight in weights.values()} == {SCHEME} and len(weights) == 12
    for path, weight in weights.items():
        assert torch.equal(weight.dequantised(torch.float32), dense[f"{path}.weight"].float()), path  # type: ignore[attr-defined]
    with exported_programs():
        tokens, _ = tokens_of(folders.quantised, tmp_path / "cache")
    assert tokens == tokens_of_transformers(folders.dense)


def test_an_order_that_is_not_changed_while_reading_changes_the_weight(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVERSIONS, "in_linear_order", lambda tensors, scheme: tensors[0])
    weights, dense = weights_of(loaded_model(folders.quantised)), load_file(folders.dense / "model.safetensors")
    for path, weight in weights.items():
        assert not torch.equal(weight.dequantised(torch.float32), dense[f"{path}.weight"].float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("request_", ["int4", "int4:256"])
def test_requested_weights_have_the_values_of_the_order_of_checkpoints(request_: str, folders: Folders) -> None:
    stored, group = load_file(folders.source / "model.safetensors"), 256 if ":" in request_ else 128
    weights = weights_of(loaded_model(folders.source, quantize=request_))
    assert {weight.layer_scheme for weight in weights.values()} == {(SCHEME, group)}
    for path, weight in weights.items():
        plain = SCHEMES[PLAIN].quantise(stored[f"{path}.weight"], group)
        expected = SCHEMES[PLAIN].dequantise(plain, torch.float32)
        assert torch.equal(weight.dequantised(torch.float32), expected)  # type: ignore[attr-defined]


def test_experts_keep_the_order_of_checkpoints(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "qwen3_moe", tie_word_embeddings=False)
    weights = weights_of(loaded_model(source, quantize="int4"))
    by_kind = {(type(weight), weight.in_features % 128 == 0): weight.scheme for weight in weights.values()}
    assert by_kind[SchemeExperts, True] == PLAIN and by_kind[SchemeLinear, True] == SCHEME


def test_random_weights_are_interleaved(folders: Folders) -> None:
    weights = weights_of(loaded_model(folders.quantised, load_format="dummy"))
    assert {weight.scheme for weight in weights.values()} == {SCHEME}


@pytest.mark.parametrize("order", [SCHEME, PLAIN])
def test_a_kernel_that_reads_another_order_fails_the_parity_check(
    order: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, SCHEME, (kernel(order),))
    flags = flags_of(folders.quantised, cache_dir=str(tmp_path / "cache"), programs="aot")
    with exported_programs():
        if order == SCHEME:
            prepare(build_recipe(flags, environ={}))
            return
        with pytest.raises(CompileError, match=FAILED):
            prepare(build_recipe(flags, environ={}))
