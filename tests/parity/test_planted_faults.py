"""The parity check refuses a model with a planted fault, and passes the same model without one.

Most cases run uncompiled, in under a second each. scripts/planted-faults runs all families and dtypes, compiled
too, and large shapes on a GPU; docs/models.md has its table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_families import save_config
from tests.parity.campaign import Case, matrix, run_case, run_family
from tests.parity.planted_faults import FAULTS

# Faults that each family cannot have are left out by `planted_faults.NotApplicable`. Gemma 2 can have the most.
FAMILIES = [
    ("llama", "bfloat16", 21),
    pytest.param("gemma2", "bfloat16", 25, marks=pytest.mark.long),
    pytest.param("qwen2", "float32", 22, marks=pytest.mark.long),
    pytest.param("gpt_oss", "bfloat16", 23, marks=pytest.mark.long),
    pytest.param("gpt2", "bfloat16", 18, marks=pytest.mark.long),
    pytest.param("mixtral", "bfloat16", 21, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "dtype", "applicable"), FAMILIES)
def test_every_fault_is_caught_and_the_model_without_one_passes(family: str, dtype: str, applicable: int) -> None:
    unchanged, *planted = run_family(family, dtype, list(FAULTS), compiles=False)
    assert unchanged.outcome == "passed", unchanged.message
    assert [case.fault for case in planted if case.outcome == "passed"] == []
    assert sum(case.outcome == "caught" for case in planted) == applicable


@pytest.mark.parametrize(
    "fault", ["", pytest.param("layer skipped", marks=pytest.mark.long), "block of another sequence"]
)
def test_faults_in_compiled_programs_are_caught(fault: str, cache_dir: str, tmp_path: Path) -> None:

    folder = save_config("llama", tmp_path, num_hidden_layers=2)
    flags = {"buckets": (32,), "batch_sizes": (8,), "cache_dir": cache_dir}
    case = run_case("llama", folder, "bfloat16", fault, True, flags)
    assert case.outcome == ("caught" if fault else "passed"), case.message
    assert "failed its parity check" in case.message or not fault


def make_case(model: str, fault: str, outcome: str) -> Case:
    return Case(model, "bfloat16", fault, outcome, "", (), {}, 0.0)


def test_the_table_has_a_row_per_fault_and_a_column_per_model() -> None:
    cases = [make_case("a", "", "passed"), make_case("a", "x", "caught"), make_case("b", "x", "not applicable")]
    assert matrix(cases).splitlines()[2:] == ["| none | passed | - |", "| x | caught | - |"]
