"""A removed flag, key or variable is an error with its new name. tests/planning/test_recipe.py tests those of YAML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from tcdeploy.cli import app as cli
from tcdeploy.cli.deploy import read_entry
from tcdeploy.errors import UsageError
from tcdeploy.planning.option import OF_VLLM, REMOVED, RENAMED
from tcdeploy.planning.recipe import Recipe
from tcdeploy.scale.ray_config import read_arguments
from tests.cli.test_cli_usage import refused
from tests.cli.test_help_panels import leaves
from tests.conftest import TINY

BURST = "--prefill-burst is now --max-consecutive-prefills"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("warm", TINY, "--prefill-burst", "2"), BURST),
        (("bench", "decode", TINY, "--prefill-burst=2"), BURST),
        (("serve", TINY, "--served-name", "x"), "--served-name is now --served-model-name"),
        (("compile", TINY, "--explain-breaks"), "--explain-breaks is now tcdeploy explain MODEL --no-measure"),
    ],
)
def test_a_removed_flag_is_refused_with_its_new_name(arguments: tuple[str, ...], error: str) -> None:
    assert refused(*arguments) == (error, f"use {error.partition(' is now ')[2]}")


def test_a_flag_without_a_successor_is_refused_with_what_to_do_instead() -> None:
    assert refused("bench", "serve", "--turns", "2") == ("--turns was removed", REMOVED["--turns"])
    assert refused("bench", "serve", "--lengths", "sharegpt") == ("--lengths was removed", REMOVED["serve --lengths"])


def test_a_flag_of_vllm_is_refused_with_ours() -> None:
    assert refused("serve", TINY, "--max-model-len", "64") == ("--max-model-len is an option of vLLM", "use --context")
    error, hint = refused("serve", TINY, "--tensor-parallel-size=2")
    assert (error, hint) == ("--tensor-parallel-size is an option of vLLM", "a model runs on one GPU")
    our_flags = {flag for hint in OF_VLLM.values() for flag in re.findall(r"--[a-z-]+", hint)}
    assert our_flags == {
        "--batch-sizes", "--buckets", "--context", "--kv-dtype", "--memory-fraction", "--quantize",
    }  # fmt: skip
    assert all(flag.removeprefix("--").replace("-", "_") in Recipe.__dataclass_fields__ for flag in our_flags)


def test_words_after_two_dashes_are_not_flags() -> None:
    assert refused("warm", TINY, "--", "--prefill-burst")[0] == "got unexpected extra argument(s) (--prefill-burst)"


def test_a_variable_that_was_renamed_is_refused_with_its_new_name() -> None:
    error, _ = refused("warm", TINY, "--dry-run", TCDEPLOY_PREFILL_BURST="2")
    assert error == "TCDEPLOY_PREFILL_BURST is now TCDEPLOY_MAX_CONSECUTIVE_PREFILLS"


def test_configs_for_ray_are_refused_with_the_new_name() -> None:
    with pytest.raises(UsageError) as error:
        read_entry(Path("models.yaml"), {"models": [{"serve": f"{TINY} --prefill-burst 2"}]})
    assert error.value.message == f"models.yaml: model: {BURST}"
    with pytest.raises(UsageError, match="prefill_burst is now max_consecutive_prefills"):
        read_arguments({"recipe": {"model": TINY, "prefill_burst": 2}})


def test_new_names_are_flags_and_removed_ones_are_not() -> None:
    flags = {flag for command in leaves(get_command(cli.app)).values() for item in command.params for flag in item.opts}
    assert not flags & {*RENAMED, *REMOVED}
    assert {new for new in RENAMED.values() if new.startswith("--")} <= flags
