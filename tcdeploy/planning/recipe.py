"""The Recipe: what the user requested, merged from a YAML file, environment variables and flags.

Precedence: flags, then environment (`TCDEPLOY_*`), then the recipe file, then the recipe of a bundle, then the defaults
of the fields below. None means that planning decides and gives its reason. The flags, their help and the reference
documentation are derived from the fields (option.py).

Rejected: pydantic, the heaviest import on the path to `--help`. The fields have only six types.
"""

from __future__ import annotations

import difflib
import functools
import os
import reprlib
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tcdeploy.errors import RecipeError, UsageError
from tcdeploy.planning.kubernetes import is_service_variable
from tcdeploy.planning.option import (
    ENVIRONMENT_PREFIX,
    OF_VLLM,
    RENAMED,
    field_type,
    flag_name,
    option,
    options_of,
    variable_name,
)
from tcdeploy.planning.quantize_request import CHOICES, parse_quantize

LoadFormat = Literal["auto", "dummy"]
Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]
KVFormat = Literal["auto", "fp8"]
FP8Activations = Literal["auto", "off"]
KVDType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]  # what `KVFormat` is resolved to
MixedSteps = Literal["on", "off"]
Attention = Literal["reference", "triton", "torch-flash", "flash-attn-2", "flash-attn-4"]
CompileUnit = Literal["layer", "blocks"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "auto"]
Programs = Literal["auto", "jit", "aot"]
ProgramKind = Literal["jit", "aot"]  # what `Programs` is resolved to (start/auto_programs.py)
Graphs = Literal["step", "region", "none"]
Shapes = Literal["bucket", "dynamic"]
OnBadCache = Literal["refuse", "rebuild"]
GenerationConfigSource = Literal["model", "none"]

