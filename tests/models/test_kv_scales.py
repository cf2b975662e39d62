"""The scales of an FP8 KV cache are found under the names of public checkpoints, and become buffers of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.errors import ModelError
from tcdeploy.models.convert.kv_scales import DUMMY_SCALES
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start import decide as decide_module
from tcdeploy.start.decide import decide
from tcdeploy.start.model_code import load_runner
from tests.formats import compressed, modelopt
from tests.formats.checkpoint import read_tensors, save_source, write_checkpoint
from tests.machines import decision_named, decisions_named
from tests.scaled_kv import layer_scales, save_with_tensors

KV_SCALE = re.compile(r"[.][kv]_scale$")
LAYER = "model.layers.{}.self_attn"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "model")


def plan(folder: Path, **flags: Any) -> Any:
    given = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128, "kv_dtype": "fp8", **flags}
    return decide(build_recipe({"model": str(folder), **given}, environ={}))


def buffers(planned: Any) -> dict[str, list[float]]:
    """The scales of the loaded model by path of the module."""
    named = load_runner(planned).model.named_buffers()
    found = {name: buffer for name, buffer in named if name.endswith("kv_scales")}
    assert all(buffer.dtype == torch.float32 for buffer in found.values())
    return {name.removesuffix(".kv_scales"): buffer.tolist() for name, buffer in found.items()}


def number(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


NAMES: dict[str, dict[str, Tensor]] = {
    "compressed-tensors": {"k_scale": number(0.25, 1), "v_scale": number(0.5, 1)},
    "Model Optimizer": {"k_proj.k_scale": number(0.25), "v_proj.v_scale": number(0.5)},
    "vLLM": {"attn.k_scale": number(0.25), "attn.v_scale": number(0.5)},
    "bfloat16": {"k_scale": number(0.25, 1, dtype=torch.bfloat16), "v_scale": number(0.5, 1, dtype=torch.bfloat16)},
    "one for both": {"kv_scale": number(0.25)},
}


@pytest.mark.parametrize("is_traced", [True, False], ids=["read by threads", "loaded by transformers"])
@pytest.mark.parametrize("name", NAMES)
def test_scales_are_found_under_each_name(
    name: str, is_traced: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{LAYER.format(1)}.{suffix}": tensor for suffix, tensor in NAMES[name].items()}
    if not is_traced:
        monkeypatch.setattr(decide_module, "trace_model", refuse_to_trace)
    planned = plan(save_with_tensors(source, tmp_path / "model", tensors))
    assert (planned.traced_model is not None) == is_traced
    expected = [0.25, 0.25] if name == "one for both" else [0.25, 0.5]
    assert buffers(planned) == {LAYER.format(0): [1.0, 1.0], LAYER.format(1): expected}
    decision = decision_named(planned.plan, "KV scales")
    assert (decision.value, decision.reason) == ("of the checkpoint", "1 of 2 layers have them; 1.0 in the others")


def refuse_to_trace(*_: Any) -> Any:
    raise decide_module.NotTraceableError("a test loads it otherwise")


@pytest.mark.parametrize("form", ["fp8 KV", "modelopt"])
def test_scales_of_quantised_checkpoints_are_those_in_the_file(form: str, source: Path, tmp_path: Path) -> None:
    formats = {"modelopt": modelopt.FORMATS["fp8"]}
    formats |= {"fp8 KV": next(item for item in compressed.FORMATS.values() if item.settings["kv_cache_scheme"])}
    write_checkpoint(formats[form], source, tmp_path / "model")
    stored = {name: tensor.item() for name, tensor in read_tensors(tmp_path / "model").items() if KV_SCALE.search(name)}
    k, v = (sorted(value for name, value in stored.items() if name.endswith(end)) for end in ("k_scale", "v_scale"))
    found = buffers(plan(tmp_path / "model"))
    assert len(found) == 2 and [sorted(column) for column in zip(*found.values(), strict=True)] == [k, v]
    assert len({*k, *v}) == 4, "the scales differ"


def test_without_scales_they_are_1_and_with_random_weights_they_are_not(source: Path) -> None:
    planned = plan(source)
    assert buffers(planned) == dict.fromkeys(map(LAYER.format, range(2)), [1.0, 1.0])
    decision = decision_named(planned.plan, "KV scales")
    assert (decision.value, decision.reason) == ("1.0", "the checkpoint has none")
    random = plan(source, load_format="dummy")
    assert buffers(random) == dict.fromkeys(map(LAYER.format, range(2)), [pytest.approx(x) for x in DUMMY_SCALES])
    assert decision_named(random.plan, "KV scales").reason == "of random weights"


def test_by_default_the_scales_of_a_checkpoint_are_ignored(source: Path, tmp_path: Path) -> None:
    planned = plan(save_with_tensors(source, tmp_path / "model", layer_scales(2, 0.1, 0.2)), kv_dtype="auto")
    assert buffers(planned) == {} and decisions_named(planned.plan, "KV scales") == []


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "no partner": (
        {"k_scale": number(0.5)},
        r"has a scale of K \(.*self_attn.k_scale\), but none of V",
    ),
    "one per head": ({"k_scale": number(0.5, 2), "v_scale": number(0.5, 2)}, r"k_scale of .* has the shape \[2\]"),
    "zero": ({"k_scale": number(0.5), "v_scale": number(0.0)}, "v_scale of .* is 0; the scale .* must be positive"),
    "negative": ({"k_scale": number(-1.0), "v_scale": number(1.0)}, "k_scale of .* is -1; "),
    "infinite": ({"k_scale": number(float("inf")), "v_scale": number(1.0)}, "k_scale of .* is inf; "),
    "not a number": ({"kv_scale": number(float("nan"))}, "kv_scale of .* is nan; "),
}


@pytest.mark.parametrize("name", BAD)
def test_scales_that_cannot_be_used_are_refused_by_name(name: str, source: Path, tmp_path: Path) -> None:
    tensors, message = BAD[name]
    named = {f"{LAYER.format(0)}.{suffix}": tensor for suffix, tensor in tensors.items()}
    folder = save_with_tensors(source, tmp_path / "model", named)
    with pytest.raises(ModelError, match=message) as error:
        plan(folder)
    assert error.value.hint.startswith("use --kv-dtype auto")
    plan(folder, kv_dtype="auto")
