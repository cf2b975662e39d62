"""The inputs that must be equal in a start from packages and in the start that made them, and a comparison of both.

They are known before anything is loaded. Start records are found by a hash of them (start/record/record.py). Does not
import torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcdeploy import __version__
from tcdeploy.errors import ModelError
from tcdeploy.models.weights.weight_paths import INDEX, weight_files
from tcdeploy.planning.environment import installed_version
from tcdeploy.planning.keys import combined_digest
from tcdeploy.planning.recipe import Recipe

PACKAGE = Path(__file__).parents[2]
READ_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}  # of configs, tokenizers and chat templates
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each weight file
# Fields of a recipe that are not compared. `model` and `revision`: the files are hashed instead. The others change no
# program.
IGNORED_FIELDS = {"model", "revision", "cache_dir", "on_bad_cache", "trust_cache_dir", "require_signed", "compile"}


@dataclass(frozen=True)
class StartFactors:
    """What identifies a start, in JSON's types, so that factors that were read from a file compare equal."""

    recipe: dict[str, Any]  # without the ignored fields
    versions: dict[str, str]  # of Python, tcdeploy, tokenizers and torch
    sources: str  # sha256 of tcdeploy's source files
    files: dict[str, str]  # what identifies each file that a start reads, by its path in the model's folder

    @property
    def key(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StartDifferences:
    """Texts that name what differs, such as `--context 4096 (here 8192)`."""

    environment: tuple[str, ...]  # versions and source files
    flags_and_files: tuple[str, ...]

    def texts(self) -> tuple[str, ...]:
        return self.environment + self.flags_and_files


class NoStartRecordError(Exception):
    """Why starts of a recipe neither read nor write a start record."""


def start_factors(recipe: Recipe, folder: Path | None) -> StartFactors | None:
    """As `require_start_factors`, but returns None if starts of the recipe have no record."""
    try:
        return require_start_factors(recipe, folder)
    except NoStartRecordError:
        return None


def require_start_factors(recipe: Recipe, folder: Path | None) -> StartFactors:
    """`folder`: of the model's files; None if they are not on this machine. Raises NoStartRecordError."""
    if recipe.programs != "aot":
        raise NoStartRecordError("starts without --programs aot have no start record")
    if recipe.load_format != "auto" or recipe.trust_remote_code:
        raise NoStartRecordError("starts with random weights or --trust-remote-code have no start record")
    if folder is None:
        raise NoStartRecordError(f"the files of {recipe.model} are not on this machine")
    try:
        paths = weight_files(recipe.model, folder)
        files = dict(_model_files(folder, paths)) if paths else None
    except (OSError, ModelError) as error:
        raise NoStartRecordError(f"the model's files cannot be read: {error}") from error
    if files is None:
        raise NoStartRecordError(f"{folder} has no weights as safetensors or GGUF")
    request = {name: value for name, value in asdict(recipe).items() if name not in IGNORED_FIELDS}
    versions = {"Python": platform.python_version(), "tcdeploy": __version__}
    versions |= {name: installed_version(name) for name in ("tokenizers", "torch")}
    return StartFactors(json.loads(json.dumps(request)), versions, _own_sources(), files)


def compare_factors(here: StartFactors, there: StartFactors) -> StartDifferences:
    """What differs. Each text has the value of the packages (`there`) and, in brackets, that of this start (`here`)."""
    environment = [
        _difference(name, there.versions.get(name), version)
        for name, version in here.versions.items()
        if there.versions.get(name) != version
    ]
    if here.sources != there.sources and here.versions["tcdeploy"] == there.versions.get("tcdeploy"):
        environment.append(f"other source files of tcdeploy {here.versions['tcdeploy']}")
    flags = [
        _difference(f"--{name.replace('_', '-')}", _flag_value(there.recipe[name]), _flag_value(here.recipe[name]))
        for name in here.recipe
        if name in there.recipe and here.recipe[name] != there.recipe[name]  # other versions have other fields
    ]
    return StartDifferences(tuple(environment), (*flags, *_file_differences(here.files, there.files)))


def _difference(name: str, there: str | None, here: str | None) -> str:
    return f"{f'{name} {there}' if there else f'no {name}'} (here {here or f'no {name}'})"


def _flag_value(value: Any) -> str | None:
    if value is None:
        return None
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _file_differences(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[str]:
    changed = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    weights = {name for name in changed if name == INDEX or name.endswith((".safetensors", ".gguf"))}
    for name in changed:
        if name in weights:
            continue
        if name not in there:
            yield f"no {name} (here there is one)"
        else:
            yield f"another {name}" if name in here else f"{name} (missing here)"
    if weights:
        yield "other weights"


def _model_files(folder: Path, weights: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """What identifies each file that a start reads: of a weight file the size, the header and samples."""
    from tcdeploy.models.weights.reader import read_header  # imports torch

    for path in sorted([*folder.iterdir(), *folder.glob("*/*.jinja")]):
        if path.suffix in READ_SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()
    for path in weights:
        yield path.name, f"{path.stat().st_size} {hashlib.sha256(read_header(path)).hexdigest()} {sampled_digest(path)}"


def sampled_digest(path: Path) -> str:
    """A digest of parts of a file, read in milliseconds, so that two fine-tunes usually differ."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _own_sources() -> str:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))}
    return combined_digest({path: hashlib.sha256(source).hexdigest() for path, source in sources.items()})
