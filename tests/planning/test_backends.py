"""The backend table is complete and consistent, so that planning can rely on it for any model."""

from __future__ import annotations

import typing
from dataclasses import fields

from tcdeploy.planning.backends import BACKENDS, Backend
from tcdeploy.planning.recipe import Attention


def test_every_backend_that_a_recipe_accepts_has_a_row_and_no_other() -> None:
    assert set(BACKENDS) == set(typing.get_args(Attention))
    assert all(BACKENDS[name].name == name for name in BACKENDS)


def test_every_field_of_a_row_is_documented() -> None:
    documentation = Backend.__doc__ or ""
    for field in fields(Backend):
        assert field.name == "name" or f"{field.name}" in documentation


def test_the_only_fallback_comes_last_and_has_no_limits() -> None:
    *others, last = BACKENDS.values()
    assert last.selection == "fallback" and all(row.selection != "fallback" for row in others)
    assert not (last.requires_gpu or last.uses_triton or last.module or last.requires_equal_head_dims)
    assert last.capability_majors is None and last.max_head_dim is None and last.head_dim_multiple == 1
    assert last.supports_softcap and "float32" in last.dtypes
    assert last.serves_decode


def test_every_row_that_can_be_chosen_has_a_reason() -> None:
    assert all(row.prefill_reason for row in BACKENDS.values())


def test_a_package_is_named_by_module_and_distribution() -> None:
    assert all(bool(row.module) == bool(row.distribution) for row in BACKENDS.values())
