"""A warm start on a machine without a C++ compiler, from the files that the manifest names and no others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache import toolchain
from tcdeploy.cache.manifest import Manifest, read_manifest
from tests.conftest import TINY, cli_command, cli_environment

pytestmark = pytest.mark.usefixtures("without_speedups")
PROMPT = ("This module provides", "--max-new-tokens", "12")


def asked(cache: Path, prefill: str = "16") -> list[str]:
    return [TINY, "--buckets", prefill, "--batch-sizes", "1", "--cache-dir", str(cache)]


def warm(cache: Path, *more: str, prefill: str = "16") -> list[str]:
    return ["warm", *asked(cache, prefill), "--json", *more]


def outcomes(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [record["outcome"] for record in json.loads(result.stdout)["buckets"]]


@pytest.fixture(scope="module")
def logging_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a g++ that notes its arguments and is the real one otherwise; and its notes.

    It says `g++` in place of its own path, and looks for its parts where it would without us: both are in what
    `g++ -v` prints, and so in the names of programs.
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
def warmed(tmp_path_factory: pytest.TempPathFactory, logging_compiler: tuple[Path, Path]) -> Path:
    """A folder that one cold start filled, with a compiler whose calls are noted, and one warm start found whole."""
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("filled") / "cache"
    folder, log = logging_compiler
    environ = cli_environment(home, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    cold = subprocess.run(cli_command(*warm(cache)), capture_output=True, text=True, env=environ)
    assert outcomes(cold) == ["miss", "miss"]
    assert [line for line in log.read_text().splitlines() if " -o " in line], "its calls are noted when it compiles"
    after_cold = the_manifest(cache)
    assert not after_cold.was_warm
    second = subprocess.run(cli_command(*warm(cache)), capture_output=True, text=True, env=cli_environment(home))
    assert outcomes(second) == ["hit", "hit"]
    assert the_manifest(cache).was_warm
    assert set(the_manifest(cache).files) <= set(after_cold.files), "what made it knew what it needs"
    return cache


def the_manifest(cache: Path) -> Manifest:
    [path] = (cache / "manifests").glob("*.json")
    found = read_manifest(path)
    assert found is not None
    return found


@pytest.fixture
def listed_files_only(warmed: Path, tmp_path: Path) -> Path:
    """The manifest and the files that it names, and they alone, somewhere else."""
    cache = tmp_path / "deep" / "er" / "cache"
    for name in [file.path for file in the_manifest(warmed).files] + ["manifests/" + manifest_name(warmed)]:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(warmed / name, cache / name)
    return cache


def manifest_name(cache: Path) -> str:
    [path] = (cache / "manifests").glob("*.json")
    return path.name


@pytest.fixture
def empty_path(tmp_path: Path) -> str:
    """A PATH with no program in it."""
    (tmp_path / "nothing").mkdir()
    return str(tmp_path / "nothing")


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# A start without a compiler


def test_the_named_files_alone_are_all_hits_where_there_is_no_compiler(
    run_cli: Any, listed_files_only: Path, empty_path: str, tmp_path: Path
) -> None:
    """In another folder, under another HOME, from another working folder, with nothing in PATH."""
    before = files_in(listed_files_only)
    assert before == {file.path for file in the_manifest(listed_files_only).files} | {
        f"manifests/{manifest_name(listed_files_only)}"
    }
    result = run_cli(*warm(listed_files_only, "--require-hit"), PATH=empty_path, cwd=empty_path, TMPDIR=str(tmp_path))
    assert outcomes(result) == ["hit", "hit"]
    new = files_in(listed_files_only) - before
    assert {name.partition("/")[0] for name in new} <= {"locks", "leases", ".lock"}, (
        "and nothing was made that was missing"
    )
    assert f"leases/{Path(manifest_name(listed_files_only)).stem}" in new
    assert the_manifest(listed_files_only).was_warm
    assert [file.path for file in the_manifest(listed_files_only).files] == sorted(
        before - {f"manifests/{manifest_name(listed_files_only)}"}
    )
    assert not list(tmp_path.glob("tcdeploy-*")), "the stand-in went with the process"


def test_generate_says_the_same_with_a_compiler_and_without(
    run_cli: Any, listed_files_only: Path, empty_path: str
) -> None:
    texts = []
    for environ in ({}, {"PATH": empty_path}):
        result = run_cli("generate", *asked(listed_files_only), *PROMPT, **environ)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count(", hit,") == 2, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1] and len(texts[0].split()) > 3


def test_without_a_compiler_and_without_a_cache_the_error_says_so(
    run_cli: Any, empty_path: str, tmp_path: Path
) -> None:
    result = run_cli(*warm(tmp_path / "cache"), PATH=empty_path)
    assert result.returncode == 1
    assert "and there is no C++ compiler" in result.stderr and "hint: install g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_compiler_a_bucket_that_is_not_there_says_so(
    run_cli: Any, listed_files_only: Path, empty_path: str
) -> None:
    result = run_cli(*warm(listed_files_only, prefill="32"), PATH=empty_path)
    assert result.returncode == 1
    assert "and there is no C++ compiler" in result.stderr and "hint: install g++" in result.stderr
    assert "Traceback" not in result.stderr
    assert outcomes(run_cli(*warm(listed_files_only, "--require-hit"), PATH=empty_path)) == ["hit", "hit"], (
        "it broke nothing"
    )


def test_a_warm_start_asks_the_compiler_and_never_runs_it(
    run_cli: Any, listed_files_only: Path, logging_compiler: tuple[Path, Path], tmp_path: Path
) -> None:
    """The folder for temporary files is new, so a header that had to be made would be."""
    folder, log = logging_compiler
    log.write_text("")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    (tmp_path / "tmp").mkdir()
    result = run_cli(*warm(listed_files_only, "--require-hit"), PATH=path, TMPDIR=str(tmp_path / "tmp"))
    assert outcomes(result) == ["hit", "hit"]
    assert "--version" in log.read_text()
    assert set(log.read_text().splitlines()) <= set(toolchain.COMPILER_QUERIES)


def test_inductor_s_own_headers_are_back_after_a_warm_start() -> None:
    """The name in torch that is replaced: it must be the one that Inductor asks, and come back unharmed."""
    from torch._inductor import codecache

    from tcdeploy.torch_compat.precompiled_headers import use_precompiled_headers

    use_precompiled_headers(True)
    own = codecache._get_cpp_prefix_header
    assert own("cpu") == "torch/csrc/inductor/cpp_prefix.h"
    use_precompiled_headers(False)
    use_precompiled_headers(False)
    assert codecache._get_cpp_prefix_header("cpu") is None
    use_precompiled_headers(True)
    assert codecache._get_cpp_prefix_header is own


# The compiler's answers


ASKER = """
import json, os, subprocess, sys
from tcdeploy.cache.toolchain import is_compiler_missing, load_toolchains, install_compiler_stub
assert is_compiler_missing()
[recorded] = load_toolchains(sys.argv[1])
install_compiler_stub(recorded)
assert not is_compiler_missing()
asked = [[*question.split()] for question in recorded.outputs] + [["-c", "code.cpp"], []]
done = [subprocess.run(["g++", *arguments], capture_output=True, text=True) for arguments in asked]
print(json.dumps([(one.returncode, one.stdout, one.stderr) for one in done]))
"""


def ask_the_stand_in(folder: Path, empty_path: str) -> list[Any]:
    environ = {**cli_environment(folder), "PATH": empty_path, "TMPDIR": empty_path}
    done = subprocess.run([sys.executable, "-c", ASKER, folder], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert os.listdir(empty_path) == [], "the script went with the process"
    return json.loads(done.stdout)


def test_the_stand_in_answers_as_the_compiler_and_refuses_to_compile(tmp_path: Path, empty_path: str) -> None:
    name = toolchain.save_toolchain(tmp_path)
    if name is None:
        pytest.skip("needs a C++ compiler")
    *answers, compiling, unasked = ask_the_stand_in(tmp_path, empty_path)
    environ = {**os.environ, "LC_ALL": "C"}
    for question, answer in zip(toolchain.COMPILER_QUERIES, answers, strict=True):
        real = subprocess.run(["g++", *question.split()], capture_output=True, text=True, env=environ)
        assert answer == [0, real.stdout, real.stderr] and real.stdout + real.stderr
    for refused in (compiling, unasked):
        assert refused[:2] == [1, ""] and "no C++ compiler is installed here" in refused[2]


def test_answers_with_signs_that_a_shell_knows_come_back_as_they_were(tmp_path: Path, empty_path: str) -> None:
    odd = 'it\'s "$HOME" `id` $(id) \\n %s %% * ;; esac\n\n  last line without an end'
    document = {question: [odd + question, question + odd] for question in toolchain.COMPILER_QUERIES}
    (tmp_path / toolchain.TOOLCHAIN_DIR).mkdir()
    (tmp_path / toolchain.TOOLCHAIN_DIR / "odd.json").write_text(json.dumps(document))
    *answers, _, _ = ask_the_stand_in(tmp_path, empty_path)
    assert answers == [[0, *document[question]] for question in toolchain.COMPILER_QUERIES]


def test_the_answers_are_kept_once_and_name_the_compiler_as_the_environment_does(tmp_path: Path) -> None:
    from tcdeploy.planning.environment import detect_environment

    if toolchain.is_compiler_missing():
        pytest.skip("needs a C++ compiler")
    names = {toolchain.save_toolchain(tmp_path) for _ in range(2)}
    [recorded] = toolchain.load_toolchains(tmp_path)
    assert names == {recorded.path} == files_in(tmp_path)
    assert recorded.version == detect_environment().compiler != ""


def test_no_answers_are_kept_without_the_compiler_of_our_choice(
    tmp_path: Path, empty_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", empty_path)
    assert toolchain.is_compiler_missing() and toolchain.save_toolchain(tmp_path) is None
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "clang++")
    assert not toolchain.is_compiler_missing() and toolchain.save_toolchain(tmp_path) is None
    assert files_in(tmp_path) == set()


def test_a_file_that_holds_no_answers_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / toolchain.TOOLCHAIN_DIR
    folder.mkdir()
    whole = {question: ["out", "err"] for question in toolchain.COMPILER_QUERIES}
    for number, content in enumerate(("", "{", "[]", "1", "{}", '{"--version": ["a", "b"]}', '{"--version": 1}')):
        (folder / f"{number}.json").write_text(content)
    (folder / "folder.json").mkdir()
    (folder / "latin.json").write_bytes(b'{"\xe9": 1}')
    (folder / "three.json").write_text(json.dumps({**whole, "-v": ["a", "b", "c"]}))
    (folder / "whole.json").write_text(json.dumps(whole))
    assert [item.path for item in toolchain.load_toolchains(tmp_path)] == ["toolchain/whole.json"]
    assert toolchain.load_toolchains(tmp_path / "none") == []
