"""Each defect of a quantised checkpoint is an error of the plan that names the tensor and the next step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tcdeploy.errors import ModelError
from tests.formats import bitsandbytes, compressed, fp8, int_packed, modelopt, torchao
from tests.formats.checkpoint import WEIGHTS, Format, Stored, change_json, read_tensors, save_source, write_checkpoint
from tests.formats.test_readers import plan
from tests.models.test_traced_model import change_tensors

PATH = "model.layers.1.mlp.up_proj"  # [384, 256]
Change = Callable[[dict[str, Tensor]], object]


def drop(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{PATH}.{suffix}")


def fill(suffix: str, value: float) -> Change:
    return lambda tensors: tensors[f"{PATH}.{suffix}"].view(-1)[:1].fill_(value)


def keep(suffix: str, *sizes: int) -> Change:
    """Only the first rows, and of those the first columns."""

    def change(tensors: dict[str, Tensor]) -> None:
        part = tensors[f"{PATH}.{suffix}"]
        for dim, size in enumerate(sizes):
            part = part.narrow(dim, 0, size)
        tensors[f"{PATH}.{suffix}"] = part.contiguous()

    return change


def cast(suffix: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.update({f"{PATH}.{suffix}": tensors[f"{PATH}.{suffix}"].to(dtype)})


def flatten(suffix: str) -> Change:
    return lambda tensors: tensors.update({f"{PATH}.{suffix}": tensors[f"{PATH}.{suffix}"].flatten()})


FP8, INT4, INT8 = fp8.FORMATS["deepseek"], compressed.FORMATS["int4 asymmetric"], compressed.FORMATS["int8"]
GPTQ, AWQ, NVFP4 = int_packed.FORMATS["gptq"], int_packed.FORMATS["awq"], modelopt.FORMATS["nvfp4"]
ACT_ORDER, ACT_ORDER_INT4 = int_packed.FORMATS["gptq act order"], compressed.FORMATS["int4 g_idx"]
LLM_INT8 = bitsandbytes.FORMATS["int8"]
NF4, TORCHAO = bitsandbytes.bitsandbytes(4, "nf4", is_nested=True), torchao.FORMATS[next(iter(torchao.FORMATS))]
DEFECTS: dict[str, tuple[Format, Change, str]] = {
    "FP8, no scale": (FP8, drop("weight_scale_inv"), f"lacks {PATH}.weight_scale"),
    "FP8, NaN": (FP8, fill("weight_scale_inv", math.nan), f"{PATH}.weight_scale_inv of MODEL has a"),
    "FP8, infinite": (FP8, fill("weight_scale_inv", -math.inf), "has a scale that is infinite"),
    "FP8, zero": (FP8, fill("weight_scale_inv", 0), "has a scale that is zero"),
    "FP8, negative": (FP8, fill("weight_scale_inv", -1), "has a scale that is negative"),
    "FP8, fewer blocks": (FP8, keep("weight_scale_inv", 2), f"{PATH}.weight_scale_inv of MODEL is stored"),
    "FP8, integers": (FP8, cast("weight_scale_inv", torch.int32), "is stored as int32 [3, 2]; it must be float32 or"),
    "FP8, other weight": (FP8, cast("weight", torch.int8), f"not supported yet: {PATH}.weight has the dtype I8"),
    "int4, no shape": (INT4, drop("weight_shape"), f"lacks {PATH}.weight_shape"),
    "int4, no scale": (INT4, drop("weight_scale"), f"lacks {PATH}.weight_scale"),
    "int4, fewer words": (INT4, keep("weight_packed", 384, 31), f"{PATH}.weight_packed of MODEL is stored"),
    "int4, other shape": (INT4, fill("weight_shape", 383), "the values of weight_shape"),
    "int4, fewer zero points": (INT4, keep("weight_zero_point", 47), f"{PATH}.weight_zero_point of MODEL is stored as"),
    "int8, NaN": (INT8, fill("weight_scale", math.nan), f"{PATH}.weight_scale of MODEL has a scale that is not"),
    "int8, fewer rows": (INT8, keep("weight_scale", 383), "is stored as bfloat16 [383, 1]; it must have the shape"),
    "GPTQ, no scales": (GPTQ, drop("scales"), f"lacks {PATH}.scales"),
    "GPTQ, no zero points": (GPTQ, drop("qzeros"), f"lacks {PATH}.qzeros"),
    "GPTQ, fewer groups": (GPTQ, keep("scales", 1), f"{PATH}.qzeros of MODEL is stored as int32 [2, 48]"),
    "GPTQ, uneven groups": (GPTQ, fill("g_idx", 1), f"{PATH}.g_idx of MODEL is stored as int32 [256]; it"),
    "GPTQ, no order of columns": (ACT_ORDER, drop("g_idx"), f"lacks {PATH}.g_idx"),
    "int4, no order of columns": (ACT_ORDER_INT4, drop("weight_g_idx"), f"lacks {PATH}.weight_g_idx"),
    "GPTQ, zero": (GPTQ, fill("scales", 0), f"{PATH}.scales of MODEL has a scale that is zero"),
    "AWQ, fewer columns": (AWQ, keep("qweight", 255), "has 2 groups, which do not divide 255 columns"),
    "AWQ, no scales": (AWQ, drop("scales"), f"lacks {PATH}.scales"),
    "NVFP4, no scales": (NVFP4, drop("weight_scale"), f"lacks {PATH}.weight_scale"),
    "NVFP4, no factor": (NVFP4, drop("weight_scale_2"), f"not supported yet: {PATH}.weight has the dtype U8"),
    "NVFP4, fewer groups": (NVFP4, keep("weight_scale", 384, 15), "have shapes that are impossible in nvfp4"),
    "NVFP4, negative": (NVFP4, fill("weight_scale_2", -1), f"{PATH}.weight_scale_2 of MODEL has a scale"),
    "NF4, no table": (NF4, drop("weight.quant_map"), f"lacks {PATH}.weight.quant_map"),
    "NF4, fewer blocks": (NF4, keep("weight.absmax", 100), f"{PATH}.weight.absmax of MODEL is stored as uint8 [100]"),
    "NF4, damaged state": (
        NF4, fill("weight.quant_state.bitsandbytes__nf4", 0), "bitsandbytes__nf4 of MODEL is damaged",
    ),
    "LLM.int8, order of tensor cores": (
        LLM_INT8, fill("weight_format", 2), f"{PATH}.weight_format of MODEL is stored as uint8 []; it must be 0",
    ),
    "int8, one dimension": (INT8, flatten("weight"), "is stored as int8 [98304]; it must have rows and columns"),
    "LLM.int8, one dimension": (LLM_INT8, flatten("weight"), "it must have rows and columns"),
    "torchao, one dimension": (TORCHAO, flatten("_weight_qdata"), "it must have rows and columns"),
    "torchao, no scale": (TORCHAO, drop("_weight_scale"), f"lacks {PATH}._weight_scale"),
    "two weights": (
        INT4, lambda tensors: tensors.update({f"{PATH}.weight": torch.ones(384, 256)}),
        f"two weights for one layer: {PATH}.weight, and {PATH}.weight_packed",
    ),
    "two formats": (
        INT4, lambda tensors: tensors.update({f"{PATH}.qweight": torch.ones(8, 8, dtype=torch.int32)}),
        f"not supported yet: {PATH}.qweight",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "model")


def error_of(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        plan(folder)
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_an_error_of_the_plan(name: str, source: Path, tmp_path: Path) -> None:
    form, change, text = DEFECTS[name]
    write_checkpoint(form, source, tmp_path / "model")
    change_tensors(tmp_path / "model", change)
    assert text.replace("MODEL", str(tmp_path / "model")) in error_of(tmp_path / "model")


def test_scales_of_auto_round_may_be_negative(source: Path, tmp_path: Path) -> None:
    write_checkpoint(int_packed.FORMATS["auto-round"], source, tmp_path / "model")
    change_tensors(tmp_path / "model", lambda tensors: tensors[f"{PATH}.scales"].neg_())
    assert plan(tmp_path / "model").architecture.schemes


VERSIONS = {"gptq_v2": "gptq", "gptq": "gptq_v2"}  # checkpoint_format: that of the tensors to the one stated


@pytest.mark.parametrize("version", VERSIONS)
def test_zero_points_of_the_other_version_of_gptq_are_refused(version: str, source: Path, tmp_path: Path) -> None:
    """Shapes and dtypes are equal. All zero points are 8 in a symmetric weight, so 7 or 9 show the version."""
    form = int_packed.gptq(checkpoint_format=version)
    write_checkpoint(form, source, tmp_path / "model")
    settings = {**(form.settings or {}), "checkpoint_format": VERSIONS[version]}
    change_json(tmp_path / "model/config.json", {"quantization_config": settings})
    assert "qzeros of" in (message := error_of(tmp_path / "model"))
    assert message.endswith(
        "it has zero points that are off by one for the checkpoint_format or packing_format in config.json"
    )


def test_a_square_quantised_conv1d_is_refused(tmp_path: Path) -> None:
    """It would load transposed: its weight has inputs as rows, and GPTQ stores those of linear layers."""
    sizes = {"n_embd": 256, "n_layer": 1, "n_head": 8, "n_inner": 384, "n_positions": 256}
    gpt2 = save_source(tmp_path / "source", "gpt2", **sizes)
    path = "transformer.h.0.attn.c_proj"

    def store(name: str, tensor: Tensor) -> Stored | None:
        if name != f"{path}.weight":
            return None
        stored = int_packed.store_gptq(GPTQ.settings or {}, 1, True, tensor.T)
        return Stored({f"{path}.{suffix}": item for suffix, item in stored.tensors.items()}, {name: stored.weight.T})

    write_checkpoint(Format(GPTQ.settings, store), gpt2, tmp_path / "model")
    assert error_of(tmp_path / "model") == f"{path} is a quantised Conv1D, which is not supported"


def test_a_number_of_bits_that_config_json_does_not_state_is_refused(source: Path, tmp_path: Path) -> None:
    """compressed-tensors stores four values of 7 bits in a word, as many as of 8 bits."""
    form = compressed.FORMATS["int8 packed"]
    write_checkpoint(form, source, tmp_path / "model")
    settings = json.loads(json.dumps(form.settings).replace('"num_bits": 8', '"num_bits": 7'))
    change_json(tmp_path / "model/config.json", {"quantization_config": settings})
    assert error_of(tmp_path / "model").endswith("the values of weight_shape, with 7 bits")


def test_transforms_of_compressed_tensors_are_refused(source: Path, tmp_path: Path) -> None:
    write_checkpoint(INT4, source, tmp_path / "model")
    settings = {**(INT4.settings or {}), "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}
    change_json(tmp_path / "model/config.json", {"quantization_config": settings})
    assert "quantised with compressed-tensors and transform_config" in error_of(tmp_path / "model")


BYTES = {
    "FP8 block": FP8, "FP8 channel": fp8.FORMATS["fbgemm"], "FP8 tensor": fp8.FORMATS["autofp8 static"],
    "int4 symmetric": compressed.FORMATS["int4 group 128"], "int4 zero points": AWQ,
    "int4 act order": int_packed.FORMATS["gptq act order"], "MXFP4": compressed.FORMATS["mxfp4"], "NVFP4": NVFP4,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_weights_take_the_bytes_of_the_checkpoint(name: str, source: Path, tmp_path: Path) -> None:
    """Layers of 384 x 256: scales per row weigh more than in real models, and `columns` too."""
    write_checkpoint(BYTES[name], source, tmp_path / "model")
    stored = read_tensors(tmp_path / "model")
    assert (tmp_path / "model" / WEIGHTS).is_file()
    planned = plan(tmp_path / "model", dtype="bfloat16")
    assert planned.plan.weight_bytes <= 1.05 * sum(tensor.nbytes for tensor in stored.values())
    assert sum(planned.architecture.schemes.values()) >= 10
