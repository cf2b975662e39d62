"""Writes a checkpoint folder in a quantisation format, and returns the weights that the format's own tool reads.

A `Format` is the part of config.json that names it, and a function that stores one tensor of the dense model under the
names of the format. All else is the same for every format: other tensors keep their names and dtypes, and the folder
keeps its other files. `write_dense` writes the twin in float32 with which a reader is compared: logits of both agree
if every weight is read correctly.

Weights are stored from rounded values of a random model, not calibrated as the tools do: calibration changes which
values are stored, never how.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tcdeploy.models.auto_classes import auto_class

WEIGHTS = "model.safetensors"
SIZES: dict[str, Any] = {  # Groups of 128 inputs fit; 64 rows of keys are half a block of 128.
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERT_SIZES: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_local_experts": 4,
}  # fmt: skip


class Stored(NamedTuple):
    """What replaces a dense tensor: tensors of the format, and the float32 weights that they stand for, by name."""

    tensors: dict[str, Tensor]
    dense: dict[str, Tensor]


class StoredWeight(NamedTuple):
    """A linear layer's weight: tensors by their names in the layer, and the float32 weight [rows, columns]."""

    tensors: dict[str, Tensor]
    weight: Tensor


Tensors = Mapping[str, Tensor]
Store = Callable[[str, Tensor], Stored | None]  # (name, tensor) -> None if the tensor stays as it is


@dataclass(frozen=True)
class Format:
    """`settings`: the value of `settings_key` in config.json, None if it does not mention quantisation.

    `extra_tensors` gets the names of the dense model, and returns tensors that belong to no weight. `header` gets the
    dense and the stored tensors, and returns the metadata of the safetensors file.
    """

    settings: Mapping[str, Any] | None
    store: Store
    settings_key: str = "quantization_config"
    extra_tensors: Callable[[Iterable[str]], dict[str, Tensor]] = lambda _: {}
    files: Mapping[str, Any] = field(default_factory=dict)  # JSON files beside config.json
    header: Callable[[Tensors, Tensors], dict[str, str]] = lambda *_: {"format": "pt"}


def store_projections(store: Callable[[str, Tensor], StoredWeight | None]) -> Store:
    """Store the linear layers of attention and of MLPs, all experts' included; never lm_head or a router.

    `store` gets the path of the layer. DeepSeek's kv_a_proj_with_mqa is one of them.
    """

    def store_tensor(name: str, tensor: Tensor) -> Stored | None:
        path = name.removesuffix(".weight")
        if path == name or not path.endswith(("_proj", "_proj_with_mqa")):
            return None
        stored = store(path, tensor)
        if stored is None:
            return None
        return Stored({f"{path}.{suffix}": item for suffix, item in stored.tensors.items()}, {name: stored.weight})

    return store_tensor


def save_source(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A small dense model. Rows and columns differ in size and mean, so that every scale and zero point matters."""
    config = AutoConfig.for_model(family, **{**SIZES, **EXPERT_SIZES, **changes})
    torch.manual_seed(1)
    model = auto_class(config, False).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(random_weight(*parameter.shape, seed=name))
    model.to(dtype).save_pretrained(folder)
    return folder


def random_weight(*shape: int, seed: str = "") -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    rows, columns = (torch.rand(size, generator=generator) for size in shape[-2:])
    sizes = 0.02 * 2 ** (2 * rows[:, None] + 2 * columns - 2)
    return (torch.randn(shape, generator=generator) + rows[:, None] - 0.5) * sizes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def write_checkpoint(form: Format, source: Path, folder: Path) -> dict[str, Tensor]:
    """Write the model of `source` in a format. Returns all its weights as a reader sees them, by dense name."""
    shutil.copytree(source, folder)
    tensors: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in sorted(read_tensors(source).items()):
        stored = form.store(name, tensor.float()) or Stored({name: tensor}, {name: tensor.float()})
        tensors |= stored.tensors
        dense |= stored.dense
    tensors |= form.extra_tensors(dense)
    contiguous = {name: item.contiguous() for name, item in tensors.items()}
    save_file(contiguous, folder / WEIGHTS, form.header(dense, tensors))
    if form.settings is not None:
        change_json(folder / "config.json", {form.settings_key: form.settings})
    for name, content in form.files.items():
        change_json(folder / name, content)
    return dense


def write_dense(source: Path, dense: Mapping[str, Tensor], folder: Path) -> Path:
    """The same model with the weights of `write_checkpoint`, in float32."""
    shutil.copytree(source, folder)
    save_file(dict(dense), folder / WEIGHTS, {"format": "pt"})
    change_json(folder / "config.json", {"dtype": "float32"})
    return folder


def change_json(path: Path, values: Mapping[str, Any]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}, indent=2))


def scalar(name: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = ()) -> Tensor:
    """A scale of activations or of the KV cache: positive, and different for every name."""
    return torch.full(shape, 0.01 + zlib.crc32(name.encode()) % 1000 / 1e5).to(dtype)
