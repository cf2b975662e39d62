"""A warm start on a machine without a C++ compiler, from the files that the manifest lists and no others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.record import toolchain
from tcdeploy.cache.record.manifest import Manifest, read_manifest, write_manifest
from tests.bundle.fake_caches import manifest_for, path_of
from tests.conftest import TINY, RunCLI, cli_environment, remove_headers

pytestmark = pytest.mark.usefixtures("without_speedups")
PROMPT = ("This module provides", "--max-new-tokens", "12")


def recipe_arguments(cache: Path, prefill: str = "16") -> list[str]:
    return [TINY, "--buckets", prefill, "--batch-sizes", "1", "--cache-dir", str(cache)]


def warm(cache: Path, *more: str, prefill: str = "16") -> list[str]:
    return ["warm", *recipe_arguments(cache, prefill), "--json", *more]


def outcomes(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [record["outcome"] for record in json.loads(result.stdout)["buckets"]]


@pytest.fixture(scope="module")
def logging_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a g++ that logs its arguments and then runs the real compiler; and the log.

    It runs as `g++` and with the original PATH: both are in the output of `g++ -v`, and so in the names of programs.
    """
    real = shutil.which(toolchain.COMPILER)
    if real is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("logging")
    log, script = folder / "log", folder / toolchain.COMPILER
    path = os.environ["PATH"]
    script.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$*\" >> '{log}'\nPATH='{path}' exec -a g++ '{real}' \"$@\"\n")
    script.chmod(0o755)
    return folder, log


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory, logging_compiler: tuple[Path, Path], run_cli_in: RunCLI) -> Path:
    """A folder that a cold start filled with the logging compiler, and that a warm start has used."""
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("filled") / "cache"
    folder, log = logging_compiler
    cold = run_cli_in(home, *warm(cache), PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert outcomes(cold) == ["miss", "miss"]
    assert [line for line in log.read_text().splitlines() if " -o " in line], "the log holds its compilations"
    after_cold = manifest_of(cache)
    assert not after_cold.was_warm
    second = run_cli_in(home, *warm(cache))
    assert outcomes(second) == ["hit", "hit"]
    assert manifest_of(cache).was_warm
    assert set(manifest_of(cache).files) <= set(after_cold.files), "the cold start knew which files a start needs"
    remove_headers(cache)
    return cache


def manifest_of(cache: Path) -> Manifest:
    [path] = (cache / "manifests").glob("*.json")
    manifest = read_manifest(path)
    assert manifest is not None
    return manifest


@pytest.fixture
def listed_files_only(warmed: Path, tmp_path: Path) -> Path:
    """A copy of the manifest and the files that it lists, without any other file."""
    cache = tmp_path / "deep" / "er" / "cache"
    for name in [file.path for file in manifest_of(warmed).files] + ["manifests/" + manifest_name(warmed)]:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(warmed / name, cache / name)
    return cache


def manifest_name(cache: Path) -> str:
    [path] = (cache / "manifests").glob("*.json")
    return path.name


@pytest.fixture
def empty_path(tmp_path: Path) -> str:
    """A PATH without programs."""
    (tmp_path / "nothing").mkdir()
    return str(tmp_path / "nothing")


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# A start without a compiler


def test_without_a_compiler_the_listed_files_are_enough_for_hits(
    run_cli: Any, listed_files_only: Path, empty_path: str, tmp_path: Path
) -> None:
    """In a new process and another folder, with another HOME and working directory, and an empty PATH."""
    before = files_in(listed_files_only)
    assert before == {file.path for file in manifest_of(listed_files_only).files} | {
        f"manifests/{manifest_name(listed_files_only)}"
    }
    command = warm(listed_files_only, "--require-hit")
    result = run_cli(*command, PATH=empty_path, cwd=empty_path, TMPDIR=str(tmp_path), new=True)
    assert outcomes(result) == ["hit", "hit"]
    new = files_in(listed_files_only) - before
    assert {name.partition("/")[0] for name in new} <= {"locks", "leases", ".lock"}, "no missing file was made again"
    assert f"leases/{Path(manifest_name(listed_files_only)).stem}" in new
    assert manifest_of(listed_files_only).was_warm
    assert [file.path for file in manifest_of(listed_files_only).files] == sorted(
        before - {f"manifests/{manifest_name(listed_files_only)}"}
    )
    assert not list(tmp_path.glob("tcdeploy-*")), "the stub was deleted at exit"


def test_generate_prints_the_same_with_and_without_a_compiler(
    run_cli: Any, listed_files_only: Path, empty_path: str
) -> None:
    texts = []
    for environ in ({}, {"PATH": empty_path}):
        result = run_cli("generate", *recipe_arguments(listed_files_only), *PROMPT, **environ)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count(", hit,") == 2, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1] and len(texts[0].split()) > 3


