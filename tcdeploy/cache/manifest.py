"""The manifest of a plan: what was warmed, from which inputs, into which files, and with what result.

A manifest lists the files that a start needs with their sha256, the inputs of its programs (recipe, environment, model
config, digests of our op sources), and the greedy tokens of the eager model for each bucket's fixed inputs. A cache can
therefore be packed, explained and verified on another machine from this file.

There is one JSON file per plan key, so processes that warm different plans never write to the same file. It is written
to a staging file, synced and renamed. Its last field is the sha256 of the other fields, against accidental changes.
Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from tcdeploy.cache.contents import FileRecord
from tcdeploy.errors import IntegrityError, SpaceError
from tcdeploy.host.durable import sync
from tcdeploy.host.regular_file import UnsafeFileError, open_regular, read_regular
from tcdeploy.host.typed_json import check_fields, from_json
from tcdeploy.planning.environment import Difference, Environment, diff_mappings
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

SCHEMA_VERSION = 7
MANIFESTS_DIR = "manifests"
OPTIONAL_FIELDS = {"compiled_at", "step_costs"}  # of a manifest; version 0.2 did not record them
OPTIONAL_BUCKET_FIELDS = {"eager_spread_ms", "compiled_spread_ms"}  # not written if unknown; 0.2 cannot read them
OBSOLETE_BUCKET_FIELDS = {"step_ms"}  # development versions after 0.2 recorded them


@dataclass(frozen=True)
class Parity:
    """Distance of a bucket's logits from a higher-precision computation of the same weights.

    Its limits are derived from the distance of transformers' eager logits (engine/check/parity.py).
    """

    rows: int  # compared
    reference_dtype: str  # of the computation in higher precision
    max_difference: float  # between logits
    relative_difference: float  # max_difference over the largest reference logit
    kl: float  # in nats, the largest over the rows
    median_kl: float  # over the rows
    eager_max_difference: float  # of transformers' eager logits
    eager_kl: float
    max_difference_limit: float
    kl_limit: float
    median_kl_limit: float
    outlier_rows: int  # rows that were outliers on all sets of prompts
    attempts: int  # sets of prompts that were tried
    reference_changed: bool  # since it was computed, so that the bucket failed
    passed: bool


@dataclass(frozen=True)
class GreedyTokens:
    """The most likely next token of each row of a bucket's fixed inputs, and its log-probability in nats."""

    inputs_sha256: str  # of the rows' token ids
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """The timing of one variant on a bucket: `step_ms` is the median over its steps, None with an `error`."""

    variant: str
    step_ms: float | None
    seconds: float  # for compiling, capturing and timing it
    error: str = ""


class Compilation(NamedTuple):
    """Seconds and counts of compiling one bucket, from the process that compiled it. Field names as in BucketRecord."""

    outcome: str
    cold_seconds: float
    cache_hits: int
    cache_misses: int
    kernels_timed: int
    kernels_compiled: int


