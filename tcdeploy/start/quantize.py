"""Saves a copy of a model whose linear layers are quantised, as `--quantize` does it while it loads the model.

The layers and their schemes are those of a start: `trace_requested` says which tensor of the checkpoint becomes which
scheme, and all others are copied. So serving the folder gives the same tensors, bit by bit, as serving the original
with --quantize, but reads fewer bytes. Names are those of the original checkpoint. models/formats/compressed_writer.py
says how the tensors are stored.

One tensor at a time is in memory. It is quantised on the GPU if there is one, which is faster. The folder appears under
its name when it is complete and on disk.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tcdeploy.errors import SpaceError, TcdeployError, UsageError
from tcdeploy.host.durable import sync, sync_folders
from tcdeploy.host.progress import Progress
from tcdeploy.host.regular_file import DISK_FULL
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.models.convert.scheme_experts import stacked_weights
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.formats.compressed_writer import settings, stored_specs, stored_tensors
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.models.location import local_folder
from tcdeploy.models.weights.conversions import quantised_tensors
from tcdeploy.models.weights.reader import StoredTensor, read_tensor
from tcdeploy.models.weights.sources import Source, conversions, stored_names
from tcdeploy.models.weights.weight_paths import INDEX
from tcdeploy.models.weights.writer import MAX_FILE_BYTES, TensorSpec, writing_tensors
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.quantize_request import QuantizeRequest, parse_quantize
from tcdeploy.planning.recipe import Recipe
from tcdeploy.planning.schemes import checkpoint_scheme
from tcdeploy.start.decide import RequestedModel, trace_requested
from tcdeploy.start.record.factors import READ_SUFFIXES

CONFIG = "config.json"
WEIGHT = ".weight"
EXPERTS = re.compile(r"(.*\.experts)\.\d+\.(.*)")
JOINED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj")}  # linear layers of an expert, by their joined weight
SPARE_BYTES = 16 << 20  # of the disk, for files beside the weights


@dataclass(frozen=True)
class SavedModel:
    """What `save_quantised` has written. quantised, dense: linear layers."""

    path: Path
    format: str
    quantised: int
    dense: tuple[Decision, ...]
    read_bytes: int
    written_bytes: int
    seconds: float  # to read, quantise and write the weights


def save_quantised(recipe: Recipe, out: Path, progress: Progress, max_file_bytes: int = MAX_FILE_BYTES) -> SavedModel:
    """Write the model of `recipe`, quantised as its `quantize` says, into the new folder `out`.

    Raises UsageError if `out` has files or the model is quantised already, ModelError, SpaceError and TcdeployError.
    """
    _check_target(out)
    progress.stage("decide")
    requested, request = trace_requested(recipe), parse_quantize(recipe.quantize or "")
    checkpoint, schemes = requested.traced.checkpoint, schemes_by_name(requested)
    specs = _specs(checkpoint, schemes, request)
    _check_space(out, sum(spec.num_bytes for spec in specs.values()))
    progress.stage("quantise")
    started_at = time.perf_counter()
    try:
        with temporary_folder("quantize", out.parent) as folder:
            with writing_tensors(folder, specs, max_file_bytes) as writer:
                for number, (name, stored) in enumerate(checkpoint.items(), 1):
                    progress.step(number, len(checkpoint), name)
                    for new_name, tensor in _new_tensors(name, stored, schemes.get(name), request, requested.device):
                        writer.write(new_name, tensor)
            seconds = time.perf_counter() - started_at
            source = local_folder(recipe.model, recipe.revision)
            assert source is not None, "its weights were read"
            copied = _copy_files(source, folder, settings(request, _ignored(requested.model, checkpoint, schemes)))
            sync_folders(folder, copied)
            folder.rename(out)
            sync(out.parent)
    except OSError as error:
        raise _writing_error(out, error) from error
    except torch.OutOfMemoryError as error:
        message = f"the GPU has no memory to quantise a tensor of {recipe.model}"
        hint = "free GPU memory (nvidia-smi lists the processes that use it), or quantise on the CPU: "
        raise SpaceError(message, hint + "CUDA_VISIBLE_DEVICES= tcdeploy quantize ...") from error
    read_bytes = sum(stored.num_bytes for stored in checkpoint.values())
    written_bytes = sum(spec.num_bytes for spec in specs.values())
    return SavedModel(out, request.text, len(schemes), requested.decisions, read_bytes, written_bytes, seconds)


def _check_target(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already", "name a new or an empty folder")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no folder", f"mkdir -p {out.parent}")


def _check_space(out: Path, num_bytes: int) -> None:
    status = os.statvfs(out.parent)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < num_bytes + SPARE_BYTES:
        message = f"{out} takes {num_bytes / 1e9:.2f} GB, and {free_bytes / 1e9:.2f} GB are free"
        raise SpaceError(message, "free space, or name a folder on another disk")


def _writing_error(out: Path, error: OSError) -> TcdeployError:
    if error.errno in DISK_FULL:
        return SpaceError(f"{out} cannot be written: {error.strerror}", "free space, or name a folder on another disk")
    return TcdeployError(f"{out} cannot be written: {error}", "name a folder that you may write")


def schemes_by_name(requested: RequestedModel) -> dict[str, LayerScheme]:
    """The schemes by name of the weight in the checkpoint."""
    schemes: dict[str, LayerScheme] = {}
    for source in requested.traced.sources.values():
        for _, _, _, (scheme, group_size, _), (weight,) in conversions(source, "quantised"):
            for part in _joined_rows(weight):
                match part:
                    case ["tensor", name] if name.endswith(WEIGHT):
                        schemes[name] = LayerScheme(checkpoint_scheme(scheme), group_size)
                    case _:
                        raise _conversion_error(weight)
    return schemes


def _joined_rows(weight: Source) -> list[Source]:
    """The matrices whose rows are joined to a weight: an expert's gate and up. They share no scale in these schemes."""
    match weight:
        case ["cat", 0, parts]:
            return parts  # type: ignore[no-any-return]
    return [weight]


