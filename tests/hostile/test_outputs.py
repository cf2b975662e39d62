"""Sends a thousand hostile outputs through the parsers of outputs; `scripts/attack outputs` sends more."""

from __future__ import annotations

import logging
import random

import pytest

from tests.hostile import outputs


def test_outputs_are_parsed_equally_in_any_pieces_completely_and_in_linear_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "tcdeploy.server")
    result = outputs.run(random.Random(7), 1000)
    assert result["succeeded"] == 0, result["examples"]
    assert set(result["by_parser"]) == set(outputs.PARSERS)
