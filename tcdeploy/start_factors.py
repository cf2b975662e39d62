"""What a start from packages must have in common with the start that made them, and what differs if it does not.

The factors are known before anything is loaded: the recipe, the model's files (weight files by their sizes, headers and
samples), tcdeploy's source files, and the versions of Python, tcdeploy, tokenizers and torch. Start records are found
by a hash of them (start_record.py). Does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcdeploy import __version__
from tcdeploy.errors import ModelError
from tcdeploy.planning.recipe import Recipe

PACKAGE = Path(__file__).parent
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}  # of configs, tokenizers and chat templates
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each weight file
# Fields of a recipe that are no factors: the model's files are hashed instead, and the others change no program.
IGNORED_FIELDS = {"model", "revision", "cache_dir", "on_bad_cache", "trust_cache_dir", "require_signed"}


@dataclass(frozen=True)
class StartFactors:
    """Values as JSON has them, so that factors from a file equal those of this start.

    recipe: without the ignored fields.
    versions: of Python, tcdeploy, tokenizers and torch.
    sources: sha256 of tcdeploy's source files.
    files: what identifies each file of the model that a start reads, by its path in the model's folder.
    """

    recipe: dict[str, Any]
    versions: dict[str, str]
    sources: str
    files: dict[str, str]

    @property
    def key(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StartDifferences:
    """Texts that name what differs, such as `--context 4096 (here 8192)`. `environment`: versions and source files."""

    environment: tuple[str, ...]
    request: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.environment) + len(self.request)


def start_factors(recipe: Recipe, folder: Path | None) -> StartFactors | None:
    """None for a recipe whose starts have no record: random weights, or code from a repository.

    `folder`: of the model's files. Also None if one of them cannot be read; a full start reports what is wrong with it.
    """
    if recipe.programs != "aot" or recipe.load_format != "auto" or recipe.trust_remote_code or folder is None:
        return None
    try:
        files = dict(_model_files(folder)) if weight_files(folder) else None
    except (OSError, ModelError):
        return None
    if files is None:
        return None
    request = {name: value for name, value in asdict(recipe).items() if name not in IGNORED_FIELDS}
    versions = {"Python": platform.python_version(), "tcdeploy": __version__}
    versions |= {name: _version(name) for name in ("tokenizers", "torch")}
    return StartFactors(json.loads(json.dumps(request)), versions, _own_sources(), files)


def compare_factors(here: StartFactors, there: StartFactors) -> StartDifferences:
    """What differs between this start and the one that made the packages."""
    environment = [
        f"{name} {there.versions.get(name) or 'none'} (here {version or 'none'})"
        for name, version in here.versions.items()
        if there.versions.get(name) != version
    ]
    if here.sources != there.sources and here.versions["tcdeploy"] == there.versions.get("tcdeploy"):
        environment.append(f"other source files of tcdeploy {here.versions['tcdeploy']}")
    request = [
        f"--{name.replace('_', '-')} {_flag_value(there.recipe.get(name))} (here {_flag_value(here.recipe.get(name))})"
        for name in {**here.recipe, **there.recipe}
        if here.recipe.get(name) != there.recipe.get(name)
    ]
    request += _file_differences(here.files, there.files)
    return StartDifferences(tuple(environment), tuple(request))


def _flag_value(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _file_differences(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*here, *there}):
        if name not in there:
            yield f"no {name} (here there is one)"
        elif name not in here:
            yield f"{name} (missing here)"
        elif here[name] != there[name]:
            yield f"another {name}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load; [] if it would load others."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    try:
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        return [folder / name for name in sorted(names) if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _model_files(folder: Path) -> Iterator[tuple[str, str]]:
    """What identifies each file that a start reads: of a weight file the size, the header and samples."""
    from tcdeploy.models.checkpoint_reader import read_header  # imports torch

    for path in sorted([*folder.iterdir(), *folder.glob("*/*.jinja")]):
        if path.suffix in READ_SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()
    for path in weight_files(folder):
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
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
