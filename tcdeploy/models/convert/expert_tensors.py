"""Checks the tensors of experts that are stored one by one, which transformers stacks while it loads them.

If one is missing, transformers raises an error only after it has read the whole checkpoint, and without its name. The
names in the headers show it before. Experts with other shapes are not an error by themselves: Ernie 4.5 VL stores
experts for text and for images in one list. They are named only if transformers cannot stack them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from tcdeploy.errors import ModelError
from tcdeploy.models.convert.quantisation import TensorHeader
from tcdeploy.models.load_errors import DOWNLOAD_HINT

EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.+)")


def check_experts(model: str, tensors: dict[str, TensorHeader]) -> None:
    """Raise ModelError if some experts of a layer lack tensors that others have."""
    missing: list[str] = []
    surplus: list[str] = []
    for path, experts in _experts(tensors).items():
        counts = Counter(frozenset(names) for names in experts.values())
        usual = max(counts, key=lambda names: (counts[names], len(names)))
        for number, names in experts.items():
            missing += [f"{path}.{number}.{name}" for name in usual - names.keys()]
            surplus += [f"{path}.{number}.{name}" for name in names.keys() - usual]
    if missing:
        raise ModelError(
            f"the checkpoint of {model} lacks tensors that other experts have ({len(missing)}): {_first(missing)}",
            DOWNLOAD_HINT,
        )
    if surplus:
        raise ModelError(
            f"the checkpoint of {model} has tensors that other experts do not have ({len(surplus)}): {_first(surplus)}",
            DOWNLOAD_HINT,
        )


def conversion_error(
    model: str, tensors: dict[str, TensorHeader], known_shapes: dict[str, tuple[int, ...]]
) -> ModelError:
    """The error if transformers cannot convert a checkpoint. `known_shapes`: of the model's tensors, by name."""
    unusual: list[str] = []
    for path, experts in _experts(tensors).items():
        for name in next(iter(experts.values())):
            shapes = {number: names[name].shape for number, names in experts.items() if name in names}
            [(usual, _)] = Counter(shapes.values()).most_common(1)
            unusual += [
                f"{path}.{number}.{name} ({list(shape)}, other experts: {list(usual)})"
                for number, shape in shapes.items()
                if shape != usual
            ]
    unusual = unusual or [name for name, tensor in tensors.items() if known_shapes.get(name) != tensor.shape]
    return ModelError(
        f"transformers cannot convert the tensors of {model} to those that config.json describes: {_first(unusual)}",
        "use the config.json that belongs to these weights, or download the model again",
    )


def _experts(tensors: dict[str, TensorHeader]) -> dict[str, dict[str, dict[str, TensorHeader]]]:
    """The tensors of experts by path of the list, by number of the expert, and by name."""
    lists: dict[str, dict[str, dict[str, TensorHeader]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            lists[match[1]][match[2]][match[3]] = tensor
    return lists


def _first(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3])
