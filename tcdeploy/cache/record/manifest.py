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
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcdeploy.cache.files.records import FileRecord, is_plain_record
from tcdeploy.cache.folder.layout import MANIFESTS_DIR
from tcdeploy.errors import IntegrityError, MismatchError, SpaceError, TcdeployError, UsageError
from tcdeploy.host.durable import sync, write_durably
from tcdeploy.host.regular_file import DISK_FULL, UnsafeFileError, read_regular
from tcdeploy.host.typed_json import check_fields, from_json
from tcdeploy.planning.bucket_record import BLIND, BucketRecord, Trial
from tcdeploy.planning.environment import Difference, Environment, diff_mappings
from tcdeploy.planning.gpu_description import GPUDescription
from tcdeploy.planning.keys import CACHE_EPOCH
from tcdeploy.planning.plan import Plan

# Raise by one if a field is added or removed, or changes its meaning. Plans of other schemas are not used.
SCHEMA_VERSION = 9
REQUIRED_PLAN_FIELDS = ("key", "model", "compute_dtype", "mode")


@dataclass(frozen=True)
class Origin:
    """The inputs of the programs beside the plan and the environment."""

    recipe: dict[str, Any]
    model_config: dict[str, Any]  # of transformers
    sources: dict[str, str]  # digest of each source file of our ops and graph passes, by its path in the package
    torch_settings: dict[str, str]  # those in torch's cache key
    model_sources: dict[str, str]  # sha256 of each file of the model's code, by module
    epoch: int = CACHE_EPOCH


@dataclass(frozen=True)
class BlindBuild:
    """How programs were compiled on a machine without the GPU. `choices`: what was chosen without timing it."""

    target: GPUDescription
    choices: tuple[str, ...]


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
    blind: BlindBuild | None = None  # None: the programs were compiled on a machine with the plan's device
    schema: int = SCHEMA_VERSION

    @property
    def was_warm(self) -> bool:
        """Whether the start that wrote this compiled nothing, so that `files` is exactly what a start needs.

        False for a later start of a process: it may have found programs in memory and opened no file.
        """
        return self.is_first_start and all(record.outcome in ("hit", "reused") for record in self.buckets)

    @property
    def has_run(self) -> bool:
        """Whether a start has run the programs. False for a build without the GPU until its first start there."""
        return all(record.outcome != BLIND for record in self.buckets)

    @property
    def total_bytes(self) -> int:
        """Of the files in the cache folder."""
        return sum(file.bytes for file in self.files)

    def cold_seconds(self) -> dict[str, float]:
        """Compile seconds of the run that missed, by bucket: the time that the cache saves."""
        return {record.bucket: record.cold_seconds for record in self.buckets if record.cold_seconds is not None}

    def trials(self) -> dict[str, tuple[Trial, ...]]:
        """Earlier timings by bucket: the next start takes the fastest variant without timing again."""
        return {record.bucket: record.trials for record in self.buckets if record.trials}


def diff_sources(here: Origin, there: Origin) -> list[Difference]:
    """Each source file of our ops and passes, and of the model, that differs, with the first digits of its digests."""
    sources = diff_mappings(here.sources, there.sources, "tcdeploy/")
    found = [*sources, *diff_mappings(here.model_sources, there.model_sources)]
    return [Difference(item.name, item.here[:12], item.there[:12]) for item in found]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the file atomically. Raises SpaceError if the disk is full; the previous manifest then stays."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(path, manifest_text(manifest).encode())
        sync(path.parent)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise SpaceError(
                f"no room for the manifest {path}", "free space and run again; the cache is intact"
            ) from error
        raise


def manifest_text(manifest: Manifest) -> str:
    """The content of the file. Equal manifests give equal bytes."""
    content = asdict(manifest)
    return json.dumps({**content, "sha256": _digest(content)}, indent=1)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path, containing: str = "") -> Manifest | None:
    """The manifest; None if there is no file, or another version wrote it. Raises IntegrityError if it is damaged.

    `containing`: also None if the file does not contain this text. It is not parsed then.
    """
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        return None
    except (UnsafeFileError, ValueError) as error:  # ValueError: bad UTF-8
        raise _corruption_error(path, str(getattr(error, "strerror", error))) from error
    return None if containing not in text or _is_of_other_version(text) else parse_manifest(text, path)


