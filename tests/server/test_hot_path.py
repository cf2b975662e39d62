"""TCDEPLOY_HOT_PATH_OFF disables named optimizations, and rejects unknown names."""

from __future__ import annotations

import sys

import pytest

from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.server.http.hot_path import (
    SWITCH_INTERVAL_S,
    hot_path_from_environment,
    shorten_switch_interval,
)
from tcdeploy.server.settings import HOT_PATH_VARIABLE, SERVER_VARIABLES, HotPath


def test_named_optimizations_are_off_and_the_others_on() -> None:
    assert hot_path_from_environment({}) == HotPath()
    environ = {HOT_PATH_VARIABLE: "direct_routes, wait_for_launch"}
    assert hot_path_from_environment(environ) == HotPath(direct_routes=False, wait_for_launch=False)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="contains 'sleep'") as error:
        hot_path_from_environment({HOT_PATH_VARIABLE: "sleep"})
    assert error.value.hint is not None and "first_token_sleep" in error.value.hint


def test_the_switch_interval_is_shortened() -> None:
    before = sys.getswitchinterval()
    try:
        shorten_switch_interval()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S) and SWITCH_INTERVAL_S < 0.005
    finally:
        sys.setswitchinterval(before)


def test_the_variable_is_not_a_recipe_key() -> None:
    environ = {HOT_PATH_VARIABLE: "direct_routes"}
    assert build_recipe({"model": "m"}, None, environ, other_variables=SERVER_VARIABLES).model == "m"
