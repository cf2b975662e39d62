"""The result of a start."""

from __future__ import annotations

import gc
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifest
from tcdeploy.engine.engine import Engine, live_engines
from tcdeploy.models.weights.reader import ReadTotal
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.extras import require_extra
from tcdeploy.planning.plan import Plan
from tcdeploy.start.planned import Planned

if TYPE_CHECKING:
    from tcdeploy.start.eager import ProgramSwaps  # imports transformers


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """What a start has found. It does not keep the model in memory. `records`: the warm-up result of each bucket."""

    planned: Planned
    records: tuple[BucketRecord, ...] = ()
    stage_seconds: dict[str, float]
    import_seconds: dict[str, float]  # by package, longest first: imports of this process so far, in all stages
    cache_dir: str  # the folder in use: `plan.cache_dir`, or a private copy if that folder is read-only
    is_recorded: bool = True  # False: torch did not store all programs, so the plan in the folder was not changed
    workspace_bytes: int | None = None  # measured on the device; `plan.workspace_bytes` was predicted
    weights_read: ReadTotal | None = None  # of our reader threads; None: transformers read the files, or none were read

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def cache_bytes(self) -> int:
        """Of the plan's files in the cache folder; 0 if it is not recorded."""
        manifest = read_manifest(manifest_path(self.cache_dir, self.plan.key))
        return manifest.total_bytes if manifest is not None else 0


@dataclass(frozen=True, kw_only=True)
class Deployment(StartReport):
    """A warmed model: `engine` generates tokens.

    After an eager start (start/eager.py), `records` is empty, and `swaps` replaces eager buckets by their programs.
    """

    engine: Engine
    loaded_tokenizer: Any = None  # None: not loaded by `prepare`
    swaps: ProgramSwaps | None = None  # None: every bucket was warmed before the start ended

    def report(self) -> StartReport:
        """The same without the engine, for after the memory has been released."""
        return StartReport(**{item.name: getattr(self, item.name) for item in fields(StartReport)})

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, or a StoredTokenizer after a start from packages.

        Loaded on first access unless `prepare` has loaded it. Raises ModelError if the model has none.
        """
        if self.loaded_tokenizer is not None:
            return self.loaded_tokenizer
        require_extra("compile", "load the tokenizer; `prepare(..., needs_tokenizer=True)` uses the stored one")
        from tcdeploy.text.tokenizer import load_tokenizer  # imports transformers

        return load_tokenizer(self.plan)


def release_memory() -> None:
    """Free the memory of deployments that are no longer referenced: device memory, programs and frozen objects.

    Torch can only drop the programs of all models at once, so they stay in host memory while an engine is in use.
    """
    gc.unfreeze()
    gc.collect()
    if not live_engines:
        torch.compiler.reset()
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
