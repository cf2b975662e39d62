"""Environments: their differences, their GPUs, and detection of flash-attn packages without importing them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.planning.environment import (
    Difference,
    Environment,
    describe_cpu,
    detect_environment,
    diff_environments,
    installed_flash_packages,
    parse_environment,
)
from tcdeploy.planning.plan import make_plan
from tests.machines import ALL_FLASH, GPU_FIELDS, H100, LAPTOP, LLAMA_8B, changed_environment, make_recipe

ONLY_OF_A_CPU = {"compiler", "install_paths", "cpu", "cpu_threads"}
IRRELEVANT = {
    "driver", "gpu_memory_bytes", "host_memory_bytes", "inductor_cache_dir", "missing_internals", "torch_settings",
    "user_cache_dir",
}  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[2]


FIELDS = [item.name for item in fields(Environment) if item.name != "gpus"] + list(GPU_FIELDS)


def with_other_value(here: Environment, name: str) -> Environment:
    """The machine with another value in one field."""
    other: dict[type, Any] = {str: "other", int: 7, tuple: (("flash-attn-2", "2.8.3"),)}
    value = (10, 0) if name == "gpu_capability" else other[type(getattr(here, name))]
    return changed_environment(here, **{name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_a_difference_is_listed_exactly_when_programs_depend_on_it(name: str) -> None:
    """GPU programs depend on neither C++ compiler nor CPU; CPU programs depend on both."""
    machines = [(H100, IRRELEVANT | ONLY_OF_A_CPU)] + ([(LAPTOP, IRRELEVANT)] if name not in GPU_FIELDS else [])
    for here, irrelevant in machines:
        there = with_other_value(here, name)
        assert getattr(there, name) != getattr(here, name)
        sides = [
            ".".join(machine.python.split(".")[:2]) if name == "python" else getattr(machine, name)
            for machine in (here, there)
        ]
        expected = Difference(name, str(sides[0]), str(sides[1]))
        assert diff_environments(here, there) == ([] if name in irrelevant else [expected])


@pytest.mark.parametrize("name", FIELDS)
def test_the_cache_key_changes_exactly_when_programs_depend_on_a_field(name: str) -> None:
    """A new field is part of the key, unless it is listed here too."""
    irrelevant = IRRELEVANT - {"torch_settings"}  # not listed as a difference, because manifests hold each setting
    machines = [(H100, irrelevant | ONLY_OF_A_CPU)] + ([(LAPTOP, irrelevant)] if name not in GPU_FIELDS else [])
    for here, ignored in machines:
        there = with_other_value(here, name)
        assert (there.cache_key == here.cache_key) == (name in ignored)


@pytest.mark.parametrize("machine", [H100, LAPTOP, replace(LAPTOP, cpu="DEFAULT"), replace(H100, torch_settings="x")])
def test_the_key_of_the_environment_is_part_of_the_plan(machine: Environment) -> None:
    plan = make_plan(make_recipe(context=4096), machine, LLAMA_8B)
    assert plan.environment_key == machine.cache_key
    other = make_plan(make_recipe(context=4096), replace(machine, torch="2.12.0"), LLAMA_8B)
    assert other.key != plan.key


@pytest.mark.parametrize(
    ("machine", "capability", "flags", "expected"),
    [
        ("x86_64", "AVX2", {"avx512_vnni", "amx_tile"}, "AVX2"),
        ("x86_64", "DEFAULT", {"amx_tile"}, "DEFAULT"),
        ("x86_64", "AVX512", {"avx2", "sse2"}, "AVX512"),
        ("x86_64", "AVX512", {"amx_tile", "amx_bf16", "avx512_vnni"}, "AVX512 avx512_vnni amx_tile amx_bf16"),
        ("aarch64", "DEFAULT", {"sve", "bf16", "asimd"}, "DEFAULT sve bf16"),
    ],
)
def test_extensions_for_which_inductor_generates_other_code_are_part_of_the_cpu(
    machine: str, capability: str, flags: set[str], expected: str
) -> None:
    """torch calls CPUs with and without AMX "AVX512", and a program with AMX instructions ends a process without it."""
    assert describe_cpu(capability, machine, flags) == expected


def test_the_compiler_is_the_one_that_cxx_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other-g++"
    other.write_text("#!/bin/sh\necho other 1.2\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert detect_environment().compiler == "other 1.2"


def test_differences_are_in_field_order_and_have_two_sides() -> None:
    there = changed_environment(
        H100, cpu="AVX2", torch="2.12.0", gpu="NVIDIA A100", cuda="12.8", driver="1", user_cache_dir="/x"
    )
    assert [item.name for item in diff_environments(H100, there)] == ["torch", "cuda", "gpu"]
    assert [(item.there, item.here) for item in diff_environments(there, H100)] == [
        (item.here, item.there) for item in diff_environments(H100, there)
    ]


def test_between_a_gpu_and_a_cpu_machine_neither_compiler_nor_cpu_is_a_difference() -> None:
    """A cache compiled on a laptop is rejected for other factors."""
    there = replace(LAPTOP, compiler="")
    names = ["triton", "cuda", "gpu", "gpu_capability", "gpu_multiprocessors"]
    assert (
        [item.name for item in diff_environments(H100, there)]
        == [item.name for item in diff_environments(there, H100)]
        == names
    )


def test_properties_describe_the_first_gpu() -> None:
    assert (H100.gpu, H100.gpu_capability, H100.gpu_multiprocessors) == ("NVIDIA H100 80GB HBM3", (9, 0), 132)
    assert (LAPTOP.gpu, LAPTOP.gpu_capability, LAPTOP.gpu_memory_bytes, LAPTOP.describe_gpus()) == ("", (0, 0), 0, "")


def test_equal_gpus_are_counted_and_different_ones_are_listed() -> None:
    [gpu] = H100.gpus
    assert H100.describe_gpus() == "NVIDIA H100 80GB HBM3"
    assert replace(H100, gpus=(gpu,) * 8).describe_gpus() == "8 x NVIDIA H100 80GB HBM3"
    smaller = replace(gpu, memory_bytes=gpu.memory_bytes // 2)
    assert replace(H100, gpus=(gpu, smaller)).describe_gpus() == (
        "GPU 0: NVIDIA H100 80GB HBM3 (80 GiB, compute capability 9.0, 132 SMs), "
        "GPU 1: NVIDIA H100 80GB HBM3 (40 GiB, compute capability 9.0, 132 SMs)"
    )


def test_further_gpus_do_not_change_what_programs_depend_on() -> None:
    [gpu] = H100.gpus
    crowded = replace(H100, gpus=(gpu, replace(gpu, name="NVIDIA A100")))
    assert diff_environments(H100, crowded) == []
    assert make_plan(make_recipe(), crowded, LLAMA_8B).key == make_plan(make_recipe(), H100, LLAMA_8B).key


@pytest.mark.parametrize("machine", [H100, LAPTOP, replace(H100, flash_packages=ALL_FLASH)])
def test_an_environment_survives_json(machine: Environment) -> None:
    assert parse_environment(json.loads(json.dumps(asdict(machine)))) == machine


@pytest.mark.parametrize("damage", [{"gpus": 3}, {"gpus": [3]}, {"gpus": [{}]}, {"unknown": 1}])
def test_what_is_not_an_environment_is_a_type_error(damage: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        parse_environment({**asdict(H100), **damage})


@pytest.mark.parametrize(("machine", "enters_key"), [(H100, False), (LAPTOP, True)], ids=["GPU", "CPU"])
def test_the_compiler_enters_the_key_only_on_a_cpu(machine: Environment, enters_key: bool) -> None:
    machines = (machine, replace(machine, compiler=""))
    keys = {make_plan(make_recipe(context=4096), variant, LLAMA_8B).key for variant in machines}
    assert len(keys) == 1 + enters_key


def test_python_counts_as_major_and_minor_version() -> None:
    assert diff_environments(H100, replace(H100, python=f"{H100.python}9")) == []
    assert [item.name for item in diff_environments(H100, replace(H100, python="3.99.0"))] == ["python"]


def test_a_machine_does_not_differ_from_itself() -> None:
    assert diff_environments(LAPTOP, replace(LAPTOP)) == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replaces sys.path by an empty folder, so that only what the test installs there can be imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("flash_attn")}
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]
    sys.modules.update(saved)


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
    install_metadata(site, "flash-attn", "2.8.3")
    assert installed_flash_packages() == (("flash-attn-2", "2.8.3"),)


def test_the_folder_that_flash_attention_4_ships_is_not_flash_attention_2(site: Path) -> None:
    install(site, "flash_attn/cute/__init__.py", "raise AssertionError('it was run')")
    install_metadata(site, "flash-attn-4", "4.0.0")
    assert installed_flash_packages() == (("flash-attn-4", "4.0.0"),)


def test_flash_attn_cute_inside_flash_attn_2_is_not_flash_attn_4(site: Path) -> None:
    """flash-attn 2.8.3 ships `flash_attn/cute`, version 0.1.0, which has no max_seqlen_q and needs other packages."""
    install(site, "flash_attn/__init__.py")
    install(site, "flash_attn/cute/__init__.py", "raise AssertionError('it was run')")
    install_metadata(site, "flash-attn", "2.8.3")
    assert installed_flash_packages() == (("flash-attn-2", "2.8.3"),)


def test_both_packages_are_distinguished(site: Path) -> None:
    install(site, "flash_attn/__init__.py")
    install(site, "flash_attn/cute/__init__.py", "raise AssertionError('it was run')")
    install_metadata(site, "flash-attn-4", "4.0.0")
    assert [backend for backend, _ in installed_flash_packages()] == ["flash-attn-2", "flash-attn-4"]


@pytest.mark.parametrize("with_flash_4", [False, True])
def test_detecting_flash_packages_imports_none_of_them(site: Path, with_flash_4: bool) -> None:
    install(site, "flash_attn/__init__.py", "from pathlib import Path\nPath(__file__).with_name('was_run').touch()")
    if with_flash_4:
        install(site, "flash_attn/cute/__init__.py")
        install_metadata(site, "flash-attn-4", "4.0.0")
    assert len(installed_flash_packages()) == 1 + with_flash_4
    assert not (site / "flash_attn" / "was_run").exists()


def test_a_flash_package_that_breaks_on_import_does_not_break_the_detection(site: Path) -> None:
    install(site, "flash_attn/__init__.py", "raise RuntimeError('built for another torch')")
    assert installed_flash_packages() == (("flash-attn-2", "unknown version"),)


def test_this_machine_is_detected_without_a_compiler_or_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty PATH, so that g++ is not found."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/inductor")
    environment = detect_environment()
    assert environment.python == ".".join(map(str, sys.version_info[:3]))
    assert environment.torch and environment.transformers and environment.cpu
    assert environment.cpu_threads >= 1 and environment.host_memory_bytes > 2**28
    assert (environment.compiler, environment.driver) == ("", "")
    assert (environment.user_cache_dir, environment.inductor_cache_dir) == ("/caches", "/inductor")
    assert all(gpu.name and gpu.memory_bytes for gpu in environment.gpus)
    assert bool(environment.gpus) == bool(environment.cuda)


def test_the_environment_of_the_device_cpu_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU in it, no key would contain the CPU, and programs for other instructions would be loaded."""
    monkeypatch.setattr("tcdeploy.planning.environment._detect_gpus", lambda: H100.gpus)
    environment, with_gpu = detect_environment("cpu"), detect_environment()
    assert with_gpu.gpus == H100.gpus and "cpu" not in with_gpu.cache_factors()
    assert environment.gpus == () and environment.cuda == environment.driver == ""
    assert environment.cache_factors().keys() >= {"cpu", "cpu_threads", "compiler"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ""),
        ("/data/cache", "/data/cache"),
        ("/data/torchinductor_me", "/data/torchinductor_me"),
        ("TMPDIR/torchinductor_me", ""),
        ("/tmp/torchinductor_me", ""),
        ("TMPDIR/mine", "TMPDIR/mine"),
        ("/data/cache/.start-x1", "/data/cache"),
    ],
)
def test_only_a_users_inductor_cache_dir_is_used(
    value: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sets the variable to its own default when it is imported, and a start to its staging folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", value.replace("TMPDIR", str(tmp_path)))
    assert detect_environment().inductor_cache_dir == expected.replace("TMPDIR", str(tmp_path))
