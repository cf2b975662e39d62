"""A dry run plans for a machine that lacks memory or a GPU, and lists what is lacking."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.errors import MemoryShortage, SpaceError, UsageError
from tcdeploy.planning.dry_run import plan_with_findings
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import Recipe
from tests.conftest import RunCLI
from tests.machines import H100, LAPTOP, LLAMA_8B
from tests.model_families import save_config


def recipe(**fields: Any) -> Recipe:
    return Recipe(model="x", cache_dir="/c", **fields)


def small(machine: Any, gib: float) -> Any:
    """The machine with `gib` GiB of memory."""
    memory_bytes = int(gib * 2**30)
    gpus = tuple(dataclasses.replace(gpu, memory_bytes=memory_bytes) for gpu in machine.gpus)
    return dataclasses.replace(machine, host_memory_bytes=memory_bytes, gpus=gpus)


@pytest.mark.parametrize("machine", [LAPTOP, H100], ids=["host", "gpu"])
def test_a_plan_that_does_not_fit_has_the_memory_that_it_needs_as_a_finding(machine: Any) -> None:
    lacking = small(machine, 8)
    with pytest.raises(MemoryShortage) as caught:
        make_plan(recipe(), lacking, LLAMA_8B)
    planned = plan_with_findings(recipe(), lacking, LLAMA_8B)
    (finding,) = planned.findings
    assert finding.name == "memory" and finding.hint == caught.value.hint and caught.value.message in finding.message
    assert finding.available_bytes == 8 << 30 and finding.needed_bytes is not None
    assert f"needs {finding.needed_bytes / 2**30:.2f} GiB of memory, and 8.00 GiB are available" in finding.message


@pytest.mark.parametrize("machine", [LAPTOP, H100], ids=["host", "gpu"])
@pytest.mark.parametrize(
    "fields", [{}, {"context": 100_000}, {"kv_blocks": 40_000}, {"buckets": (64, 8192), "batch_sizes": (1, 64)}]
)
def test_a_machine_with_the_needed_memory_has_that_plan_and_one_with_less_does_not(
    machine: Any, fields: dict[str, Any]
) -> None:
    planned = plan_with_findings(recipe(**fields), small(machine, 4), LLAMA_8B)
    (finding,) = planned.findings
    assert finding.needed_bytes is not None
    exact = small(machine, finding.needed_bytes / 2**30)
    assert make_plan(recipe(**fields), exact, LLAMA_8B) == planned.plan
    with pytest.raises(SpaceError):
        make_plan(recipe(**fields), small(machine, finding.needed_bytes / 2**30 - 0.05), LLAMA_8B)


def test_a_machine_that_has_everything_has_no_findings() -> None:
    planned = plan_with_findings(recipe(), H100, LLAMA_8B)
    assert planned.findings == () and planned.plan == make_plan(recipe(), H100, LLAMA_8B)


def test_a_missing_gpu_is_a_finding_and_the_plan_is_for_the_cpu() -> None:
    planned = plan_with_findings(recipe(device="cuda"), LAPTOP, LLAMA_8B)
    assert planned.plan.device == planned.recipe.device == "cpu"
    assert "torch sees no GPU; this plan is for the CPU" in planned.findings[0].message


def test_requests_that_no_memory_satisfies_are_still_errors() -> None:
    with pytest.raises(SpaceError, match="2 KV blocks"):
        plan_with_findings(recipe(kv_blocks=2), LAPTOP, LLAMA_8B)
    with pytest.raises(SpaceError, match="exceeds the 3184 tokens that the KV cache holds"):
        plan_with_findings(recipe(kv_blocks=200, context=4096), H100, LLAMA_8B)
    with pytest.raises(UsageError, match="not between 2 and"):
        plan_with_findings(recipe(context=1 << 30), small(LAPTOP, 1), LLAMA_8B)


WIDE = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 60}


@pytest.fixture(scope="module")
def too_large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config of a model of 4 TB."""
    return save_config("llama", tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.mark.parametrize("command", ["warm", "compile"])
def test_a_dry_run_prints_the_plan_and_then_what_the_machine_lacks(
    command: str, too_large: str, run_cli: RunCLI, tmp_path: Path
) -> None:
    flags = (too_large, "--load-format", "dummy", "--cache-dir", str(tmp_path / "c"))
    done = run_cli(command, *flags, "--dry-run")
    assert done.returncode == 0, done.stderr
    plan, _, finding = done.stdout.partition("finding: ")
    assert f"plan for {too_large}" in plan and "decode buckets" in plan
    assert (
        "leave no memory for KV" in finding and "of memory, and" in finding and "hint: use a smaller model" in finding
    )
    assert run_cli(command, *flags).returncode == 7, "a start fails as before"
    assert not (tmp_path / "c").exists()


def test_findings_are_in_the_document(too_large: str, run_cli: RunCLI) -> None:
    done = run_cli("warm", too_large, "--load-format", "dummy", "--device", "cuda", "--dry-run", "--json")
    document = json.loads(done.stdout)
    assert [finding["name"] for finding in document["findings"]] == ["device", "memory"]
    memory = document["findings"][1]
    assert memory["needed_bytes"] > 2 * memory["available_bytes"] > 0
    assert document["plan"]["weight_bytes"] < memory["needed_bytes"]
    fitting = json.loads(run_cli("warm", "builtin:tiny", "--dry-run", "--json").stdout)
    assert fitting["findings"] == []


def test_a_missing_compiler_is_a_finding(run_cli: RunCLI, tmp_path: Path) -> None:
    done = run_cli("warm", "builtin:tiny", "--cache-dir", str(tmp_path), "--dry-run", PATH=str(tmp_path))
    assert done.returncode == 0 and "finding: there is no C++ compiler" in done.stdout, done.stderr


def test_missed_shapes_are_added_to_the_plan_of_a_model_that_does_not_fit(
    too_large: str, run_cli: RunCLI, tmp_path: Path
) -> None:
    missed = tmp_path / "missed_shapes.jsonl"
    missed.write_text(json.dumps({"phase": "prefill", "size": 256}))
    done = run_cli("warm", too_large, "--load-format", "dummy", "--from", str(missed), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert ["prefill", 256] in [[bucket["phase"], bucket["size"]] for bucket in document["plan"]["buckets"]]
    assert document["findings"][0]["name"] == "memory"