def test_without_a_compiler_and_a_cache_the_error_names_the_compiler(
    run_cli: Any, empty_path: str, tmp_path: Path
) -> None:
    result = run_cli(*warm(tmp_path / "cache"), PATH=empty_path)
    assert result.returncode == 1
    assert "and there is no C++ compiler" in result.stderr and "hint: install g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_compiler_an_uncached_bucket_is_an_error_that_names_it(
    run_cli: Any, listed_files_only: Path, empty_path: str
) -> None:
    result = run_cli(*warm(listed_files_only, prefill="32"), PATH=empty_path)
    assert result.returncode == 1
    assert "and there is no C++ compiler" in result.stderr and "hint: install g++" in result.stderr
    assert "Traceback" not in result.stderr
    assert outcomes(run_cli(*warm(listed_files_only, "--require-hit"), PATH=empty_path)) == ["hit", "hit"], (
        "the cache is intact"
    )


def test_a_warm_start_queries_the_compiler_and_compiles_nothing(
    run_cli: Any, listed_files_only: Path, logging_compiler: tuple[Path, Path], tmp_path: Path
) -> None:
    """TMPDIR is empty, so a precompiled header would be compiled if it were needed."""
    folder, log = logging_compiler
    log.write_text("")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    (tmp_path / "tmp").mkdir()
    result = run_cli(*warm(listed_files_only, "--require-hit"), PATH=path, TMPDIR=str(tmp_path / "tmp"))
    assert outcomes(result) == ["hit", "hit"]
    assert "--version" in log.read_text()
    assert set(log.read_text().splitlines()) <= set(toolchain.COMPILER_QUERIES)


def test_inductor_s_own_headers_are_back_after_a_warm_start() -> None:
    """The patched function of torch must be the one that Inductor calls, and is restored."""
    from torch._inductor import codecache

    from tcdeploy.torch_compat.inductor.precompiled_headers import use_precompiled_headers

    use_precompiled_headers(True)
    own = codecache._get_cpp_prefix_header
    assert own("cpu") == "torch/csrc/inductor/cpp_prefix.h"
    use_precompiled_headers(False)
    use_precompiled_headers(False)
    assert codecache._get_cpp_prefix_header("cpu") is None
    use_precompiled_headers(True)
    assert codecache._get_cpp_prefix_header is own


# The compiler's output


QUERY_STUB = """
import json, os, subprocess, sys
from tcdeploy.cache.record.toolchain import is_compiler_missing, load_toolchains, install_compiler_stub
assert is_compiler_missing()
[recorded] = load_toolchains(sys.argv[1])
install_compiler_stub(recorded)
assert not is_compiler_missing()
commands = [[*query.split()] for query in recorded.outputs] + [["-c", "code.cpp"], []]
results = [subprocess.run(["g++", *arguments], capture_output=True, text=True) for arguments in commands]
print(json.dumps([(result.returncode, result.stdout, result.stderr) for result in results]))
"""


