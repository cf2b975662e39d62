"""Merging flags, environment, recipe file and defaults into a Recipe; nothing is silently ignored."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import yaml

from tcdeploy.errors import RecipeError
from tcdeploy.planning.option import RENAMED, field_type, flag_name, options_of
from tcdeploy.planning.recipe import Recipe, build_recipe, find_recipe, read_recipe, recipe_names

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


class Sources(NamedTuple):
    """One key as written in each source, and the resulting value in the Recipe."""

    key: str
    default: Any
    in_recipe: Any
    from_recipe: Any
    in_environment: str
    from_environment: Any
    in_flags: Any
    from_flags: Any


SOURCES = [
    Sources("context", None, 1024, 1024, "2048", 2048, 4096, 4096),
    Sources("buckets", None, [64, 128], (64, 128), "128,256", (128, 256), "256,512", (256, 512)),
    Sources("batch_sizes", None, 4, (4,), "1, 8", (1, 8), (1, 16), (1, 16)),
    Sources("trust_remote_code", False, True, True, "0", False, True, True),
    Sources("trust_remote_code", False, False, False, "True", True, False, False),
    Sources("dtype", None, "float32", "float32", "bfloat16", "bfloat16", "float16", "float16"),
    Sources("mode", "auto", "default", "default", "max-autotune", "max-autotune", "default", "default"),
    Sources("memory_fraction", 0.9, 1, 1.0, "0.5", 0.5, 0.25, 0.25),
    Sources("cache_dir", None, "/a", "/a", "/b", "/b", "/c", "/c"),
    Sources("revision", None, 20240131, "20240131", "main", "main", "v1", "v1"),
]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[[dict[str, Any] | str | bytes], str]:
    """Write a recipe and return its path. A mapping gets a model; text and bytes are written unchanged."""

    def write(content: dict[str, Any] | str | bytes) -> str:
        path = tmp_path / "recipe.yaml"
        text = yaml.safe_dump({"model": "someone/model", **content}) if isinstance(content, dict) else content
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def from_text(key: str, text: str) -> Recipe:
    return build_recipe({}, None, {"TCDEPLOY_MODEL": "someone/model", f"TCDEPLOY_{key.upper()}": text})


@pytest.mark.parametrize("case", SOURCES, ids=lambda case: case.key)
@pytest.mark.parametrize("in_recipe", [False, True], ids=["no recipe", "recipe"])
@pytest.mark.parametrize("in_environment", [False, True], ids=["no environment", "environment"])
@pytest.mark.parametrize("in_flags", [False, True], ids=["no flag", "flag"])
def test_precedence_is_flags_environment_recipe_default(
    case: Sources, in_recipe: bool, in_environment: bool, in_flags: bool, recipe_file: Callable[..., str]
) -> None:
    path = recipe_file({case.key: case.in_recipe} if in_recipe else {})
    environ = {f"TCDEPLOY_{case.key.upper()}": case.in_environment} if in_environment else {}
    flags = {case.key: case.in_flags} if in_flags else {}
    expected = case.default
    for is_set, value in (
        (in_recipe, case.from_recipe),
        (in_environment, case.from_environment),
        (in_flags, case.from_flags),
    ):
        expected = value if is_set else expected
    value = getattr(build_recipe(flags, path, environ), case.key)
    assert value == expected
    assert type(value) is type(expected)


def test_a_flag_that_is_none_is_unset(recipe_file: Callable[..., str]) -> None:
    recipe = build_recipe({"context": None, "mode": None}, recipe_file({"context": 64, "mode": "default"}), {})
    assert (recipe.context, recipe.mode) == (64, "default")


def test_null_in_a_recipe_leaves_the_choice_to_planning(recipe_file: Callable[..., str]) -> None:
    path = recipe_file(dict.fromkeys(("context", "buckets", "dtype", "revision", "graphs")))
    recipe = build_recipe({}, path, {"TCDEPLOY_CONTEXT": "64"})
    assert (recipe.buckets, recipe.dtype, recipe.revision, recipe.graphs) == (None, None, None, None)
    assert recipe.context == 64


@pytest.mark.parametrize("key", ["mode", "region", "trust_remote_code", "memory_fraction", "model"])
def test_null_is_an_error_for_keys_with_a_fixed_default(key: str, recipe_file: Callable[..., str]) -> None:
    with pytest.raises(RecipeError, match=rf"{key} is None"):
        build_recipe({}, recipe_file({key: None}), {})


def test_the_environment_defaults_to_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCDEPLOY_CONTEXT", "77")
    assert build_recipe({"model": "someone/model"}).context == 77


def test_the_debug_variable_and_unprefixed_variables_are_not_recipe_keys() -> None:
    recipe = build_recipe({"model": "m"}, None, {"TCDEPLOY_DEBUG": "1", "CONTEXT": "9", "OTHER_TCDEPLOY_CONTEXT": "9"})
    assert recipe == Recipe(model="m")


@pytest.mark.parametrize("name", ["TCDEPLOY_API_KEY", "TCDEPLOY_TRUSTED_KEYS"])
def test_variables_of_the_cli_are_not_recipe_keys_but_similar_ones_are_unknown(name: str) -> None:
    known = frozenset({"TCDEPLOY_API_KEY"})
    assert build_recipe({"model": "m"}, None, {name: "x"}, other_variables=known) == Recipe(model="m")
    for other in (f"{name}S", f"{name}_FILE", name[:-1]):
        with pytest.raises(RecipeError, match=f"unknown variable {other}"):
            build_recipe({"model": "m"}, None, {name: "x", other: "x"}, other_variables=known)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Recipe(model="m").context = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("typo", "nearest"), [("bucket", "buckets"), ("batchsizes", "batch_sizes"), ("modell", "model")]
)
def test_an_unknown_key_suggests_the_nearest(typo: str, nearest: str, recipe_file: Callable[..., str]) -> None:
    path = recipe_file({typo: 1})
    variable = f"TCDEPLOY_{typo.upper()}"
    with pytest.raises(RecipeError) as caught:
        build_recipe({"model": "m"}, None, {variable: "1"})
    assert caught.value.message == f"unknown variable {variable}; the nearest is TCDEPLOY_{nearest.upper()}"
    assert caught.value.hint.startswith(f"unset {variable}; ")
    for source, build in (
        (f"recipe {path}", lambda: build_recipe({}, path, {})),
        ("flags", lambda: build_recipe({"model": "m", typo: 1}, None, {})),
    ):
        with pytest.raises(RecipeError) as caught:
            build()
        assert caught.value.message == f"{source}: unknown key {typo!r}; the nearest is {nearest!r}"
        assert nearest in caught.value.hint
        assert caught.value.exit_code == 2


def test_an_unknown_key_without_a_similar_one_lists_all(recipe_file: Callable[..., str]) -> None:
    with pytest.raises(RecipeError) as caught:
        build_recipe({}, recipe_file({"xyzzy": 1}), {})
    assert "nearest" not in caught.value.message
    assert all(item.name in caught.value.hint for item in fields(Recipe))


def test_a_duplicate_key_in_a_recipe_is_an_error(recipe_file: Callable[..., str]) -> None:
    path = recipe_file("model: m\nbuckets: [128, 512]\nbatch_sizes: [1]\nbuckets: [64]\n")
    with pytest.raises(RecipeError, match="buckets"):
        build_recipe({}, path, {})


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("context", True, "a whole number"),
        ("context", 1.5, "a whole number"),
        ("context", "many", "a whole number"),
        ("context", [1], "a whole number"),
        ("context", {"tokens": 1}, "a whole number"),
        ("context", float("inf"), "a whole number"),
        ("context", float("nan"), "a whole number"),
        ("kv_blocks", False, "a whole number"),
        ("buckets", [128, True], "a list of whole numbers"),
        ("buckets", True, "a list of whole numbers"),
        ("buckets", "128;512", "a list of whole numbers"),
        ("buckets", "128,", "a list of whole numbers"),
        ("buckets", [128, [512]], "a list of whole numbers"),
        ("buckets", {128: 512}, "a list of whole numbers"),
        ("batch_sizes", [1, 2.5], "a list of whole numbers"),
        ("batch_sizes", [1, float("inf")], "a list of whole numbers"),
        ("trust_remote_code", "perhaps", "true or false"),
        ("trust_remote_code", 2, "true or false"),
        ("trust_remote_code", [True], "true or false"),
        ("memory_fraction", "most", "a number"),
        ("memory_fraction", [0.9], "a number"),
        ("memory_fraction", True, "a number"),
        ("cache_dir", ["/a"], "text"),
        ("model", {"id": "m"}, "text"),
        ("revision", True, "text"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_value_and_type(
    key: str, value: Any, kind: str, recipe_file: Callable[..., str]
) -> None:
    path = recipe_file({key: value})
    with pytest.raises(RecipeError) as caught:
        build_recipe({}, path, {})
    assert caught.value.message.startswith(f"recipe {path}: {key} is {value!r}, which is not {kind}")


@pytest.mark.parametrize(("key", "text"), [("context", ""), ("buckets", ""), ("trust_remote_code", ""), ("dtype", "")])
def test_an_empty_variable_is_an_error(key: str, text: str) -> None:
    with pytest.raises(RecipeError, match=f"^TCDEPLOY_{key.upper()} is ''"):
        from_text(key, text)


def test_a_wrong_type_has_a_hint() -> None:
    with pytest.raises(RecipeError) as caught:
        from_text("buckets", "1,a")
    assert caught.value.hint


def test_an_unknown_choice_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(RecipeError) as caught:
        from_text("dtype", "bfloat")
    assert caught.value.message == "TCDEPLOY_DTYPE is 'bfloat'; the nearest is 'bfloat16'"
    assert all(choice in caught.value.hint for choice in ("float32", "bfloat16", "float16"))


def test_a_whole_number_may_be_written_as_a_float(recipe_file: Callable[..., str]) -> None:
    context = build_recipe({}, recipe_file({"context": 4096.0}), {}).context
    assert (context, type(context)) == (4096, int)


TEXTS = {
    int: ("8", 8), tuple[int, ...]: ("1,8", (1, 8)), bool: ("true", True), float: ("0.5", 0.5), str: ("x", "x"),
    tuple[str, ...]: ("q_proj,re:.*k", ("q_proj", "re:.*k")),
}  # fmt: skip
CHECKED_TEXTS = {"quantize": ("int4:64", "int4:64")}  # of keys that do not take every text


@pytest.mark.parametrize("key", [item.name for item in fields(Recipe)])
def test_every_key_can_be_given_as_text(key: str) -> None:
    kind = field_type(typing.get_type_hints(Recipe)[key])
    is_choice = typing.get_origin(kind) is Literal
    texts = [(choice, choice) for choice in typing.get_args(kind)] if is_choice else []
    for text, value in texts or [CHECKED_TEXTS.get(key) or TEXTS[kind]]:
        assert getattr(from_text(key, text), key) == value


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("int3", "'int3'; it must be fp8, int8, int4 or int4:GROUP", "--quantize fp8"),
        ("fp8:64", "fp8:64, but fp8 has one scale for each row", "--quantize fp8"),
        ("int4:100", "int4:100; a group must be a multiple of 8", "--quantize int4:128"),
        ("int4:0", "int4:0; a group must be a multiple of 8", "--quantize int4:128"),
    ],
)
def test_numbers_that_weights_cannot_have_are_refused_with_the_choices(text: str, problem: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        from_text("quantize", text)
    assert (caught.value.message, caught.value.hint) == (f"TCDEPLOY_QUANTIZE is {problem}", hint)


@pytest.mark.parametrize("value", [3, [1], "", "a,,b"])
def test_names_are_a_list_of_texts(value: object, recipe_file: Callable[..., str]) -> None:
    names = recipe_file({"quantize_skip": ["down_proj", "re:a{1,2}"]})
    assert build_recipe({}, names, {}).quantize_skip == ("down_proj", "re:a{1,2}")
    with pytest.raises(RecipeError, match="which is not a list of names such as q_proj,k_proj"):
        build_recipe({}, recipe_file({"quantize_skip": value}), {})


def test_every_key_has_help() -> None:
    options = options_of(Recipe)
    assert list(options) == [item.name for item in fields(Recipe)]
    assert [name for name, (_, option) in options.items() if not option.help] == []


def test_a_recipe_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = build_recipe({}, "tiny", {})
    assert by_name == build_recipe({}, str(RECIPES / "tiny.yaml"), {})
    assert by_name.model == "builtin:tiny"
    (tmp_path / "tiny.yaml").write_text("model: mine\n")
    (tmp_path / "other.yml").write_text("model: other\n")
    monkeypatch.chdir(tmp_path)
    assert build_recipe({}, "tiny.yaml", {}).model == "mine"
    assert build_recipe({}, "./other.yml", {}).model == "other"
    assert build_recipe({}, "tiny", {}).model == "builtin:tiny"


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"no recipe is called 'tiyn'; the nearest is 'tiny'") as caught:
        find_recipe("tiyn")
    assert caught.value.hint == "tcdeploy recipes lists them"


@pytest.mark.parametrize("name", ["nowhere.yaml", "nowhere.yml", "some/where", "folder.yaml"])
def test_a_missing_recipe_file_is_an_error_that_lists_the_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        find_recipe(name)
    assert caught.value.message == f"recipe file {name} does not exist"
    assert all(known in caught.value.hint for known in recipe_names())


@pytest.mark.parametrize("content", ["", "- model\n- m\n", "m\n", "42\n", "null\n", "# only a comment\n"])
def test_yaml_that_is_not_a_mapping_is_an_error(content: str, recipe_file: Callable[..., str]) -> None:
    path = recipe_file(content)
    with pytest.raises(RecipeError, match="is not a mapping of keys to values") as caught:
        build_recipe({}, path, {})
    assert path in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        b"model: [unclosed",
        b"model: m\n\tcontext: 1\n",
        b"model: m\x00",
        b"model: caf\xe9\n",
        b"\xff\xfe\x00",
        b"model: &a [*b]\n",
        b"model: !!python/object/apply:os.getcwd []\n",
        b"model: a\n---\nmodel: b\n",
        b"model: m\nrevision: 2024-13-45\n",
    ],
    ids=[
        "unclosed",
        "tab",
        "nul",
        "latin-1",
        "utf-16",
        "unknown anchor",
        "python tag",
        "two documents",
        "invalid date",
    ],
)
def test_invalid_yaml_is_an_error_that_names_the_file(content: bytes, recipe_file: Callable[..., str]) -> None:
    path = recipe_file(content)
    with pytest.raises(RecipeError, match="cannot be read") as caught:
        build_recipe({}, path, {})
    assert path in caught.value.message
    assert caught.value.hint


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "locked.yaml"
    path.symlink_to("/proc/self/mem")  # a regular file whose first byte even root cannot read
    with pytest.raises(RecipeError, match=r"locked\.yaml cannot be read"):
        build_recipe({}, str(path), {})


@pytest.mark.parametrize("recipe", [None, "context: 64\n"], ids=["no recipe", "recipe without model"])
def test_without_a_model_the_hint_shows_how_to_name_one(recipe: str | None, recipe_file: Callable[..., str]) -> None:
    with pytest.raises(RecipeError, match="no model was named") as caught:
        build_recipe({}, recipe and recipe_file(recipe), {})
    assert "builtin:tiny" in caught.value.hint


def test_the_model_may_come_from_any_source(recipe_file: Callable[..., str]) -> None:
    assert build_recipe({}, recipe_file({}), {}).model == "someone/model"
    assert build_recipe({}, recipe_file({}), {"TCDEPLOY_MODEL": "b"}).model == "b"
    assert build_recipe({"model": "c"}, recipe_file({}), {"TCDEPLOY_MODEL": "b"}).model == "c"


def test_recipes_are_listed_in_alphabetical_order() -> None:
    assert recipe_names() == sorted(path.stem for path in RECIPES.iterdir() if path.is_file())


def test_the_files_of_deployments_are_not_recipes_of_models() -> None:
    """They are in a folder beside the recipes, and in the wheel with them."""
    deployments = {path.stem for path in (RECIPES / "deploy").rglob("*.y*ml")}
    assert {"compose", "deployment"} <= deployments
    for name in deployments:
        with pytest.raises(RecipeError, match="no recipe is called"):
            find_recipe(name)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_is_valid(name: str) -> None:
    recipe = build_recipe({}, name, {})
    assert recipe.model
    assert recipe.mode == "auto"
    for sizes in filter(None, (recipe.buckets, recipe.batch_sizes)):
        assert sizes[0] >= 1
        assert list(sizes) == sorted(set(sizes))
    assert not (recipe.context and recipe.buckets) or recipe.buckets[-1] <= recipe.context


def test_a_renamed_key_is_refused_with_its_new_name(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("model: m\nprefill_burst: 2\n")
    old, new = "prefill_burst", "max_consecutive_prefills"
    for build, message in (
        (lambda: build_recipe({}, str(path), {}), f"recipe {path}: {old} is now {new}"),
        (lambda: build_recipe({"model": "m", new: 5, old: 2}, environ={}), f"flags: {old} is now {new}"),
        (
            lambda: build_recipe({"model": "m"}, None, {f"TCDEPLOY_{old.upper()}": "3"}),
            f"TCDEPLOY_{old.upper()} is now TCDEPLOY_{new.upper()}",
        ),
    ):
        with pytest.raises(RecipeError) as refused:
            build()
        assert refused.value.message == message and new in refused.value.hint.lower()


def test_no_option_has_a_removed_name() -> None:
    assert not set(RENAMED) & {flag_name(name) for name in options_of(Recipe)}


@pytest.mark.parametrize("key", ["model", "buckets", "device", "tune_seconds", "trust_remote_code"])
def test_a_value_of_anchors_that_would_fill_the_memory_is_named_in_short(tmp_path: Path, key: str) -> None:
    """Ten lists, each with nine references to the one before it."""
    lists = ["  - &a0 [x, x, x, x, x, x, x, x, x]"]
    lists += [f"  - &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]" for number in range(1, 10)]
    (tmp_path / "recipe.yaml").write_text(f"{key}:\n" + "\n".join(lists))
    with pytest.raises(RecipeError) as refused:
        build_recipe(read_recipe(tmp_path / "recipe.yaml"), environ={})
    assert key in refused.value.message and len(refused.value.message) < 1000


def test_a_recipe_that_is_nested_too_deeply_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("{a: " * 5000)
    with pytest.raises(RecipeError, match="cannot be read: maximum recursion depth"):
        read_recipe(tmp_path / "recipe.yaml")