@dataclass(frozen=True)
class BucketRecord:
    """Costs and results of warming one bucket. None: not measured."""

    bucket: str
    outcome: str  # hit, miss, uncached, reused or unknown (programs/compile_stats.py)
    compile_seconds: float  # in the process that runs the bucket, which may load what another process has compiled
    capture_seconds: float
    check_seconds: float
    compiles: int
    programs: int
    cache_hits: int
    cache_misses: int  # bypasses of the cache included
    graph_breaks: int
    cudagraph_skips: int
    captured: bool
    parity: Parity
    eager_greedy_tokens: GreedyTokens
    greedy_tokens: GreedyTokens  # of the compiled, captured bucket
    peak_memory_bytes: int
    variant: str  # name of the variant in use
    trials: tuple[Trial, ...] = ()  # all variants that were timed or failed; copied from the run that tried them
    graph_memory_bytes: int | None = None  # device memory that capturing took
    cold_seconds: float | None = None  # compile_seconds of the process that missed
    eager_ms: float | None = None
    compiled_ms: float | None = None
    eager_spread_ms: float | None = None  # half of the range of several measurements
    compiled_spread_ms: float | None = None
    kernels_timed: int = 0  # Triton configs that torch timed in this run
    # By Triton or a C++ compiler during this bucket's warm-up, trials and checks included. Kernels that threads have
    # compiled before (torch_compat/inductor/parallel_kernels.py) do not count.
    kernels_compiled: int = 0
    timed_context: int | None = None  # tokens per sequence while the step was timed

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.capture_seconds + self.check_seconds

    @property
    def compilation(self) -> Compilation:
        """The compilation of this bucket.

        `cold_seconds` is `compile_seconds` if the bucket was loaded from the cache and its compile time is not known.
        """
        seconds = self.compile_seconds if self.cold_seconds is None else self.cold_seconds
        return Compilation(
            self.outcome, seconds, self.cache_hits, self.cache_misses, self.kernels_timed, self.kernels_compiled
        )

    def with_compilation(self, compilation: Compilation) -> BucketRecord:
        """The record of a bucket that another process compiled during this start, before this process loaded it.

        It counts what both processes compiled. If the other one found all programs in the cache, nothing changes.
        """
        if compilation.outcome != "miss":
            return self
        return replace(
            self,
            outcome="miss",
            cache_hits=compilation.cache_hits,
            cache_misses=compilation.cache_misses + self.cache_misses,
            kernels_timed=compilation.kernels_timed + self.kernels_timed,
            kernels_compiled=compilation.kernels_compiled + self.kernels_compiled,
        )


@dataclass(frozen=True)
class Origin:
    """The inputs of the programs beside the plan and the environment."""

    recipe: dict[str, Any]
    model_config: dict[str, Any]  # of transformers
    sources: dict[str, str]  # digest of each source file of our ops and graph passes, by its path in the package
    torch_settings: dict[str, str]  # those in torch's cache key
    model_sources: dict[str, str] = field(default_factory=dict)  # sha256 of each file of the model's code, by module


@dataclass(frozen=True)
class Manifest:
    plan: dict[str, Any]
    environment: dict[str, Any]
    origin: Origin
    stage_seconds: dict[str, float]
    buckets: tuple[BucketRecord, ...]
    files: tuple[FileRecord, ...]  # used by the start that wrote the manifest, sorted by path
    workspace_bytes: int | None = None  # measured device memory beyond weights and KV cache; the plan predicts it
    is_first_start: bool = True  # whether its process had prepared nothing before
    compiled_at: int | None = None  # end of the last start that compiled, in seconds since 1970; None: not recorded
    step_costs: dict[str, Any] | None = None  # StepCosts and the digest of its sources; None: not recorded
    schema: int = SCHEMA_VERSION

    @property
    def was_warm(self) -> bool:
        """Whether the start that wrote this compiled nothing, so that `files` is exactly what a start needs.

        False for a later start of a process: it may have found programs in memory and opened no file.
        """
        return self.is_first_start and all(record.outcome in ("hit", "reused") for record in self.buckets)

    def cold_seconds(self) -> dict[str, float]:
        """Compile seconds of the run that missed, by bucket: the time that the cache saves."""
        return {record.bucket: record.cold_seconds for record in self.buckets if record.cold_seconds is not None}

    def trials(self) -> dict[str, tuple[Trial, ...]]:
        """Earlier timings by bucket: the next start takes the fastest variant without timing again."""
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
    compiled_at: int | None = None,
    step_costs: dict[str, Any] | None = None,
) -> Manifest:
    return Manifest(
        plan=asdict(plan),
        environment=asdict(environment),
        origin=origin,
        stage_seconds=stage_seconds,
        buckets=tuple(buckets),
        files=files,
        workspace_bytes=workspace_bytes,
        is_first_start=is_first_start,
        compiled_at=compiled_at,
        step_costs=step_costs,
    )


def make_origin(
    recipe: Recipe,
    model_config: dict[str, Any],
    sources: dict[str, str],
    torch_settings: dict[str, str],
    model_sources: dict[str, str],
) -> Origin:
    return Origin(asdict(recipe), model_config, sources, torch_settings, model_sources)


