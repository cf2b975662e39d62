"""The digest of weights in memory changes with every kind of accidental change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tcdeploy.models.weights import digest as module
from tcdeploy.models.weights.digest import weights_digest

ROWS, COLUMNS = 64, 40  # bfloat16: 640 words


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_WORDS", {"cpu": 16})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, 3, bias=False), nn.LayerNorm(5)).bfloat16()
    model.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)
    return model


def words_of(model: nn.Module) -> Tensor:
    """The weight of the first layer as int64 [words], a view."""
    return model.get_parameter("0.weight").detach().view(-1).view(torch.int64)


def flip(model: nn.Module, *bits: tuple[int, int]) -> None:
    for word, bit in bits:
        words_of(model)[word] ^= -(2**63) if bit == 63 else 1 << bit


def swap(tensor: Tensor, first: int, second: int) -> None:
    tensor[[first, second]] = tensor[[second, first]]


def swap_chunks(model: nn.Module) -> None:
    words = words_of(model)
    words[:32] = words[:32].clone().roll(16)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "lowest bit": lambda model: flip(model, (7, 0)),
    "highest bit": lambda model: flip(model, (7, 63)),
    "two highest bits": lambda model: flip(model, (7, 63), (400, 63)),
    "four highest bits of a chunk": lambda model: flip(model, (0, 63), (1, 63), (2, 63), (3, 63)),
    "sign of two bfloat16 values of a word": lambda model: flip(model, (9, 63), (9, 31)),
    "signs of a whole row": lambda model: model.get_parameter("0.weight").data[3].neg_(),
    "signs of all values": lambda model: model.get_parameter("0.weight").data.neg_(),
    "two rows swapped": lambda model: swap(model.get_parameter("0.weight").data, 4, 50),
    "two values of a row swapped": lambda model: swap(model.get_parameter("0.weight").data[5], 0, 33),
    "two words swapped": lambda model: swap(words_of(model), 3, 4),
    "two chunks swapped": swap_chunks,
    "zeroed tile": lambda model: model.get_parameter("0.weight").data[32:48, 16:32].zero_(),
    "last value of an odd number": lambda model: model.get_parameter("2.bias").data[4].add_(1),
    "buffer": lambda model: model.get_buffer("scale")[1].add_(1e-6),
    "name of a tensor": lambda model: model.register_buffer("scales", model._buffers.pop("scale")),
    "dtype of a tensor": lambda model: model.register_buffer("scale", model.get_buffer("scale").view(torch.int32)),
    "shape of a tensor": lambda model: model.register_buffer("scale", model.get_buffer("scale")[None]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weights_changes_the_digest(change: str) -> None:
    model = make_model()
    before = weights_digest(model)
    CHANGES[change](model)
    assert weights_digest(model) != before


def test_equal_weights_have_equal_digests() -> None:
    assert weights_digest(make_model()) == weights_digest(make_model())


def test_two_tensors_that_swap_their_values_change_the_digest() -> None:
    model = make_model()
    weight, bias = (model.get_parameter(name).data for name in ("2.weight", "2.bias"))  # of one shape: ones and zeros
    before = weights_digest(model)
    weight.zero_()
    bias.fill_(1)
    assert weights_digest(model) != before


def test_tied_weights_are_read_once_and_distinguished_from_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    equal = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in equal:
        layer.weight.data.copy_(tied[0].weight)
    assert weights_digest(tied) != weights_digest(equal)
    sizes = []
    checksums = module._checksums
    monkeypatch.setattr(module, "_checksums", lambda *args: sizes.append(len(args[0])) or checksums(*args))
    weights_digest(tied)
    assert sizes == [8 * 8 * 4]


def test_a_model_without_weights_has_a_digest() -> None:
    assert len(weights_digest(nn.Identity())) == 64
    empty = nn.Identity()
    empty.register_buffer("nothing", torch.empty(0))
    assert weights_digest(empty) != weights_digest(nn.Identity())
