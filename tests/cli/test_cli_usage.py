"""What is wrong with a command is said in two lines on stderr, with exit code 2, before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tcdeploy.planning.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
COMMANDS = ("compile", "warm", "generate")


def run(*arguments: str, code: str = "", cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python -m tcdeploy` in a process of its own, or `code` in its place; of TCDEPLOY_* it sees only `environ`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TCDEPLOY_")}
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else ["-m", "tcdeploy"]), *arguments],
        cwd=cwd, env={**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environ}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def refused(*arguments: str, cwd: Path = ROOT, **environ: str) -> tuple[str, str]:
    """(error, hint) of a command that must be refused: exactly these two lines, nothing on stdout, exit code 2."""
    done = run(*arguments, cwd=cwd, **environ)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, [line.partition(" ")[0] for line in lines]) == (2, "", ["error:", "hint:"])
    error, hint = (line.partition(" ")[2] for line in lines)
    assert error and hint
    return error, hint


def test_no_model_says_how_to_give_one() -> None:
    for command in ("compile", "warm"):
        error, hint = refused(command)
        assert error == "no model was named"
        assert "builtin:tiny" in hint and "--recipe" in hint


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
    error, _ = refused("warm", "builtin:tiny", TCDEPLOY_BATCH_SIZE="1")
    assert error == "environment: unknown key 'batch_size'; the nearest is 'batch_sizes'"


def test_a_recipe_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: a\n- b\n")
    done = run("warm", "--recipe", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: recipe {path} cannot be read: ")
    assert "\nhint: " in done.stderr


def test_a_choice_nobody_knows_lists_the_choices() -> None:
    error, hint = refused("compile", "builtin:tiny", "--dtype", "bfloat")
    assert error == "flags: dtype is 'bfloat'; the nearest is 'bfloat16'"
    assert "float16" in hint and "float32" in hint


def test_a_list_that_is_none_says_what_one_looks_like() -> None:
    for given in ("128,many", "128;512", "", "1.5"):
        error, _ = refused("warm", "builtin:tiny", "--buckets", given)
        assert error.startswith(f"flags: buckets is {given!r}, which is not a list of whole numbers such as 128,512")


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
def test_what_the_parser_refuses_is_an_error_without_a_traceback(arguments: tuple[str, ...], word: str) -> None:
    done = run(*arguments)
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr.lower()
    assert "error:" in done.stderr.lower()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("warm", "builtin:tiny", "--dry-run", "--require-hit"), "a dry run starts nothing"),
        (("warm", "builtin:tiny", "--dry-run", "--budget", "6s"), "a dry run starts nothing"),
        (("warm", "builtin:tiny", "--dry-run", "--cache-from", "/x"), "a dry run starts nothing"),
        (("warm", "builtin:tiny", "--dry-run", "--cache-to", "/x"), "a dry run starts nothing"),
        (("warm", "builtin:tiny", "--sign", "ci.key"), "--sign is for what is pushed"),
        (("warm", "builtin:tiny", "--allow-unsigned"), "nothing is fetched that could be signed"),
        (("serve", "builtin:tiny", "--allow-unsigned"), "nothing is fetched that could be signed"),
        (("cache", "verify", "x.tcb", "--model", "builtin:tiny"), "--model is for --run"),
        (("cache", "pack", "builtin:tiny", "-o", "x.tcb", "--plan", "0" * 16), "--plan is for a cache folder"),
    ],
    ids=str,
)
def test_a_flag_that_would_do_nothing_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    assert refused(*arguments)[0] == reason


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("warm", "builtin:tiny", "--budget", "soon"), "'soon' is no number of seconds"),
        (("warm", "builtin:tiny", "--budget", "-1s"), "'-1s' is no number of seconds"),
        (("cache", "push", ".", "/x"), ". is a folder"),
        (("cache", "find", "http://[bad", "--plan", "0" * 16), "http://[bad is not a valid URL"),
    ],
    ids=str,
)
def test_a_value_that_is_none_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    assert refused(*arguments)[0].startswith(reason)


def test_flags_of_a_model_are_refused_where_a_folder_is_packed(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    error, hint = refused("cache", "pack", str(tmp_path), "-o", "x.tcb", "--dtype", "float16")
    assert "flags of a model change nothing" in error and "--plan KEY" in hint


def test_generate_wants_a_prompt_beside_the_model() -> None:
    for arguments in (("generate", "builtin:tiny"), ("generate", "--recipe", "tiny")):
        error, hint = refused(*arguments)
        assert error == "no prompt was given"
        assert "tcdeploy generate MODEL" in hint


def test_no_command_at_all_shows_the_help() -> None:
    done = run()
    assert "Traceback" not in done.stderr
    assert "Usage:" in done.stdout + done.stderr
    assert all(command in done.stdout + done.stderr for command in COMMANDS)


def test_the_debug_variable_adds_the_traceback() -> None:
    plain, debug = run("compile"), run("compile", TCDEPLOY_DEBUG="1")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr and "RecipeError" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)
    assert debug.returncode == 2


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


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("errors.TcdeployError('what', 'next')", 1),
        ("errors.UsageError('what', 'next')", 2),
        ("errors.RecipeError('what', 'next')", 2),
        ("errors.UnsupportedModelError('what', 'next')", 1),
        ("errors.CompileError('what', 'next')", 1),
        ("errors.RecompileError('what', 'next')", 1),
        ("errors.MismatchError('what', 'next')", 3),
        ("errors.TrustError('what', 'next')", 4),
        ("errors.IntegrityError('what', 'next')", 5),
        ("errors.ThresholdError('what', 'next')", 6),
        ("errors.SpaceError('what', 'next')", 7),
        ("errors.NetworkError('what', 'next')", 8),
    ],
)
def test_each_error_has_its_exit_code(raised: str, code: int) -> None:
    done = run(code=FAILING.format(raised=raised))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "error: what\nhint: next\n")


def test_an_error_without_a_hint_is_one_line() -> None:
    done = run(code=FAILING.format(raised="errors.SpaceError('what')"))
    assert (done.returncode, done.stderr) == (7, "error: what\n")


def test_an_interrupt_says_that_nothing_is_lost() -> None:
    """As Ctrl-C does anywhere inside a command that takes a recipe."""
    decorated = FAILING.replace("def fail():", "@recipe_command\ndef fail(recipe: Recipe):")
    imports = "from tcdeploy.cli.options import recipe_command\nfrom tcdeploy.planning.recipe import Recipe\n"
    done = run(
        code=(imports + decorated).format(raised="KeyboardInterrupt").replace('"fail"]', '"fail", "builtin:tiny"]')
    )
    assert done.returncode == 130
    assert done.stderr.startswith("error: interrupted\nhint: run it again")


def test_an_error_that_nobody_foresaw_keeps_its_traceback() -> None:
    done = run(code=FAILING.format(raised="ZeroDivisionError('unforeseen')"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "unforeseen" in done.stderr


def test_recipes_lists_every_recipe_with_its_model() -> None:
    done = run("recipes")
    assert (done.returncode, done.stderr) == (0, "")
    listed = dict(line.split() for line in done.stdout.splitlines())
    assert listed == {
        name: yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())["model"] for name in SHIPPED
    }
    assert list(listed) == SHIPPED


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_of_a_recipe_shows_its_help_its_default_and_its_variable(command: str) -> None:
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    paragraphs = re.split(r"\n  (?=-)", done.stdout)
    entries = {re.match(r"--[\w-]+", text)[0]: " ".join(text.split()) for text in paragraphs if text.startswith("--")}
    for item in fields(Recipe):
        if item.name == "model":
            continue
        entry = entries[f"--{item.name.replace('_', '-')}"]
        assert f"[env: TCDEPLOY_{item.name.upper()}]" in entry
        assert item.metadata["help"] in entry
        assert (f"[default: {item.default}]" in entry) == (item.default not in (None, False))


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(re.search(rf"^  {command} ", done.stdout, re.M) for command in (*COMMANDS, "recipes"))
