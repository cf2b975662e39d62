"""What a machine is, what differs between two, and how flash-attn packages are found without running them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.planning.environment import Difference, Environment, diff_environments, installed_flash_packages
from tcdeploy.planning.plan import make_plan
from tests.machines import H100, LAPTOP, LLAMA_8B, make_recipe

ONLY_OF_A_CPU = {"compiler", "install_paths", "cpu", "cpu_threads"}
IRRELEVANT = {"driver", "gpu_memory_bytes", "host_memory_bytes", "inductor_cache_dir", "user_cache_dir"}
REPOSITORY = Path(__file__).resolve().parents[2]


def changed(here: Environment, name: str) -> Environment:
    """The machine with another value in one field."""
    other: dict[type, Any] = {str: "other", int: 7, tuple: (("flash-attn-2", "2.8.3"),)}
    value = (10, 0) if name == "gpu_capability" else other[type(getattr(here, name))]
    return replace(here, **{name: value})


@pytest.mark.parametrize("name", [item.name for item in fields(Environment)])
def test_a_difference_is_listed_exactly_when_programs_depend_on_it(name: str) -> None:
    """With a GPU, where neither the C++ compiler nor the CPU is in a program, and without one, where both are."""
    for here, irrelevant in ((H100, IRRELEVANT | ONLY_OF_A_CPU), (LAPTOP, IRRELEVANT)):
        there = changed(here, name)
        assert getattr(there, name) != getattr(here, name)
        sides = [
            ".".join(one.python.split(".")[:2]) if name == "python" else getattr(one, name) for one in (here, there)
        ]
        expected = Difference(name, str(sides[0]), str(sides[1]))
        assert diff_environments(here, there) == ([] if name in irrelevant else [expected])


def test_differences_stand_in_the_order_of_the_fields_and_have_two_sides() -> None:
    there = replace(H100, cpu="AVX2", torch="2.12.0", gpu="NVIDIA A100", cuda="12.8", driver="1", user_cache_dir="/x")
    assert [item.name for item in diff_environments(H100, there)] == ["torch", "cuda", "gpu"]
    assert [(item.there, item.here) for item in diff_environments(there, H100)] == [
        (item.here, item.there) for item in diff_environments(H100, there)
    ]


def test_between_a_machine_with_a_gpu_and_one_without_the_compiler_is_no_difference() -> None:
    """Nor is the CPU; what was made on a laptop fails on other factors."""
    there = replace(LAPTOP, compiler="")
    names = ["triton", "cuda", "gpu", "gpu_capability", "gpu_multiprocessors"]
    assert (
        [item.name for item in diff_environments(H100, there)]
        == [item.name for item in diff_environments(there, H100)]
        == names
    )


@pytest.mark.parametrize(("machine", "is_another"), [(H100, False), (LAPTOP, True)], ids=["GPU", "CPU"])
def test_another_compiler_is_another_plan_only_where_it_makes_the_programs(
    machine: Environment, is_another: bool
) -> None:
    keys = {make_plan(make_recipe(context=4096), one, LLAMA_8B).key for one in (machine, replace(machine, compiler=""))}
    assert len(keys) == 1 + is_another


def test_another_patch_of_python_is_no_difference_and_the_next_python_is() -> None:
    assert diff_environments(H100, replace(H100, python=f"{H100.python}9")) == []
    assert [item.name for item in diff_environments(H100, replace(H100, python="3.99.0"))] == ["python"]


def test_a_machine_does_not_differ_from_itself() -> None:
    assert diff_environments(LAPTOP, replace(LAPTOP)) == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the whole of sys.path: only what a test puts there is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("flash_attn")}
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]
    sys.modules.update(before)


def install(site: Path, module: str, source: str = "") -> None:
    path = site / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def install_metadata(site: Path, distribution: str, version: str) -> None:
    install(
        site,
        f"{distribution.replace('-', '_')}-{version}.dist-info/METADATA",
        f"Name: {distribution}\nVersion: {version}\n",
    )


def test_a_machine_without_flash_packages_has_none(site: Path) -> None:
    assert installed_flash_packages() == ()


def test_flash_packages_are_found_with_their_versions(site: Path) -> None:
    install(site, "flash_attn/__init__.py")
    install(site, "flash_attn_interface.py")
    install_metadata(site, "flash-attn", "2.8.3")
    assert installed_flash_packages() == (("flash-attn-2", "2.8.3"), ("flash-attn-3", "unknown version"))


def test_the_folder_that_flash_attention_4_ships_is_not_flash_attention_2(site: Path) -> None:
    install(site, "flash_attn/cute/__init__.py", "raise AssertionError('it was run')")
    install_metadata(site, "flash-attn-4", "4.0.0")
    assert installed_flash_packages() == (("flash-attn-4", "4.0.0"),)


def test_all_three_are_told_apart(site: Path) -> None:
    install(site, "flash_attn/__init__.py")
    install(site, "flash_attn/cute/__init__.py", "raise AssertionError('it was run')")
    install(site, "flash_attn_interface.py", "raise AssertionError('it was run')")
    assert [backend for backend, _ in installed_flash_packages()] == ["flash-attn-2", "flash-attn-3", "flash-attn-4"]


@pytest.mark.parametrize("with_flash_4", [False, True])
def test_looking_for_flash_packages_runs_none_of_them(site: Path, with_flash_4: bool) -> None:
    install(site, "flash_attn/__init__.py", "from pathlib import Path\nPath(__file__).with_name('was_run').touch()")
    if with_flash_4:
        install(site, "flash_attn/cute/__init__.py")
    assert len(installed_flash_packages()) == 1 + with_flash_4
    assert not (site / "flash_attn" / "was_run").exists()


def test_a_flash_package_that_breaks_on_import_does_not_break_the_detection(site: Path) -> None:
    install(site, "flash_attn/__init__.py", "raise RuntimeError('built for another torch')")
    assert installed_flash_packages() == (("flash-attn-2", "unknown version"),)


def test_this_machine_is_read_even_without_a_compiler_or_nvidia_smi() -> None:
    """In a process of its own, which imports torch; PATH is empty, so no g++ is found."""
    source = "import json, dataclasses as d; from tcdeploy.planning.environment import detect_environment as f; " + (
        "print(json.dumps(d.asdict(f())))"
    )
    environ = {**os.environ, "PATH": "", "XDG_CACHE_HOME": "/caches", "TORCHINDUCTOR_CACHE_DIR": "/inductor"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] and found["transformers"] and found["cpu"]
    assert found["cpu_threads"] >= 1 and found["host_memory_bytes"] > 2**28
    assert (found["compiler"], found["driver"]) == ("", "")
    assert (found["user_cache_dir"], found["inductor_cache_dir"]) == ("/caches", "/inductor")
    assert bool(found["gpu"]) == bool(found["gpu_memory_bytes"]) == bool(found["cuda"])