def diff_sources(here: Origin, there: Origin) -> list[Difference]:
    """Each source file of our ops and passes, and of the model, that differs, with the first digits of its digests.

    A file of the model is compared only if both sides list it, because older manifests list none.
    """
    shared = sorted(here.model_sources.keys() & there.model_sources.keys())
    model_here, model_there = ({name: item.model_sources[name] for name in shared} for item in (here, there))
    return [
        *diff_mappings(_shorten(here.sources), _shorten(there.sources), "tcdeploy/"),
        *diff_mappings(_shorten(model_here), _shorten(model_there)),
    ]


def _shorten(digests: dict[str, str]) -> dict[str, str]:
    return {path: digest[:12] for path, digest in digests.items()}


def plan_keys(folder: str | Path) -> set[str]:
    """Keys of the plans that have a manifest, which may be damaged."""
    return {path.stem for path in Path(folder, MANIFESTS_DIR).glob("*.json")}


def manifest_path(cache_dir: str | Path, plan_key: str) -> Path:
    return Path(cache_dir) / MANIFESTS_DIR / f"{plan_key}.json"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the file atomically. Raises SpaceError if the disk is full; the previous manifest then stays."""
    staging = path.with_name(f".{path.stem}-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        staging.unlink(missing_ok=True)  # of a killed process
        with open_regular(staging, "xb") as file:
            file.write(manifest_text(manifest).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
        sync(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"no room for the manifest {path}", "free space and run again; the cache is intact"
            ) from error
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            staging.unlink()


def manifest_text(manifest: Manifest) -> str:
    """The content of the file. Equal manifests give equal bytes."""
    content = asdict(manifest)
    for record in content["buckets"]:
        for name in [name for name in OPTIONAL_BUCKET_FIELDS if record[name] is None]:
            del record[name]
    return _text_with_checksum(content)


def _text_with_checksum(content: dict[str, Any]) -> str:
    return json.dumps({**content, "sha256": _digest(content)}, indent=1)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path, containing: str = "") -> Manifest | None:
    """The manifest; None if there is no file or if it has another schema. Raises IntegrityError if it is damaged.

    `containing`: also None if the file does not contain this text. It is not parsed then.
    """
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        return None
    except UnsafeFileError as error:
        raise _corruption_error(path, str(error.strerror)) from error
    except ValueError as error:  # bad UTF-8
        raise _corruption_error(path, str(error)) from error
    return None if containing not in text or _has_other_schema(text) else parse_manifest(text, path)


def read_manifests(folder: str | Path, skip_damaged: bool = False) -> dict[str, Manifest]:
    """The manifests of all plans of a cache folder by plan key, without those of another schema.

    Raises IntegrityError for a damaged one, or leaves it out with `skip_damaged`. A manifest under another plan's name
    is damaged too.
    """
    manifests: dict[str, Manifest] = {}
    for path in sorted(Path(folder, MANIFESTS_DIR).glob("*.json")):
        with contextlib.suppress(*([IntegrityError] if skip_damaged else [])):
            manifest = read_manifest(path)
            if manifest is not None and manifest.plan["key"] != path.stem:
                raise _corruption_error(path, f"it belongs to plan {manifest.plan['key']!r:.50}")
            manifests |= {path.stem: manifest} if manifest is not None else {}
    return manifests


def _has_other_schema(text: str) -> bool:
    """Whether it is an undamaged manifest of another schema. The first schema had no checksum."""
    try:
        document = json.loads(text)
        schema, digest = document["schema"], document.pop("sha256", None)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False
    is_whole = digest is None or digest == _digest(document)
    return isinstance(schema, int) and schema != SCHEMA_VERSION and is_whole


def parse_manifest(text: str, path: Path) -> Manifest:
    """Parse the content of a file. `path` is for the error. Raises IntegrityError."""
    try:
        document = json.loads(text)
        schema = document["schema"]
        if schema != SCHEMA_VERSION:
            raise _corruption_error(path, f"it has schema {schema}, and this version reads {SCHEMA_VERSION}")
        digest = document.pop("sha256")
        _check_fields({**dict.fromkeys(OPTIONAL_FIELDS), **document}, Manifest)
        _check_date(document.get("compiled_at"))
        manifest = Manifest(
            **{
                **document,
                "origin": _read_origin(document["origin"]),
                "buckets": tuple(_read_record(item) for item in document["buckets"]),
                "files": tuple(from_json(FileRecord, item, "a file") for item in document["files"]),
            }
        )
        _check_types(manifest)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _corruption_error(path, f"{type(error).__name__}: {error}") from error
    content = _with_fields_of(document, asdict(manifest))
    if digest != _digest(document) or text != _text_with_checksum(content):
        raise _corruption_error(path, "its checksum does not match")
    return manifest


def _with_fields_of(document: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """The content of a manifest that was read from `document`, with the same optional and obsolete fields."""
    buckets = [
        {
            **{name: value for name, value in record.items() if name in written},
            **{name: written[name] for name in OBSOLETE_BUCKET_FIELDS if name in written},
        }
        for record, written in zip(content["buckets"], document["buckets"], strict=True)
    ]
    origin = {name: value for name, value in content["origin"].items() if name in document["origin"]}
    return {
        name: value for name, value in {**content, "origin": origin, "buckets": buckets}.items() if name in document
    }


def _check_types(manifest: Manifest) -> None:
    """Check the types of the fields that commands read. Raises ValueError and KeyError."""
    check_fields(Manifest, {**asdict(manifest), "buckets": [], "files": []}, "the manifest")
    check_fields(Plan, manifest.plan, "the plan")
    check_fields(Environment, manifest.environment, "the environment")
    for name in ("key", "model", "compute_dtype", "mode"):
        manifest.plan[name]
    for record in manifest.buckets:
        check_fields(BucketRecord, json.loads(json.dumps(asdict(record))), "a bucket")


def _check_date(seconds: Any) -> None:
    if seconds is not None and (
        not isinstance(seconds, int) or isinstance(seconds, bool) or not 0 <= seconds < 1 << 62
    ):
        raise ValueError(f"compiled_at is {seconds!r:.50}; it must be a number of seconds since 1970")


def _read_origin(document: dict[str, Any]) -> Origin:
    origin = Origin(**document)
    if not all(isinstance(digest, str) for digest in (*origin.sources.values(), *origin.model_sources.values())):
        raise TypeError("a digest of a source file is not a string")
    return origin


def _read_record(document: dict[str, Any]) -> BucketRecord:
    document = {name: value for name, value in document.items() if name not in OBSOLETE_BUCKET_FIELDS}
    _check_fields({**dict.fromkeys(OPTIONAL_BUCKET_FIELDS), **document}, BucketRecord)
    nested: dict[str, Any] = {
        "parity": Parity(**document["parity"]),
        "eager_greedy_tokens": _read_greedy_tokens(document["eager_greedy_tokens"]),
        "greedy_tokens": _read_greedy_tokens(document["greedy_tokens"]),
        "trials": tuple(Trial(**trial) for trial in document["trials"]),
    }
    return BucketRecord(**{**document, **nested})


def _check_fields(document: dict[str, Any], kind: type[Manifest | BucketRecord]) -> None:
    """Require every field, with or without a default, and no other. Raises KeyError.

    The caller adds optional fields that are absent.
    """
    field_names = {item.name for item in fields(kind)}
    if set(document) != field_names:
        raise KeyError(f"fields of {kind.__name__}: {sorted(set(document) ^ field_names)}")


def _read_greedy_tokens(document: dict[str, Any]) -> GreedyTokens:
    return GreedyTokens(document["inputs_sha256"], tuple(document["tokens"]), tuple(document["logprobs"]))


def _corruption_error(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest {path} is corrupt: {reason}",
        "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild",
    )
