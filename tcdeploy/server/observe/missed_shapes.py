"""Records request shapes beyond the largest bucket; `tcdeploy warm --from FILE` adds buckets for them.

Such requests are served without compiling: a prompt longer than the largest prefill bucket is split into chunks, and
requests beyond the largest decode bucket wait for a row. Each shape, rounded up to a power of two, is written once per
process as a line of `missed_shapes.jsonl` in the cache folder.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections import Counter
from pathlib import Path

from tcdeploy.errors import UsageError
from tcdeploy.host.regular_file import open_regular, read_regular
from tcdeploy.planning.backends import Phase
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

FILE_NAME = "missed_shapes.jsonl"
HINT = f"a server writes {FILE_NAME} into its cache folder"
MAX_FILE_BYTES = 16 << 20
MAX_BUCKET_SIZE = {"prefill": 16384, "decode": 512}  # larger buckets are not worth their memory
log = logging.getLogger("tcdeploy.server")


class MissedShapes:
    """Counts every miss, and writes each shape once."""

    def __init__(self, plan: Plan) -> None:
        self.counts: Counter[str] = Counter()  # misses by bucket name
        self._path = Path(plan.cache_dir) / FILE_NAME
        self._largest = {"prefill": plan.prefill_buckets[-1].size, "decode": plan.decode_buckets[-1].size}
        self._written_shapes: set[str] = set()

    def observe_shape(self, phase: Phase, size: int) -> None:
        """`size` is in tokens for prefill, in sequences for decode."""
        if size <= self._largest[phase]:
            return
        shape = f"{phase}:{bucket_size_for(phase, size)}"
        self.counts[shape] += 1
        if shape in self._written_shapes:
            return
        self._written_shapes.add(shape)
        line = json.dumps({"phase": phase, "size": bucket_size_for(phase, size)}) + "\n"
        # Not on the event loop, which a slow disk would block. A daemon does not delay the end of the process.
        threading.Thread(target=self._append, args=(shape, line.encode()), daemon=True).start()

    def _append(self, shape: str, line: bytes) -> None:
        try:
            with open_regular(self._path, "ab", must_own=True) as file:
                file.write(line)
        except OSError as error:
            log.warning("cannot write the missed shape %s to %s: %s", shape, self._path, error.strerror)


def bucket_size_for(phase: Phase, size: int) -> int:
    return min(1 << (size - 1).bit_length(), MAX_BUCKET_SIZE[phase])


def read_missed_shapes(path: str) -> dict[str, set[int]]:
    """Bucket sizes by phase. Raises UsageError if the file is missing or malformed."""
    sizes: dict[str, set[int]] = {"prefill": set(), "decode": set()}
    try:
        content = read_regular(path, MAX_FILE_BYTES, follows_links=True)
        for line in content.decode().splitlines():
            shape = json.loads(line)
            phase = shape["phase"] if "phase" in shape else shape["kind"]  # "kind": files of release 0.2 and earlier
            sizes[phase].add(int(shape["size"]))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", HINT) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path} is not a file of missed shapes", HINT) from error
    return sizes


def with_missed_shapes(recipe: Recipe, plan: Plan, missed_shapes: dict[str, set[int]]) -> Recipe:
    """The recipe with one more bucket per missed shape, clamped to the context. The plan checks the memory."""
    prefill = {bucket.size for bucket in plan.prefill_buckets} | {
        min(size, plan.context) for size in missed_shapes["prefill"]
    }
    decode = {bucket.size for bucket in plan.decode_buckets} | missed_shapes["decode"]
    return dataclasses.replace(recipe, buckets=tuple(sorted(prefill)), batch_sizes=tuple(sorted(decode)))
