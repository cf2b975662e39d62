"""Errors of the parser and of torch have the form of all others: `error: ...`, then `hint: ...`, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcdeploy.bundle.fetch import _named
from tcdeploy.bundle.unpack import open_bundle
from tcdeploy.cli.foreign_errors import variable_error
from tcdeploy.errors import CompileError, TcdeployError
from tests.conftest import TINY, RunCLI


@pytest.mark.parametrize(
    ("arguments", "error", "command"),
    [
        (("warm", "--nonsense"), "no such option: --nonsense", "tcdeploy warm"),
        (("nonsense",), "no such command 'nonsense'", "tcdeploy"),
        (("cache", "nonsense"), "no such command 'nonsense'", "tcdeploy cache"),
        (("warm", TINY, "--context", "abc"), "invalid value for '--context': ", "tcdeploy warm"),
        (("deploy", "--ray"), "missing argument 'FILE'", "tcdeploy deploy"),
    ],
)
def test_an_error_of_the_parser_has_the_form_of_all_errors(
    run_cli: RunCLI, arguments: tuple[str, ...], error: str, command: str
) -> None:
    done = run_cli(*arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 2, done.stderr
    assert lines[0].startswith(f"error: {error}") and lines[1] == f"hint: {command} --help describes the arguments"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TORCH_LOGS", "nonsense", "Invalid log settings: nonsense"),
        ("TORCHINDUCTOR_COMPILE_THREADS", "abc", "invalid literal for int() with base 10: 'abc'"),
    ],
)
def test_a_variable_that_torch_rejects_is_named(run_cli: RunCLI, name: str, value: str, reason: str) -> None:
    done = run_cli("warm", TINY, "--dry-run", new=True, **{name: value})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"error: {name}={value} is invalid: {reason}" in done.stderr
    assert f"hint: unset {name}, or correct it" in done.stderr


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TORCH_LOGS", "Call to torch._dynamo.graph_break(); set TORCH_LOGS=+dynamo for details"),
        ("PYTORCH_ALLOC_CONF", "CUDA out of memory. Try setting PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("HF_TOKEN", "set HF_TOKEN to read this gated repository"),
    ],
)
def test_an_error_that_recommends_a_variable_is_not_blamed_on_it(variable: str, text: str) -> None:
    try:
        raise CompileError("the model cannot be compiled") from RuntimeError(text)
    except CompileError as error:
        assert variable_error(error, {variable: "secret"}) is None
        assert error.__cause__ is not None and variable_error(error.__cause__, {variable: "secret"}) is None


def test_a_path_that_the_locale_cannot_represent_is_not_called_invalid_utf_8(run_cli: RunCLI) -> None:
    done = run_cli("cache", "ls", "--cache-dir", "/nowhere/\u00e9", new=True, LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 2 and "not valid UTF-8" not in done.stderr, done.stderr
    assert "error: argument 4 has characters outside of ASCII" in done.stderr
    assert "hint: set PYTHONUTF8=1, or LC_ALL=C.UTF-8" in done.stderr


def test_an_error_names_the_bundle_that_was_fetched_and_not_its_temporary_copy(tmp_path: Path) -> None:
    copy, url = tmp_path / "bundle.tcb", "s3://bucket/plan.tcb"
    with pytest.raises(TcdeployError) as caught, _named(copy, url):
        open_bundle(copy, tmp_path)
    assert caught.value.message == str(caught.value) == f"the bundle {url} cannot be read: No such file or directory"
