"""Inductor gets our graph passes as an option, and no option if it lacks the class of such passes."""

from __future__ import annotations

import runpy

import pytest

from tcdeploy.torch_compat.inductor import custom_graph_pass
from tcdeploy.torch_compat.inductor.custom_graph_pass import OPTION, pass_options


def do_nothing(graph: object) -> None:
    pass


def test_a_pass_is_an_option_of_inductor() -> None:
    assert pass_options(do_nothing) == {OPTION: do_nothing}


def test_without_the_class_of_torch_a_pass_can_be_made_and_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is looked up when the module is imported, so a second copy of the module is run without it."""
    monkeypatch.delattr("torch._inductor.custom_graph_pass.CustomGraphPass")
    copy = runpy.run_path(custom_graph_pass.__file__)
    graph_pass = type("GraphPass", (copy["CustomGraphPass"],), {"__call__": lambda self, graph: None})()
    assert copy["pass_options"](graph_pass) == {}
    assert not copy["supported"].check()
