"""The record that stands in the cache folder: for one Plan, what was warmed, how long it took, and that it was right.

One JSON file per plan key, so that processes that warm different plans never write the same file, and those that
warm the same plan replace it whole: written beside, synced, renamed. No torch here: `cache ls` reads it in a blink.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tcdeploy.environment import Environment
from tcdeploy.errors import IntegrityError, SpaceError
from tcdeploy.plan import Plan

SCHEMA_VERSION = 2
FOLDER = "manifests"


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
class Trial:
    """One candidate as it did on this bucket: median ms of a step, or why it could not be timed."""

    candidate: str
    step_ms: float | None
    seconds: float  # of compiling, recording and timing it
    error: str = ""


@dataclass(frozen=True)
class BucketRecord:
    """What warming one bucket took and gave. Times in seconds or ms as named; a None was not measured."""

    bucket: str
    outcome: str  # hit, miss or reused
    compile_seconds: float
    capture_seconds: float
    check_seconds: float
    compiles: int
    programs: int
    cache_hits: int
    cache_misses: int
    graph_breaks: int
    graph_skips: int
    captured: bool
    parity: Parity
    peak_memory_bytes: int
    candidate: str  # how its step is made
    trials: tuple[Trial, ...] = ()  # what was timed to choose it, the losers included; kept from the run that tuned
    graph_memory_bytes: int | None = None  # that recording took from the device
    cold_seconds: float | None = None  # compile_seconds of the run that filled the cache
    eager_ms: float | None = None
    compiled_ms: float | None = None
    kernels_timed: int = 0  # variants of kernels that torch timed in this run to choose one
    timed_context: int | None = None  # tokens that each sequence held while the step was timed

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.capture_seconds + self.check_seconds


@dataclass(frozen=True)
class Manifest:
    plan: dict[str, Any]
    environment: dict[str, Any]
    stage_seconds: dict[str, float]
    buckets: tuple[BucketRecord, ...]
    workspace_bytes: int | None = None  # device memory beyond weights and KV once all was warm; the plan predicted it
    schema: int = SCHEMA_VERSION

    def cold_seconds(self) -> dict[str, float]:
        """Per bucket, the compile seconds of the run that missed: what the cache saves."""
        return {record.bucket: record.cold_seconds for record in self.buckets if record.cold_seconds is not None}

    def trials(self) -> dict[str, tuple[Trial, ...]]:
        """Per bucket, what an earlier run timed: the fastest is taken without timing again."""
        return {record.bucket: record.trials for record in self.buckets if record.trials}


def make_manifest(
    plan: Plan,
    environment: Environment,
    stage_seconds: dict[str, float],
    buckets: list[BucketRecord],
    workspace_bytes: int | None = None,
) -> Manifest:
    return Manifest(asdict(plan), asdict(environment), stage_seconds, tuple(buckets), workspace_bytes)


def manifest_path(cache_dir: str | Path, plan_key: str) -> Path:
    return Path(cache_dir) / FOLDER / f"{plan_key}.json"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Publish atomically. Raises SpaceError on a full disk, and the manifest that was there stays."""
    staging = path.with_name(f".{path.stem}-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(staging, "w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file, indent=1)
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


def read_manifest(path: Path) -> Manifest | None:
    """The manifest, or None where none was written. Raises IntegrityError when it is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, IsADirectoryError) as error:  # bad UTF-8 and bad JSON are ValueErrors
        raise _corrupt(path, str(error)) from error
    try:
        schema = document["schema"]
        if schema != SCHEMA_VERSION:
            raise _corrupt(path, f"schema {schema}, and this version reads {SCHEMA_VERSION}")
        records = tuple(_read_record(item) for item in document["buckets"])
        plan, environment, seconds = (dict(document[key].items()) for key in ("plan", "environment", "stage_seconds"))
        return Manifest(plan, environment, seconds, records, document["workspace_bytes"], schema)
    except (KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error


def _read_record(document: dict[str, Any]) -> BucketRecord:
    known = {item.name for item in fields(BucketRecord)}
    if set(document) != known:
        raise KeyError(f"bucket fields {sorted(set(document) ^ known)}")
    trials = tuple(Trial(**trial) for trial in document["trials"])
    return BucketRecord(**{**document, "parity": Parity(**document["parity"]), "trials": trials})


def _corrupt(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest {path} is corrupt: {reason}",
        f"the compiled programs beside it are checked by torch; remove it and warm again: rm {path}",
    )