def query_stub(folder: Path, empty_path: str) -> list[Any]:
    environ = {**cli_environment(folder), "PATH": empty_path, "TMPDIR": empty_path}
    done = subprocess.run([sys.executable, "-c", QUERY_STUB, folder], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert os.listdir(empty_path) == [], "the stub was deleted at exit"
    return json.loads(done.stdout)


def test_the_stub_replays_the_compiler_s_output_and_refuses_to_compile(tmp_path: Path, empty_path: str) -> None:
    name = toolchain.save_toolchain(tmp_path)
    if name is None:
        pytest.skip("needs a C++ compiler")
    list_toolchains(tmp_path)
    *outputs, compiling, without_arguments = query_stub(tmp_path, empty_path)
    environ = {**os.environ, "LC_ALL": "C"}
    for query, output in zip(toolchain.COMPILER_QUERIES, outputs, strict=True):
        real = subprocess.run(["g++", *query.split()], capture_output=True, text=True, env=environ)
        assert output == [0, real.stdout, real.stderr] and real.stdout + real.stderr
    for refused in (compiling, without_arguments):
        assert refused[:2] == [1, ""] and "no C++ compiler is installed here" in refused[2]


def test_output_with_shell_characters_is_replayed_unchanged(tmp_path: Path, empty_path: str) -> None:
    odd = 'it\'s "$HOME" `id` $(id) \\n %s %% * ;; esac\n\n  last line without an end'
    document = {query: [odd + query, query + odd] for query in toolchain.COMPILER_QUERIES}
    (tmp_path / toolchain.TOOLCHAIN_DIR).mkdir()
    (tmp_path / toolchain.TOOLCHAIN_DIR / "odd.json").write_text(json.dumps(document))
    list_toolchains(tmp_path)
    *outputs, _, _ = query_stub(tmp_path, empty_path)
    assert outputs == [[0, *document[query]] for query in toolchain.COMPILER_QUERIES]


def test_the_output_is_stored_once_and_names_the_compiler_as_the_environment_does(tmp_path: Path) -> None:
    from tcdeploy.planning.environment import detect_environment

    if toolchain.is_compiler_missing():
        pytest.skip("needs a C++ compiler")
    names = {toolchain.save_toolchain(tmp_path) for _ in range(2)}
    assert names == files_in(tmp_path) and toolchain.load_toolchains(tmp_path) == [], "no plan lists it yet"
    list_toolchains(tmp_path)
    [recorded] = toolchain.load_toolchains(tmp_path)
    assert names == {recorded.path}
    assert recorded.version == detect_environment().compiler != ""


def list_toolchains(folder: Path) -> None:
    """Write the manifest of a plan that lists all recorded compilers."""
    paths = sorted(folder.glob(f"{toolchain.TOOLCHAIN_DIR}/*.json"))
    manifest = manifest_for(folder, [path.relative_to(folder).as_posix() for path in paths if path.is_file()])
    write_manifest(path_of(folder, manifest), manifest)


def test_nothing_is_stored_without_g_plus_plus(
    tmp_path: Path, empty_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", empty_path)
    assert toolchain.is_compiler_missing() and toolchain.save_toolchain(tmp_path) is None
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "clang++")
    assert not toolchain.is_compiler_missing() and toolchain.save_toolchain(tmp_path) is None
    assert files_in(tmp_path) == set()


def test_a_file_without_compiler_output_is_skipped(tmp_path: Path) -> None:
    folder = tmp_path / toolchain.TOOLCHAIN_DIR
    folder.mkdir()
    whole = {query: ["out", "err"] for query in toolchain.COMPILER_QUERIES}
    for number, content in enumerate(("", "{", "[]", "1", "{}", '{"--version": ["a", "b"]}', '{"--version": 1}')):
        (folder / f"{number}.json").write_text(content)
    (folder / "folder.json").mkdir()
    (folder / "latin.json").write_bytes(b'{"\xe9": 1}')
    (folder / "three.json").write_text(json.dumps({**whole, "-v": ["a", "b", "c"]}))
    (folder / "nested.json").write_text("[" * 200_000)
    (folder / "numbers.json").write_text(json.dumps({query: [1, 2] for query in toolchain.COMPILER_QUERIES}))
    (folder / "whole.json").write_text(json.dumps(whole))
    list_toolchains(tmp_path)
    os.mkfifo(folder / "fifo.json")
    assert [item.path for item in toolchain.load_toolchains(tmp_path)] == ["toolchain/whole.json"]
    assert toolchain.load_toolchains(tmp_path / "none") == []
