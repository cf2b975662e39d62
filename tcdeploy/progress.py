"""How stages tell what they are doing: they report to a `Progress`, and only the CLI speaks. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tcdeploy.cache.manifest import BucketRecord
    from tcdeploy.planning.plan import Plan


class Progress(Protocol):
    """Called in order: `stage` for each stage begun, `planned` once, and a pair of calls for each bucket."""

    def stage(self, name: str) -> None: ...

    def planned(self, plan: Plan) -> None: ...

    def bucket_started(self, bucket: str, number: int, total: int) -> None: ...

    def bucket_finished(self, record: BucketRecord) -> None: ...


class NullProgress:
    """For a library caller that wants no reports."""

    def stage(self, name: str) -> None:
        pass

    def planned(self, plan: Plan) -> None:
        pass

    def bucket_started(self, bucket: str, number: int, total: int) -> None:
        pass

    def bucket_finished(self, record: BucketRecord) -> None:
        pass