def read_manifests(folder: str | Path, skip_damaged: bool = False) -> dict[str, Manifest]:
    """The manifests of all plans of a cache folder by plan key, without those of other versions of tcdeploy.

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


def _is_of_other_version(text: str) -> bool:
    """Whether it is an undamaged manifest of another schema or cache epoch. The first schema had no checksum."""
    try:
        document = json.loads(text)
        schema, digest = document["schema"], document.pop("sha256", None)
        is_other = schema != SCHEMA_VERSION or document["origin"]["epoch"] != CACHE_EPOCH
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False
    return isinstance(schema, int) and is_other and digest in (None, _digest(document))


def read_other_versions(folder: str | Path) -> dict[str, tuple[FileRecord, ...]]:
    """The files of plans of another schema or cache epoch, by their keys. This version uses none of them."""
    plans = {}
    for path in sorted(Path(folder, MANIFESTS_DIR).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            if _is_of_other_version(text := read_regular(path).decode()):
                plans[path.stem] = tuple(filter(is_plain_record, _listed_files(text)))
    return plans


def _listed_files(text: str) -> list[FileRecord]:
    with contextlib.suppress(KeyError, TypeError):
        return [FileRecord(item["path"], item["bytes"], item["sha256"]) for item in json.loads(text)["files"]]
    return []


def no_plan_error(folder: str | Path, plan_key: str = "") -> TcdeployError:
    """The error for a folder without a plan, or without this one. It says so if another version has warmed it."""
    others, warm = read_other_versions(folder), f"tcdeploy warm MODEL --cache-dir {folder}"
    if plan_key in others or (others and not plan_key):
        plans = f"plan {plan_key} in {folder} was" if plan_key else f"the plans in {folder} were"
        return MismatchError(
            f"{plans} warmed by another version of tcdeploy, and this version cannot use what it compiled",
            f"warm again with this version: {warm}; to delete the old plans: tcdeploy cache gc {folder}",
        )
    if plan_key:
        return UsageError(
            f"plan {plan_key} has not finished warming in {folder}",
            f"warm it: {warm}; list the plans: tcdeploy cache ls {folder}",
        )
    return UsageError(f"the folder {folder} holds no plan that finished warming", warm)


def parse_packed_manifest(text: str, bundle: Path) -> Manifest:
    """Parse the manifest in a bundle. Raises IntegrityError, and MismatchError if another version has packed it."""
    if _is_of_other_version(text):
        raise MismatchError(
            f"the bundle {bundle} was packed by another version of tcdeploy, and this version cannot use what it "
            "contains",
            "pack it again with this version: tcdeploy cache pack MODEL -o FILE.tcb",
        )
    return parse_manifest(text, bundle)


def parse_manifest(text: str, path: Path) -> Manifest:
    """Parse the content of a file. `path` is for the error. Raises IntegrityError."""
    try:
        document = json.loads(text)
        if (schema := document["schema"]) != SCHEMA_VERSION:
            raise _corruption_error(path, f"it has schema {schema}, and this version reads {SCHEMA_VERSION}")
        del document["sha256"]
        manifest = from_json(Manifest, document, "it")
        _check_types(manifest)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _corruption_error(path, f"{type(error).__name__}: {error}") from error
    if text != manifest_text(manifest):  # all fields are written, so none is missing
        raise _corruption_error(path, "its checksum does not match")
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Check the date, and the plan and environment that commands read. Raises ValueError and KeyError."""
    check_fields(Plan, manifest.plan, "the plan")
    check_fields(Environment, manifest.environment, "the environment")
    for name in REQUIRED_PLAN_FIELDS:
        manifest.plan[name]
    if manifest.compiled_at is not None and not 0 <= manifest.compiled_at < 1 << 62:
        raise ValueError(f"compiled_at is {manifest.compiled_at}; it must be a number of seconds since 1970")


def _corruption_error(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest {path} is corrupt: {reason}",
        "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild",
    )