ENVIRONMENT = "environment"  # as the source of a value
SHARED_VARIABLES = frozenset({"TCDEPLOY_DEBUG", "TCDEPLOY_TRUSTED_KEYS"})  # of all commands; they set no key
_model, _plan, _cache = (functools.partial(option, panel=panel) for panel in ("Model", "Plan", "Cache"))
_advanced = functools.partial(_plan, is_advanced=True)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The request, not yet checked against machine and model. Lengths in tokens, batch sizes in sequences."""

    model: str = _model(MISSING, "hub id, local folder, or builtin:tiny")
    revision: str | None = _model(None, "branch, tag or commit of a hub model")
    load_format: LoadFormat = _model(
        "auto", "auto: load the weights; dummy: random weights, only the config is read", is_advanced=True
    )
    quantize: str | None = _model(
        None,
        "quantise linear layers and experts (int4: groups of 128)",
        metavar=CHOICES,
        parse=parse_quantize,
    )
    quantize_skip: tuple[str, ...] | None = _model(
        None,
        "layers that --quantize leaves as they are, beside routers of experts, the head, and others outside of "
        "the decoder layers: names, paths, wildcards or re:EXPRESSION, such as down_proj,model.layers.0",
        is_advanced=True,
    )
    trust_remote_code: bool = _model(False, "run modelling code from the model repository")
    generation_config: GenerationConfigSource = _model(
        "model",
        "model: default sampling parameters come from the model's generation_config.json; none: ignore them, and use "
        "only the end-of-sequence ids",
        is_advanced=True,
    )
    device: Device | None = _model(None, "device to run on; default: cuda if a GPU is present")
    dtype: DType | None = _model(
        None, "default: the checkpoint's dtype on a GPU (bfloat16 if it is float32), float32 on a CPU"
    )
    kv_dtype: KVFormat = _plan(
        "auto",
        "fp8: store K and V in 8 bits; auto: as computed",
    )
    fp8_activations: FP8Activations = _advanced(
        "auto",
        "auto: in steps of many tokens, quantise inputs of linear layers with FP8 weights to FP8, if the checkpoint or "
        "--quantize fp8 asks for it and the GPU multiplies FP8; off: keep them in 16 bits",
    )
    attention: Attention | None = _plan(None, "prefill attention backend; default: the best supported one")
    region: CompileUnit = _advanced("layer", "unit of compilation: decoder layer, or its attention and MLP blocks")
    mode: Mode = _plan(
        "auto", "torch.compile mode; auto: for each bucket the variant known to be fastest, or timed by --tune-seconds"
    )
    programs: Programs = _plan(
        "auto",
        "jit: torch.compile, which traces the model at each start; aot: ahead-of-time packages, which later starts "
        "load without the model's code; auto: aot if the cache folder has packages of this plan, otherwise jit",
    )
    tune_seconds: float = _advanced(
        0.0, "seconds that --mode auto may spend on timing the variants of all buckets; 0: use the first without timing"
    )
    graphs: Graphs | None = _advanced(None, "one CUDA graph per step, one per region, or none; default on a GPU: step")
    shapes: Shapes | None = _advanced(
        None,
        "bucket: one program per prefill bucket; dynamic: one program for all prefill lengths, captured at many sizes "
        "on a GPU; default: dynamic on a GPU with --graphs step and without --buckets, otherwise bucket",
    )
    buckets: tuple[int, ...] | None = _plan(
        None, "prefill buckets in tokens, ascending: 128,512,2048; the plan shows the default"
    )
    batch_sizes: tuple[int, ...] | None = _plan(
        None, "decode buckets in sequences, ascending: 1,4,16,32; default on a GPU: up to what the KV cache holds"
    )
    context: int | None = _plan(None, "longest sequence to serve, in tokens; default: the model's maximum")
    block_size: int | None = _advanced(None, "tokens per KV block, a power of two; the plan shows the default")
    kv_blocks: int | None = _advanced(None, "KV blocks to allocate; default: as needed, up to the available memory")
    mixed_steps: MixedSteps | None = _advanced(
        None, "on: a step computes chunks of prompts and decodes the running sequences; the plan shows the default"
    )
    itl_target: float | None = _advanced(
        None,
        "limit of a mixed step's predicted time in milliseconds, which also limits the time between two tokens; "
        "default: three times the predicted time of a decode step of the same rows, and up to six times while there "
        "are more prompts than decoding sequences",
    )
    max_consecutive_prefills: int = _advanced(
        4, "most prefill steps in a row before running sequences decode a token, if steps are not mixed"
    )
    memory_fraction: float = _plan(0.9, "fraction of GPU memory that this process may use")
    cache_dir: str | None = _cache(None, "compile cache folder; the plan shows the default")
    compile: bool = _cache(
        True, "compile programs that are not in the cache; --no-compile: exit with code 6 at the first one instead"
    )
    on_bad_cache: OnBadCache = _cache(
        "refuse",
        "refuse: exit with code 5 if a cached file is damaged; rebuild: compile again",
        is_advanced=True,
    )
    trust_cache_dir: bool = _cache(False, "use the cache folder even if other users can change it", is_advanced=True)
    require_signed: bool = option(
        False,
        "exit with code 4 unless every cached file is from a bundle that a trusted key signed; compile nothing",
        panel="Signatures",
    )


def build_recipe(
    flags: Mapping[str, Any],
    recipe: str | None = None,
    environ: Mapping[str, str] | None = None,
    bundle_recipe: Mapping[str, Any] | None = None,
    other_variables: Set[str] = frozenset(),
) -> Recipe:
    """Merge the sources. `recipe` is a name or a path; a flag that is None is unset.

    `bundle_recipe`, the recipe that a bundle was made with, has the lowest precedence. `other_variables` are variables
    of other settings, such as those of the server. Further ones that begin with `TCDEPLOY_` are unknown.

    Raises RecipeError for an unknown key, a value of the wrong type, an unknown recipe, or if no model is given.
    """
    merged: dict[str, Any] = _validate(bundle_recipe or {}, "the bundle")
    if recipe is not None:
        path = find_recipe(recipe)
        merged.update(_validate(read_recipe(path), f"recipe {path}"))
    environ = os.environ if environ is None else environ
    other_variables = SHARED_VARIABLES | other_variables
    merged.update(_validate(_from_environment(environ, other_variables), ENVIRONMENT, other_variables))
    merged.update(_validate({key: value for key, value in flags.items() if value is not None}, "flags"))
    if "model" not in merged:
        message = "no model was named"
        raise RecipeError(message, "give a Hub id, a local folder or builtin:tiny as MODEL, or pass --recipe NAME")
    return Recipe(**merged)


def recipe_of_fields(values: Mapping[str, Any], source: str) -> Recipe:
    """A recipe of these fields alone. `source` begins the messages of errors.

    Raises RecipeError, which suggests the nearest name, for an unknown field or a value of the wrong type.
    """
    return Recipe(**_validate(values, source))


def recipe_folders() -> list[Path]:
    """Folders that hold named recipes: inside the package when installed, else in the checkout."""
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir()]


def recipe_names() -> list[str]:
    return sorted(path.stem for folder in recipe_folders() for path in folder.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe, given as a path or a name. Raises RecipeError, which suggests the nearest name."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise RecipeError(f"recipe file {name} does not exist", f"recipes by name: {', '.join(recipe_names())}")
        return path
    for folder in recipe_folders():
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise RecipeError(f"no recipe is called {name!r}{_suggestion(name, recipe_names())}", "tcdeploy recipes lists them")


def read_recipe(path: Path) -> dict[str, Any]:
    hint = "a recipe is a YAML mapping of keys to values"
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # an invalid date raises ValueError
        raise RecipeError(f"recipe {path} cannot be read: {error}", hint) from error
    if not isinstance(document, dict):
        raise RecipeError(f"recipe {path} is not a mapping of keys to values", hint)
    return {str(key): value for key, value in document.items()}


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"duplicate key {key!r}")
        return super().construct_mapping(node, deep)


def _from_environment(environ: Mapping[str, str], other_variables: Set[str]) -> dict[str, Any]:
    """`TCDEPLOY_BATCH_SIZES=1,4` sets the key batch_sizes.

    Skips the other variables, and those that Kubernetes sets for a Service named tcdeploy.
    """
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in other_variables and not is_service_variable(name, value)
    }


def _validate(values: Mapping[str, Any], source: str, other_variables: Set[str] = frozenset()) -> dict[str, Any]:
    hints = typing.get_type_hints(Recipe)
    checked = {}
    for key, value in values.items():
        if key not in hints:
            raise _unknown_key(key, source, list(hints), other_variables)
        checked[key] = _coerce(key, value, hints[key], source)
    return checked


def _unknown_key(key: str, source: str, known_keys: list[str], other_variables: Set[str]) -> RecipeError:
    new = RENAMED.get(flag_name(key), "").removeprefix("--").replace("-", "_")
    if new in known_keys:
        new = variable_name(new) if source == ENVIRONMENT else new
        return RecipeError(f"{_label(key, source)} is now {new}", f"use {new}")
    if here := OF_VLLM.get(flag_name(key)):
        return RecipeError(f"{_label(key, source)} is an option of vLLM", here.replace("--", "").replace("-", "_"))
    if source != ENVIRONMENT:
        message = f"{source}: unknown key {key!r}{_suggestion(key, known_keys)}"
        return RecipeError(message, f"known keys: {', '.join(known_keys)}")
    others = [name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in sorted(other_variables)]
    return RecipeError(
        f"unknown variable {variable_name(key)}{_suggestion(key, [*known_keys, *others], variable_name)}",
        f"unset {variable_name(key)}; the variables of a model are {', '.join(map(variable_name, known_keys))}",
    )


def _label(key: str, source: str) -> str:
    """How an error names a value: `TCDEPLOY_DTYPE`, or `recipe FILE: dtype`."""
    return variable_name(key) if source == ENVIRONMENT else f"{source}: {key}"


def _coerce(key: str, value: Any, hint: Any, source: str) -> Any:
    """Convert a YAML value, or text from the environment, to the field's type. Raises RecipeError."""
    kind = field_type(hint)
    if value is None and kind is not hint:
        return None
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            suggestion = _suggestion(value, choices) if isinstance(value, str) else ""
            raise RecipeError(f"{_label(key, source)} is {_SHORT.repr(value)}{suggestion}", f"one of {choices}")
        return value
    parse, type_name = _PARSERS[kind]
    check = options_of(Recipe)[key][1].parse
    try:
        if isinstance(value, bool) and kind is not bool:
            raise ValueError(value)
        parsed = parse(value)
        if check is not None:
            check(parsed)
        return parsed
    except (TypeError, ValueError, OverflowError) as error:
        text = f"{_label(key, source)} is {_SHORT.repr(value)}, which is not {type_name}"
        raise RecipeError(text, f"{key}: {options_of(Recipe)[key][1].help}") from error
    except UsageError as error:
        problem = error.message.removeprefix(flag_name(key))
        raise RecipeError(f"{_label(key, source)}{problem}", error.hint) from error


def _parse_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError(value)
    return int(value)


def _parse_ints(value: Any) -> tuple[int, ...]:
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(_parse_int(item) for item in items)


def _parse_texts(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise ValueError(value)
    return tuple(items)


def _parse_bool(value: Any) -> bool:
    table = {True: True, False: False, "1": True, "true": True, "0": False, "false": False}
    key = value.lower() if isinstance(value, str) else value
    if key not in table:
        raise ValueError(value)
    return table[key]


def _parse_text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError(value)
    return str(value)


_PARSERS: dict[Any, tuple[Callable[[Any], Any], str]] = {  # by type of the field, with what an error calls it
    int: (_parse_int, "a whole number"),
    tuple[int, ...]: (_parse_ints, "a list of whole numbers such as 128,512,2048"),
    bool: (_parse_bool, "true or false"),
    float: (float, "a number"),
    str: (_parse_text, "text"),
    tuple[str, ...]: (_parse_texts, "a list of names such as q_proj,k_proj"),
}
# A few lines of YAML with anchors give a value whose whole text would fill the memory.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200


def _suggestion(word: str, known: typing.Iterable[str], name: Callable[[str], str] = repr) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {name(close[0])}" if close else ""
