"""Which layers have equal programs: the kinds that decide how many layers the compile worker's copy has."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tcdeploy.planning.architecture import AttentionSpec
from tcdeploy.programs.regions import LayerKind, layer_kinds


class Layer(nn.Module):
    def __init__(self, layer_idx: int, width: int = 4, **constants: Any) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, width)
        self.attention.layer_idx = self.layer_idx = layer_idx  # type: ignore[assignment]
        for name, value in constants.items():
            setattr(self.attention, name, value)


def kinds_of(modules: list[Layer], windows: tuple[int, ...] = (0, 0, 0)) -> list[LayerKind]:
    specs = [AttentionSpec(f"layers.{index}", 1, 1, 4, 4, window, 0.0, False) for index, window in enumerate(windows)]
    return layer_kinds(modules, [(spec,) for spec in specs])


def test_layers_that_differ_in_their_number_and_weights_are_of_one_kind() -> None:
    assert len(set(kinds_of([Layer(index) for index in range(3)]))) == 1
    assert len(set(kinds_of([Layer(index + 7) for index in range(3)]))) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("use_rope", (1, 0, 1)),
        ("is_causal", (True, False, True)),
        ("scale", (1.0, 0.5, 1.0)),
        ("mode", ("a", "b", "a")),
    ],
)
def test_a_layer_with_another_constant_is_of_another_kind(name: str, values: tuple[Any, ...]) -> None:
    first, second, third = kinds_of([Layer(index, **{name: value}) for index, value in enumerate(values)])
    assert first == third != second
    assert first.structure == second.structure, "explain traces them together, and reports the constant"


def test_a_layer_with_other_tensors_or_another_attention_is_of_another_kind() -> None:
    first, second, third = kinds_of([Layer(0), Layer(1, width=6), Layer(2)])
    assert first == third != second
    first, second, third = kinds_of([Layer(0), Layer(1), Layer(2)], (0, 1, 0))
    assert first == third != second
