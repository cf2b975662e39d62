"""Checks of environment variables: those that disable caching or compilation, and those of tcdeploy itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from tcdeploy.doctor.result import Request, Result, blocking, finding, note, ok
from tcdeploy.errors import RecipeError
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.start.record.record import COMPILER_PREFIXES, SET_VARIABLES

MODEL = "builtin:tiny"  # any: a recipe needs one


# As torch and Triton read the values.
def _is_one(value: str) -> bool:
    return value == "1"


def _enables(value: str) -> bool:
    """A setting of torch that is forced by a variable: any other text counts as true."""
    return value not in ("0", "")


def _disables(value: str) -> bool:
    return not _enables(value)


def _is_true_for_triton(value: str) -> bool:
    return value.lower() in ("1", "true", "on", "yes", "y")


class _Harmful(NamedTuple):
    applies: Callable[[str], bool]  # to the variable's value
    effect: str


_NO_CACHE = "torch's caches are disabled, so every start compiles everything"
_EAGER = "torch.compile does nothing, so models run uncompiled"
HARMFUL = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": _Harmful(_enables, _NO_CACHE),
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": _Harmful(_enables, _NO_CACHE),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": _Harmful(_disables, "Inductor's cache is disabled, so every start compiles"),
    "TORCHINDUCTOR_AUTOGRAD_CACHE": _Harmful(_disables, "AOTAutograd's cache is disabled, so every start compiles"),
    "TORCH_COMPILE_DISABLE": _Harmful(_is_one, _EAGER),
    "TORCHDYNAMO_DISABLE": _Harmful(_is_one, _EAGER),
    "TRITON_INTERPRET": _Harmful(_is_true_for_triton, "Triton kernels run in Python, thousands of times slower"),
    "TRITON_ALWAYS_COMPILE": _Harmful(_is_true_for_triton, "every start compiles all Triton kernels"),
    "CUDA_LAUNCH_BLOCKING": _Harmful(_is_one, "each kernel launch waits for the previous one"),
    "TORCH_COMPILE_DEBUG": _Harmful(_is_one, "torch writes debug files for each program, and compiles slowly"),
}


def check_variables(request: Request) -> list[Result]:
    results = _check_own_variables(request)
    for name, harmful in HARMFUL.items():
        value = os.environ.get(name)
        if value is not None and harmful.applies(value):
            results.append(finding(f"{name}={value}: {harmful.effect}", f"unset {name}"))
    others = sorted(
        name
        for name in os.environ
        if name.startswith(COMPILER_PREFIXES) and name not in SET_VARIABLES and name not in HARMFUL
    )
    if others:
        results.append(
            note(f"may change programs, so a cache that was filled without them misses: {', '.join(others)}")
        )
    return results or [ok("none that changes compilation or disables caches")]


def recipe_from_variables(request: Request) -> Recipe:
    """The recipe of a start without flags. Raises RecipeError."""
    return build_recipe({"model": MODEL}, other_variables=request.other_variables)


def _check_own_variables(request: Request) -> list[Result]:
    """Every command on a model refuses unknown and invalid TCDEPLOY_ variables."""
    try:
        recipe_from_variables(request)
    except RecipeError as error:
        return [blocking(error.message, error.hint)]
    return []
