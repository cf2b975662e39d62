"""Shapes that were asked for and are in no bucket: served all the same, and written down for the next warm-up.

A prompt longer than the largest prefill bucket is taken in chunks; more answers at once than the largest decode bucket
holds wait for a row. Neither compiles anything. Each shape, rounded up to the power of two that a bucket would have,
is a line of `missed_shapes.jsonl` in the cache folder, once per process; `tcdeploy warm --from FILE` adds those.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Literal

from tcdeploy.errors import UsageError
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

FILE_NAME = "missed_shapes.jsonl"
MAX_BUCKET_SIZE = {"prefill": 16384, "decode": 512}  # a bucket is worth its memory up to here
Phase = Literal["prefill", "decode"]
log = logging.getLogger("tcdeploy.server")


class MissedShapes:
    """Counts every miss; writes each shape once."""

    def __init__(self, plan: Plan) -> None:
        self.counts: Counter[str] = Counter()
        self._path = Path(plan.cache_dir) / FILE_NAME
        self._largest = {"prefill": plan.prefill_buckets[-1].size, "decode": plan.decode_buckets[-1].size}
        self._written_shapes: set[str] = set()

    def observe_shape(self, phase: Phase, size: int) -> None:
        if size <= self._largest[phase]:
            return
        shape = f"{phase}:{bucket_size_for(phase, size)}"
        self.counts[shape] += 1
        if shape in self._written_shapes:
            return
        self._written_shapes.add(shape)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": phase, "size": bucket_size_for(phase, size)}) + "\n")
        except OSError as error:
            log.warning("a missed shape could not be written to %s: %s", self._path, error.strerror)


def bucket_size_for(phase: Phase, size: int) -> int:
    return min(1 << (size - 1).bit_length(), MAX_BUCKET_SIZE[phase])


def read_missed_shapes(path: str) -> dict[str, set[int]]:
    """Raises UsageError for a file that is not there, or not ours."""
    found: dict[str, set[int]] = {"prefill": set(), "decode": set()}
    try:
        for line in Path(path).read_text("utf-8").splitlines():
            entry = json.loads(line)
            found[entry["kind"]].add(int(entry["size"]))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", f"a server writes {FILE_NAME} into its cache folder"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no file of missed shapes", f"a server writes {FILE_NAME} into its cache folder"
        ) from error
    return found


def with_missed_shapes(recipe: Recipe, plan: Plan, missed_shapes: dict[str, set[int]]) -> Recipe:
    """The recipe with a bucket more for each missed shape that the context allows; what memory allows is the plan's."""
    prefill = {bucket.size for bucket in plan.prefill_buckets} | {
        min(size, plan.context) for size in missed_shapes["prefill"]
    }
    decode = {bucket.size for bucket in plan.decode_buckets} | missed_shapes["decode"]
    return dataclasses.replace(recipe, buckets=tuple(sorted(prefill)), batch_sizes=tuple(sorted(decode)))
