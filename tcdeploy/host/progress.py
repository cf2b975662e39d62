"""Progress callbacks: stages report to a `Progress`, and only the CLI prints. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tcdeploy.planning.bucket_record import BucketRecord
    from tcdeploy.planning.plan import Plan


class Progress(Protocol):
    """Callbacks in call order: `stage` when a stage starts, `planned` once, then two calls for each bucket.

    If a bucket differs from a stored reference, `load`, `reference` and `compile` follow again, with all buckets.
    """

    def stage(self, name: str) -> None:
        return

    def planned(self, plan: Plan) -> None:
        return

    def bucket_started(self, bucket: str, number: int, total: int) -> None:
        return

    def bucket_finished(self, record: BucketRecord) -> None:
        return


class NullProgress(Progress):
    """Ignores all reports; the default for library callers."""
