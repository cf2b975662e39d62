"""The record that stands in the cache folder: for one Plan, what was warmed, how long it took, and that it was right.

It also says what a start needs (each file with its sha256), what the programs were made from (recipe, environment, the
model's config, the sources of our ops), and what the eager model answered to each bucket's fixed inputs: so a cache can
be packed, explained and proved on another machine from this file alone.

One JSON file per plan key, so that processes that warm different plans never write the same file, and those that
warm the same plan replace it whole: written beside, synced, renamed. Its last field is the sha256 of the others, so
that no byte of it changes unseen. No torch here: `cache ls` reads it in a blink.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tcdeploy.cache.contents import FileRecord
from tcdeploy.errors import IntegrityError, SpaceError
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

SCHEMA_VERSION = 6
MANIFESTS_DIR = "manifests"


@dataclass(frozen=True)
class Parity:
    """How far a bucket's logits lie from transformers' own attention on the same weights, over the rows compared."""

    rows: int
    max_difference: float
    relative_difference: float  # max_difference over the largest reference logit
    kl: float  # nats, the largest over the rows
    tolerance: float  # of relative_difference
    kl_tolerance: float
    passed: bool


@dataclass(frozen=True)
class GreedyTokens:
    """To a bucket's fixed inputs: per row the most likely next token, and its log-probability in nats."""

    inputs_sha256: str  # sha256 over the rows' token ids
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """One candidate as it did on this bucket: median ms of a step, or why it could not be timed."""

    variant: str
    step_ms: float | None
    seconds: float  # of compiling, recording and timing it
    error: str = ""


@dataclass(frozen=True)
class BucketRecord:
    """What warming one bucket took and gave. Times in seconds or ms as named; a None was not measured."""

    bucket: str
    outcome: str  # hit, miss, reused or unknown
    compile_seconds: float
    capture_seconds: float
    check_seconds: float
    compiles: int
    programs: int
    cache_hits: int
    cache_misses: int
    graph_breaks: int
    cudagraph_skips: int
    captured: bool
    parity: Parity
    eager_greedy_tokens: GreedyTokens  # of the eager model
    greedy_tokens: GreedyTokens  # of the bucket as it serves
    peak_memory_bytes: int
    variant: str  # how its step is made
    trials: tuple[Trial, ...] = ()  # what was timed to choose it, the losers included; kept from the run that tuned
    graph_memory_bytes: int | None = None  # that recording took from the device
    cold_seconds: float | None = None  # compile_seconds of the run that filled the cache
    eager_ms: float | None = None
    compiled_ms: float | None = None
    kernels_timed: int = 0  # variants of kernels that torch timed in this run to choose one
    kernels_compiled: int = 0  # by Triton or a C++ compiler in this run, in trials and checks too
    timed_context: int | None = None  # tokens that each sequence held while the step was timed

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.capture_seconds + self.check_seconds


@dataclass(frozen=True)
class Origin:
    """What programs are made from, beside the plan and the machine."""

    recipe: dict[str, Any]  # as it was asked
    model_config: dict[str, Any]  # transformers' own, of the model
    sources: str  # sha256 over the sources of our ops and graph passes
    torch_settings: dict[str, str]  # that stand in torch's cache key


@dataclass(frozen=True)
class Manifest:
    plan: dict[str, Any]
    environment: dict[str, Any]
    origin: Origin
    stage_seconds: dict[str, float]
    buckets: tuple[BucketRecord, ...]
    files: tuple[FileRecord, ...]  # what the start that wrote this used, by path
    workspace_bytes: int | None = None  # device memory beyond weights and KV once all was warm; the plan predicted it
    is_first_start: bool = True  # of its process
    schema: int = SCHEMA_VERSION

    @property
    def was_warm(self) -> bool:
        """Whether the start that wrote this compiled nothing: then `files` is what a start needs, and no more.

        A process that had started something before may have found programs in its memory, and opened no file.
        """
        return self.is_first_start and all(record.outcome in ("hit", "reused") for record in self.buckets)

    def cold_seconds(self) -> dict[str, float]:
        """Per bucket, the compile seconds of the run that missed: what the cache saves."""
        return {record.bucket: record.cold_seconds for record in self.buckets if record.cold_seconds is not None}

    def trials(self) -> dict[str, tuple[Trial, ...]]:
        """Per bucket, what an earlier run timed: the fastest is taken without timing again."""
        return {record.bucket: record.trials for record in self.buckets if record.trials}


