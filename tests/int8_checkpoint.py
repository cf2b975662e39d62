"""Checkpoints in the scheme of int8_rows.py, beside dense ones with the same values, and how their config names it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from tcdeploy.kernels.linear.scheme_linear import SchemeFunction
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.formats.layer_names import is_listed
from tcdeploy.models.formats.methods import METHODS, Method
from tcdeploy.models.formats.quantised_weight import Layer, LayerScheme, QuantisedWeight, weight_in_scheme
from tests.int8_rows import SCHEME, dequantise, kernel, quantise, scheme_registered

METHOD = "int8-rows-of-tests"
IGNORED = ("lm_head", "gate", "router", "shared_expert_gate")
WEIGHTS = "model.safetensors"


def find(settings: Mapping[str, Any], layer: Layer) -> dict[str, QuantisedWeight | None]:
    if not {"weight", "weight_scale"} & layer.tensors.keys() or layer.path.rpartition(".")[2] in settings["ignore"]:
        return {}
    weight = layer.tensors.get("weight")
    if "weight_scale" not in layer.tensors and weight is not None and weight.dtype != torch.int8:
        return {}
    layer.require("weight", (torch.int8,))
    layer.require("weight_scale", (torch.float32,))
    sources = [layer.source(suffix) for suffix in ("weight", "weight_scale")]
    names = layer.names(("weight", "weight_scale"))
    return {"weight": weight_in_scheme(layer, names, SCHEME.name, sources, names[1:])}


def scheme_of(settings: Mapping[str, Any], path: str) -> LayerScheme | None:
    return None if ".experts." in path or is_listed(path, settings["ignore"]) else LayerScheme(SCHEME.name)


@contextlib.contextmanager
def registered(function: SchemeFunction | None = kernel, max_rows: int | None = None) -> Iterator[None]:
    """As `scheme_registered`; checkpoints of METHOD have the scheme."""
    with scheme_registered(function, max_rows), mock.patch.dict(METHODS, {METHOD: Method(find, scheme_of)}):
        yield


class Pair(NamedTuple):
    """Folders of two checkpoints with the same values in float32, and the paths of the quantised layers."""

    quantised: Path
    dense: Path
    paths: list[str]


def save_pair(source: Path, folder: Path) -> Pair:
    """Quantise all linear layers of a model but the IGNORED ones."""
    pair = Pair(folder / "quantised", folder / "dense", linear_paths(source))
    for copied in pair[:2]:
        shutil.copytree(source, copied)
    dense = {name: tensor.float() for name, tensor in load_file(source / WEIGHTS).items()}
    quantised = dict(dense)
    for path in pair.paths:
        tensors = quantise(dense[f"{path}.weight"])
        dense[f"{path}.weight"] = dequantise(tensors, torch.float32)
        quantised |= {f"{path}.{item.suffix}": tensor for item, tensor in zip(SCHEME.tensors, tensors, strict=True)}
    for copied, tensors in ((pair.quantised, quantised), (pair.dense, dense)):
        save_file(tensors, copied / WEIGHTS, {"format": "pt"})
    change_config(pair.quantised, quantization_config={"quant_method": METHOD, "ignore": list(IGNORED)})
    return pair


def linear_paths(source: Path) -> list[str]:
    with torch.device("meta"):
        model: nn.Module = auto_class(AutoConfig.from_pretrained(source), False).from_config(
            AutoConfig.from_pretrained(source)
        )
    modules = model.named_modules()
    return [path for path, item in modules if type(item) is nn.Linear and path.rpartition(".")[2] not in IGNORED]


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
