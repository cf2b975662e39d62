"""Usage errors are two lines on stderr with exit code 2, before torch is imported. Help shows every flag.

Most tests call `main` in the test process. One test of each kind starts a new process.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from tcdeploy import errors
from tcdeploy.cli import app as cli
from tcdeploy.cli.options import options_command
from tcdeploy.cli.process import LOGGER_NAME, read_text
from tcdeploy.cli.serve import example_request
from tcdeploy.planning.option import options_of
from tcdeploy.planning.recipe import Recipe
from tcdeploy.server.run import _listen
from tcdeploy.server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
COMMANDS = ("compile", "warm", "generate")
DRY_RUN_CONFLICT = "--dry-run excludes --require-hit, --budget, --cache-from, --cache-to and --winners"


def clean_environment(**environ: str) -> dict[str, str]:
    """This process's environment, with those in `environ` as the only TCDEPLOY_* variables."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TCDEPLOY_")}
    return {**outer, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environ}


def run_process(*arguments: str, code: str = "", cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tcdeploy`, or `code`, in a new process."""
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else ["-m", "tcdeploy"]), *arguments],
        cwd=cwd, env=clean_environment(**environ), capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def run(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Call `main` with these arguments, and restore what it changes in this process."""
    threshold, logger = gc.get_threshold(), logging.getLogger(LOGGER_NAME)
    handlers, stdout, stderr = logger.handlers[:], io.StringIO(), io.StringIO()
    try:
        with (
            chdir(cwd), patch.dict(os.environ, clean_environment(**environ), clear=True),
            patch.object(sys, "argv", ["tcdeploy", *arguments]), patch.object(sys, "stdin", io.StringIO()),
            redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as exit_,
        ):  # fmt: skip
            cli.main()
    finally:
        gc.set_threshold(*threshold)
        logger.handlers[:] = handlers
    assert isinstance(exit_.value.code, int)
    return subprocess.CompletedProcess(arguments, exit_.value.code, stdout.getvalue(), stderr.getvalue())


def refused(
    *arguments: str, cwd: Path = ROOT, runner: Callable[..., subprocess.CompletedProcess[str]] = run, **environ: str
) -> tuple[str, str]:
    """(error, hint) of a usage error: exactly these two lines, nothing on stdout, exit code 2."""
    completed = runner(*arguments, cwd=cwd, **environ)
    lines = completed.stderr.splitlines()
    assert (completed.returncode, completed.stdout, [line.partition(" ")[0] for line in lines]) == (
        2,
        "",
        ["error:", "hint:"],
    )
    error, hint = (line.partition(" ")[2] for line in lines)
    assert error and hint
    return error, hint


def test_the_hint_for_a_missing_model_shows_how_to_name_one() -> None:
    for command, runner in (("compile", run), ("warm", run_process)):
        error, hint = refused(command, runner=runner)
        assert "no model" in error
        assert "builtin:tiny" in hint and "--recipe" in hint


def test_hints_do_not_name_another_command() -> None:
    for command in ("serve", "warm", "generate"):
        _, hint = refused(command, *(["--recipe", "/no/such.yaml"] if command == "generate" else []))
        assert "tcdeploy compile" not in hint


def test_a_port_outside_the_range_is_refused() -> None:
    for port in ("-1", "65536"):
        error, hint = refused("serve", "builtin:tiny", "--port", port)
        assert error == f"--port is {port}; it must be 0 to 65535" and "--port 0" in hint


def test_an_address_that_cannot_be_bound_names_the_option_to_change() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(errors.UsageError) as busy:
        _listen("127.0.0.1", taken.getsockname()[1])
    assert busy.value.hint == "--port 0 selects a free port"
    for host, reason in (("192.0.2.1", "Cannot assign requested address"), ("no such host", "not known")):
        with pytest.raises(errors.UsageError) as unknown:
            _listen(host, 0)
        assert f"cannot listen on {host} port 0: " in unknown.value.message and reason in unknown.value.message
        assert "--host 127.0.0.1" in unknown.value.hint and "--port 0" in unknown.value.hint


def test_the_example_request_has_a_placeholder_for_the_key() -> None:
    address = "http://127.0.0.1:8000"
    words = shlex.split(example_request(ServerSettings(model="it's", api_keys=("secret",)), address))
    assert words[:2] == ["curl", f"{address}/v1/completions"] and "authorization: Bearer API_KEY" in words
    assert json.loads(words[-1])["model"] == "it's" and not any("secret" in word for word in words)
    assert "authorization" not in example_request(ServerSettings(model="m"), address)


@pytest.mark.parametrize(
    ("arguments", "environ", "source"),
    [
        (("warm", "\udcff"), {}, "argument 2"),
        (("generate", "builtin:tiny", "a\udcfe"), {}, "argument 3"),
        (("warm", "builtin:tiny"), {"TCDEPLOY_CACHE_DIR": "/x\udcff"}, "the variable TCDEPLOY_CACHE_DIR"),
    ],
)
def test_text_that_is_not_utf8_is_refused(arguments: tuple[str, ...], environ: dict[str, str], source: str) -> None:
    error, hint = refused(*arguments, **environ)
    assert error.startswith(f"{source} is not valid UTF-8: byte 0xf") and "UTF-8" in hint


@pytest.mark.parametrize("decoding", ["strict", "surrogateescape"])
def test_a_prompt_on_stdin_that_is_not_utf8_is_refused(decoding: str) -> None:
    """Python decodes stdin strictly in a UTF-8 locale, and with surrogates in the C locale."""
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xc3\xa9\xff"), encoding="utf-8", errors=decoding)
    with pytest.raises(errors.UsageError) as error:
        read_text(stdin)
    assert error.value.message == "stdin is not valid UTF-8: byte 0xff at position 3"
    assert error.value.exit_code == 2
    assert read_text(io.TextIOWrapper(io.BytesIO("aé".encode()), encoding="utf-8", errors=decoding)) == "aé"


def test_an_unknown_recipe_names_the_nearest() -> None:
    error, hint = refused("compile", "--recipe", "lama-3.1-8b")
    assert error == "no recipe is called 'lama-3.1-8b'; the nearest is 'llama-3.1-8b'"
    assert "tcdeploy recipes" in hint


def test_a_recipe_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    error, hint = refused("warm", "--recipe", "mine.yaml", cwd=tmp_path)
    assert error == "recipe file mine.yaml does not exist"
    assert all(name in hint for name in SHIPPED)


def test_an_unknown_key_in_a_recipe_names_file_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: builtin:tiny\nbuckest: [64]\n")
    error, hint = refused("warm", "--recipe", str(path))
    assert error == f"recipe {path}: unknown key 'buckest'; the nearest is 'buckets'"
    assert "batch_sizes" in hint


def test_an_unknown_variable_names_the_nearest() -> None:
    error, _ = refused("warm", "builtin:tiny", runner=run_process, TCDEPLOY_BATCH_SIZE="1")
    assert error == "unknown variable TCDEPLOY_BATCH_SIZE; the nearest is TCDEPLOY_BATCH_SIZES"


def test_a_recipe_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: a\n- b\n")
    completed = run("warm", "--recipe", str(path))
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith(f"error: recipe {path} cannot be read: ")
    assert "\nhint: " in completed.stderr


def test_an_invalid_choice_lists_the_choices() -> None:
    error, hint = refused("compile", "builtin:tiny", "--dtype", "bfloat")
    assert error == "flags: dtype is 'bfloat'; the nearest is 'bfloat16'"
    assert "float16" in hint and "float32" in hint


def test_the_error_for_a_malformed_list_shows_an_example() -> None:
    for text in ("128,many", "128;512", "", "1.5"):
        error, _ = refused("warm", "builtin:tiny", "--buckets", text)
        assert error.startswith(f"flags: buckets is {text!r}") and "128,512" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("compile", "builtin:tiny", "--bucket", "64"), "--bucket"),
        (("compile", "builtin:tiny", "--context", "many"), "--context"),
        (("compile", "builtin:tiny", "--memory-fraction", "most"), "--memory-fraction"),
        (("compile", "builtin:tiny", "--context"), "--context"),
        (("compile", "builtin:tiny", "another"), "another"),
        (("complie",), "complie"),
    ],
)
def test_parser_errors_have_no_traceback(arguments: tuple[str, ...], word: str) -> None:
    completed = (run_process if word == "complie" else run)(*arguments)
    assert "Traceback" not in completed.stderr
    assert (completed.returncode, completed.stdout) == (2, "")
    assert word in completed.stderr.lower()
    assert "error:" in completed.stderr.lower()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("warm", "builtin:tiny", "--dry-run", "--require-hit"), DRY_RUN_CONFLICT),
        (("warm", "builtin:tiny", "--dry-run", "--budget", "6s"), DRY_RUN_CONFLICT),
        (("warm", "builtin:tiny", "--dry-run", "--cache-from", "/x"), DRY_RUN_CONFLICT),
        (("warm", "builtin:tiny", "--dry-run", "--cache-to", "/x"), DRY_RUN_CONFLICT),
        (("warm", "builtin:tiny", "--sign", "ci.key"), "--sign needs --cache-to"),
        (("warm", "builtin:tiny", "--allow-unsigned"), "--allow-unsigned needs --cache-from"),
        (("cache", "verify", "x.tcb", "--model", "builtin:tiny"), "--model needs --run"),
        (
            ("cache", "pack", "builtin:tiny", "-o", "x.tcb", "--plan", "0" * 16),
            "--plan needs a cache folder instead of MODEL",
        ),
    ],
    ids=str,
)
def test_a_flag_without_effect_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    assert refused(*arguments)[0] == reason


def test_serve_refuses_allow_unsigned_without_a_remote_cache() -> None:
    assert "--cache-from" in refused("serve", "builtin:tiny", "--allow-unsigned")[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("warm", "builtin:tiny", "--budget", "soon"), "--budget is 'soon', expected a positive number of seconds"),
        (("warm", "builtin:tiny", "--budget", "-1s"), "--budget is '-1s', expected a positive number of seconds"),
        (("cache", "push", ".", "/x"), ". is a folder"),
        (("cache", "find", "http://[bad", "--plan", "0" * 16), "http://[bad is not a valid URL"),
        (("cache", "gc", ".", "--older-than", "30x"), "--older-than is '30x', expected a number with a unit"),
    ],
    ids=str,
)
def test_an_invalid_value_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    assert refused(*arguments)[0].startswith(reason)


def test_recipe_flags_are_refused_when_a_cache_folder_is_packed(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    error, hint = refused("cache", "pack", str(tmp_path), "-o", "x.tcb", "--dtype", "float16")
    assert "recipe flags do not apply" in error and "--plan KEY" in hint


def test_generate_needs_a_prompt() -> None:
    for arguments in (("generate", "builtin:tiny"), ("generate", "--recipe", "tiny")):
        error, hint = refused(*arguments)
        assert error == "no prompt was given"
        assert "tcdeploy generate MODEL" in hint


def test_without_a_command_the_help_is_shown() -> None:
    completed = run_process()
    assert "Traceback" not in completed.stderr
    assert "Usage:" in completed.stdout + completed.stderr
    assert all(command in completed.stdout + completed.stderr for command in COMMANDS)


def test_the_debug_variable_adds_the_traceback() -> None:
    plain, debug = run("compile"), run_process("compile", TCDEPLOY_DEBUG="1")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr and "RecipeError" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)
    assert debug.returncode == 2


WITHOUT_TORCH = """
import json, sys
from tcdeploy.cli import app as cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["tcdeploy", *arguments]
    try:
        cli.main()
    except SystemExit as exit_:
        assert exit_.code == 2, arguments
    assert not {"torch", "transformers"} & sys.modules.keys(), arguments
print("done")
"""


def test_usage_errors_are_found_before_torch_is_imported() -> None:
    commands = [
        ("compile",), ("warm", "builtin:tiny", "--buckets", "1.5"), ("warm", "builtin:tiny", "--budget", "soon"),
        ("warm", "builtin:tiny", "--sign", "ci.key"), ("generate", "builtin:tiny"), ("cache", "push", ".", "/x"),
        ("serve", "builtin:tiny", "--allow-unsigned"), ("compile", "builtin:tiny", "--bucket", "64"),
    ]  # fmt: skip
    completed = run_process(json.dumps(commands), code=WITHOUT_TORCH)
    assert (completed.returncode, completed.stdout) == (0, "done\n"), completed.stderr


FAILING = """
import sys
from tcdeploy.cli import app as cli
from tcdeploy import errors
@cli.app.command("fail")
def fail():
    raise {raised}
sys.argv = ["tcdeploy", "fail"]
cli.main()
"""


@pytest.fixture
def fail_command() -> Iterator[Callable[..., None]]:
    """Registers a command `fail` for one test: `fail_command(function)`."""
    registered = cli.app.registered_commands[:]
    yield cli.app.command("fail")
    cli.app.registered_commands[:] = registered


def failing(raised: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise raised

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TcdeployError, 1),
        (errors.UsageError, 2),
        (errors.RecipeError, 2),
        (errors.UnsupportedModelError, 1),
        (errors.CompileError, 1),
        (errors.RecompileError, 1),
        (errors.MismatchError, 3),
        (errors.TrustError, 4),
        (errors.IntegrityError, 5),
        (errors.ThresholdError, 6),
        (errors.SpaceError, 7),
        (errors.NetworkError, 8),
    ],
)
def test_each_error_has_its_exit_code(
    error: type[errors.TcdeployError], code: int, fail_command: Callable[..., None]
) -> None:
    fail_command(failing(error("what", "next")))
    completed = run("fail")
    assert (completed.returncode, completed.stdout, completed.stderr) == (code, "", "error: what\nhint: next\n")


def test_an_error_of_a_process_is_its_exit_code() -> None:
    completed = run_process(code=FAILING.format(raised="errors.MismatchError('what', 'next')"))
    assert (completed.returncode, completed.stdout, completed.stderr) == (3, "", "error: what\nhint: next\n")


def test_an_error_without_a_hint_is_one_line(fail_command: Callable[..., None]) -> None:
    fail_command(failing(errors.SpaceError("what")))
    completed = run("fail")
    assert (completed.returncode, completed.stderr) == (7, "error: what\n")


def test_an_interrupt_is_an_error_with_a_hint(fail_command: Callable[..., None]) -> None:
    """KeyboardInterrupt inside a command that takes a recipe."""

    def fail(recipe: Recipe) -> None:
        raise KeyboardInterrupt

    fail_command(options_command(fail))
    completed = run("fail", "builtin:tiny")
    assert completed.returncode == 130
    assert completed.stderr.startswith("error: interrupted\nhint: run the command again")


def test_an_unexpected_error_keeps_its_traceback() -> None:
    completed = run_process(code=FAILING.format(raised="ZeroDivisionError('unforeseen')"))
    assert completed.returncode == 1
    assert "Traceback" in completed.stderr and "unforeseen" in completed.stderr


def test_recipes_lists_every_recipe_with_its_model() -> None:
    completed = run("recipes")
    assert (completed.returncode, completed.stderr) == (0, "")
    listed = dict(line.split() for line in completed.stdout.splitlines())
    assert listed == {
        name: yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())["model"] for name in SHIPPED
    }
    assert list(listed) == SHIPPED


@pytest.mark.parametrize("command", COMMANDS)
def test_each_recipe_flag_shows_its_help_default_and_variable(command: str) -> None:
    completed = run(command, "--help-all")
    assert (completed.returncode, completed.stderr) == (0, "")
    paragraphs = re.split(r"\n  (?=-)", completed.stdout)
    entries = {re.match(r"--[\w-]+", text)[0]: " ".join(text.split()) for text in paragraphs if text.startswith("--")}
    for item, option in options_of(Recipe).values():
        if item.name == "model":
            continue
        entry = entries[f"--{item.name.replace('_', '-')}"]
        assert f"[env: TCDEPLOY_{item.name.upper()}]" in entry
        # A line may also end after a hyphen.
        assert "".join(option.help.split()) in "".join(entry.split())
        assert (f"[default: {item.default}]" in entry) == (item.default not in (None, False))


def test_help_lists_the_commands() -> None:
    completed = run_process("--help")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert all(re.search(rf"^  {command} ", completed.stdout, re.M) for command in (*COMMANDS, "recipes"))