def _conversion_error(weight: Source) -> TcdeployError:
    names = ", ".join(itertools.islice(stored_names(weight), 3))
    if "experts" in names:
        message = f"experts are not stored one by one, as the saved format requires: {names}"
        return UsageError(message, "serve the model with --quantize, or leave experts dense: --skip experts")
    message = f"the weight of a linear layer is not one tensor of the checkpoint: it is made of {names}"
    return UsageError(message, "serve the model with --quantize, or leave the layer dense with --skip NAME")


def _specs(
    checkpoint: Mapping[str, StoredTensor], schemes: Mapping[str, LayerScheme], request: QuantizeRequest
) -> dict[str, TensorSpec]:
    """The tensors of the new checkpoint, in the order of the old one."""
    specs: dict[str, TensorSpec] = {}
    for name, stored in checkpoint.items():
        if name in schemes:
            rows, columns = stored.shape
            of_weight = stored_specs(request, schemes[name], (rows, columns))
            specs |= {f"{name.removesuffix(WEIGHT)}.{suffix}": spec for suffix, spec in of_weight.items()}
        else:
            specs[name] = TensorSpec(stored.dtype, stored.shape)
    return specs


def _new_tensors(
    name: str, stored: StoredTensor, scheme: LayerScheme | None, request: QuantizeRequest, device: str
) -> Iterator[tuple[str, Tensor]]:
    weight = read_tensor(stored)
    if scheme is None:
        yield name, weight
        return
    tensors = stored_tensors(request, quantised_tensors(weight.to(device), scheme.scheme, scheme.group_size))
    for suffix, tensor in tensors.items():
        yield f"{name.removesuffix(WEIGHT)}.{suffix}", tensor.cpu()


def _ignored(model: nn.Module, checkpoint: Mapping[str, StoredTensor], schemes: Mapping[str, LayerScheme]) -> list[str]:
    """The list of layers that stay dense, for readers that replace every linear layer which is not in it.

    It has the paths of linear layers in the model, and those of matrices in the checkpoint, whose names may differ from
    them, and which may belong to parts that are not run here. All experts of a layer are one expression, or one for
    each projection that stays dense if another one does not.
    """
    modules = dict(model.named_modules())
    paths = [path for path, module in modules.items() if isinstance(module, nn.Linear)]
    matrices = [name for name, stored in checkpoint.items() if len(stored.shape) == 2 and name not in schemes]
    paths += [name.removesuffix(WEIGHT) for name in matrices if name.endswith(WEIGHT)]
    paths += [path for stacked in stacked_weights(model) for path in _expert_paths(stacked.path)]
    paths = [path for path in paths if not isinstance(modules.get(path), nn.Embedding)]
    partly_dense = {match[1] for name in schemes if (match := EXPERTS.fullmatch(name))}
    partly_dense |= {path.rpartition(".")[0] for path, item in modules.items() if isinstance(item, SchemeExperts)}
    return list(dict.fromkeys(_without_number(path, partly_dense) for path in paths))


def _expert_paths(path: str) -> list[str]:
    """The linear layers of the first expert, as most checkpoints name them, by the path of their stack."""
    experts, _, name = path.rpartition(".")
    return [f"{experts}.0.{layer}" for layer in JOINED_EXPERTS.get(name, (name,))]


def _without_number(path: str, partly_dense: Collection[str]) -> str:
    """partly_dense: paths of experts with a quantised projection."""
    match = EXPERTS.fullmatch(path)
    if match is None:
        return path
    layer = f"{re.escape(match[2])}$" if match[1] in partly_dense else ""
    return rf"re:{re.escape(match[1])}\.\d+\.{layer}"


def _copy_files(source: Path, folder: Path, quantization_config: Mapping[str, object]) -> list[str]:
    """Copy the config, with the settings, and the tokenizer's and all other small files. Returns their paths."""
    copied: list[str] = []
    for path in sorted(itertools.chain(source.iterdir(), source.glob("*/*.jinja"))):
        if path.suffix in READ_SUFFIXES and path.is_file() and path.name != INDEX:
            copied.append(path.relative_to(source).as_posix())
            content = path.read_bytes()
            if copied[-1] == CONFIG:
                config = {**json.loads(content), "quantization_config": quantization_config}
                content = (json.dumps(config, indent=2) + "\n").encode()
            target = folder / copied[-1]
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(content)
            sync(target)
    return copied