def make_manifest(
    plan: Plan,
    environment: Environment,
    origin: Origin,
    stage_seconds: dict[str, float],
    buckets: list[BucketRecord],
    files: tuple[FileRecord, ...],
    workspace_bytes: int | None = None,
    is_first_start: bool = True,
) -> Manifest:
    return Manifest(
        asdict(plan), asdict(environment), origin, stage_seconds, tuple(buckets), files, workspace_bytes, is_first_start
    )


def make_origin(recipe: Recipe, model_config: dict[str, Any], sources: str, torch_settings: dict[str, str]) -> Origin:
    return Origin(asdict(recipe), model_config, sources, torch_settings)


def manifest_path(cache_dir: str | Path, plan_key: str) -> Path:
    return Path(cache_dir) / MANIFESTS_DIR / f"{plan_key}.json"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Publish atomically. Raises SpaceError on a full disk, and the manifest that was there stays."""
    staging = path.with_name(f".{path.stem}-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(staging, "w", encoding="utf-8") as file:
            file.write(manifest_text(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"no room for the manifest {path}", "free some room and run again: the cache is intact"
            ) from error
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            staging.unlink()


def manifest_text(manifest: Manifest) -> str:
    """As it stands in the file: the same manifest is the same bytes."""
    content = asdict(manifest)
    return json.dumps({**content, "sha256": _digest(content)}, indent=1)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest | None:
    """The manifest, or None where none was written, or by a version with another schema.

    Raises IntegrityError when it is not one, or not as it was written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (ValueError, IsADirectoryError) as error:  # bad UTF-8 is a ValueError
        raise _corruption_error(path, str(error)) from error
    return None if _has_other_schema(text) else parse_manifest(text, path)


def read_manifests(folder: str | Path, skip_damaged: bool = False) -> dict[str, Manifest]:
    """Of all plans of a cache folder, by key; those of another version are left out. Raises IntegrityError, or skips.

    One that stands under another plan's key is damaged too.
    """
    found: dict[str, Manifest] = {}
    for path in sorted(Path(folder, MANIFESTS_DIR).glob("*.json")):
        with contextlib.suppress(*([IntegrityError] if skip_damaged else [])):
            manifest = read_manifest(path)
            if manifest is not None and manifest.plan["key"] != path.stem:
                raise _corruption_error(path, "it is of another plan")
            found |= {path.stem: manifest} if manifest is not None else {}
    return found


def _has_other_schema(text: str) -> bool:
    """As it was written, and by a version that wrote otherwise: neither damaged nor of use. The first wrote no sum."""
    try:
        document = json.loads(text)
        schema, digest = document["schema"], document.pop("sha256", None)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False
    is_whole = digest is None or digest == _digest(document)
    return isinstance(schema, int) and schema != SCHEMA_VERSION and is_whole


def parse_manifest(text: str, path: Path) -> Manifest:
    """`path` is named in errors. Raises IntegrityError."""
    try:
        document = json.loads(text)
        schema = document["schema"]
        if schema != SCHEMA_VERSION:
            raise _corruption_error(path, f"schema {schema}, and this version reads {SCHEMA_VERSION}")
        digest = document.pop("sha256")
        _check_fields(document, Manifest)
        found = Manifest(
            **{
                **document,
                "origin": Origin(**document["origin"]),
                "buckets": tuple(_read_record(item) for item in document["buckets"]),
                "files": tuple(FileRecord(**item) for item in document["files"]),
            }
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _corruption_error(path, f"{type(error).__name__}: {error}") from error
    if digest != _digest(document) or text != manifest_text(found):
        raise _corruption_error(path, "it is not as it was written")
    return found


def _read_record(document: dict[str, Any]) -> BucketRecord:
    _check_fields(document, BucketRecord)
    made: dict[str, Any] = {
        "parity": Parity(**document["parity"]),
        "eager_greedy_tokens": _read_greedy_tokens(document["eager_greedy_tokens"]),
        "greedy_tokens": _read_greedy_tokens(document["greedy_tokens"]),
        "trials": tuple(Trial(**trial) for trial in document["trials"]),
    }
    return BucketRecord(**{**document, **made})


def _check_fields(document: dict[str, Any], kind: type[Manifest | BucketRecord]) -> None:
    """All of them, those that have a default too. Raises KeyError."""
    known = {item.name for item in fields(kind)}
    if set(document) != known:
        raise KeyError(f"fields of {kind.__name__}: {sorted(set(document) ^ known)}")


def _read_greedy_tokens(document: dict[str, Any]) -> GreedyTokens:
    return GreedyTokens(document["inputs_sha256"], tuple(document["tokens"]), tuple(document["logprobs"]))


def _corruption_error(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest {path} is corrupt: {reason}",
        "nothing of the cache was loaded; --on-bad-cache rebuild discards it and compiles again, or believe the files "
        f"beside it: rm {path}",
    )
