"""`fetch` and the start after it both call `decide`. Only the first call probes the model."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

from tcdeploy.planning.recipe import Recipe
from tcdeploy.start import decide as deciding
from tests.conftest import TINY

RECIPE = Recipe(model=TINY, device="cpu", buckets=(32,), batch_sizes=(1,))


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    probe = mock.Mock(wraps=deciding.probe_model)
    monkeypatch.setattr(deciding, "probe_model", probe)
    monkeypatch.setattr(deciding, "_kept_probe", {})
    return probe


def test_a_kept_probe_is_used_once(probe: mock.Mock) -> None:
    first = deciding.decide(RECIPE, keeps_probe=True)
    second = deciding.decide(RECIPE)
    assert probe.call_count == 1 and second.fake_model is first.fake_model
    assert (second.plan, second.architecture) == (first.plan, first.architecture)
    third = deciding.decide(RECIPE)
    assert probe.call_count == 2 and third.fake_model is not first.fake_model
    assert third.plan == first.plan


@pytest.mark.parametrize(
    "changes",
    [{"quantize": "fp8", "load_format": "dummy"}, {"trust_remote_code": True}],
    ids=["quantised", "remote code"],
)
def test_a_model_that_decisions_may_change_is_probed_again(probe: mock.Mock, changes: dict[str, Any]) -> None:
    recipe = dataclasses.replace(RECIPE, **changes)
    plans = [deciding.decide(recipe, keeps_probe=True).plan for _ in range(2)]
    assert probe.call_count == 2 and plans[0] == plans[1]


def test_a_model_with_another_config_is_probed(probe: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    deciding.decide(RECIPE, keeps_probe=True)
    load = deciding.load_config

    def load_other(*args: Any) -> Any:
        config = load(*args)
        config.num_hidden_layers -= 1
        return config

    monkeypatch.setattr(deciding, "load_config", load_other)
    other = deciding.decide(dataclasses.replace(RECIPE, load_format="dummy"))
    assert probe.call_count == 2 and len(other.architecture.layer_states) == probe.call_args[0][0].num_hidden_layers
