"""The tables of a start: the plan, and one row per bucket after `compile`, `warm` and `serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tcdeploy.cli.tables import Column, Table

if TYPE_CHECKING:
    from tcdeploy.planning.bucket_record import BucketRecord, Parity
    from tcdeploy.planning.plan import Plan

NO_VALUE = "-"
PARITY_COLUMNS = (
    Column("dlogit", rank=6),
    Column("eager dlogit", rank=8),
    Column("KL", rank=7),
    Column("eager KL", rank=9),
)
COMPILE_COLUMNS = (
    Column("bucket", "name"),
    Column("compile s", rank=3),
    Column("cache", "name"),
    Column("programs", rank=5),
    Column("uncompiled ms", rank=1),
    Column("compiled ms"),
    Column("speed-up"),
    *PARITY_COLUMNS,
    Column("breaks", rank=4),
    Column("peak memory", rank=2),
)
WARM_COLUMNS = (
    Column("bucket", "name"),
    Column("cache", "name"),
    Column("compile s"),
    Column("cold s", rank=1),
    Column("capture s", rank=3),
    Column("graph MB", rank=10),
    Column("check s", rank=5),
    Column("kernels", "name", rank=2),
    Column("programs", rank=11),
    Column("breaks", rank=4),
    *PARITY_COLUMNS,
)


def plan_table(plan: Plan) -> Table:
    columns = (Column("plan", "name"), Column("value", "text"), Column("why", "text"))
    rows = [(decision.name, decision.value, decision.reason) for decision in plan.decisions]
    return Table(columns, rows, title=f"plan for {plan.model}")


def compile_table(records: Sequence[BucketRecord]) -> Table:
    return Table(COMPILE_COLUMNS, [_compile_row(record) for record in records])


def warm_table(records: Sequence[BucketRecord]) -> Table:
    return Table(WARM_COLUMNS, [_warm_row(record) for record in records])


def _compile_row(record: BucketRecord) -> Sequence[str]:
    assert record.eager_ms is not None and record.compiled_ms is not None
    return (
        record.bucket,
        f"{record.compile_seconds:.2f}",
        record.outcome,
        str(record.programs),
        f"{record.eager_ms:.2f}",
        f"{record.compiled_ms:.2f}",
        _speed_up(record),
        *_parity_cells(record.parity),
        str(record.graph_breaks),
        f"{record.peak_memory_bytes / 2**30:.2f} GiB",
    )


def _warm_row(record: BucketRecord) -> Sequence[str]:
    return (
        record.bucket,
        record.outcome,
        f"{record.compile_seconds:.2f}",
        NO_VALUE if record.cold_seconds is None else f"{record.cold_seconds:.2f}",
        f"{record.capture_seconds:.2f}",
        NO_VALUE if record.graph_memory_bytes is None else f"{record.graph_memory_bytes / 1e6:.0f}",
        f"{record.check_seconds:.2f}",
        record.variant,
        str(record.programs),
        str(record.graph_breaks),
        *_parity_cells(record.parity),
    )


def _parity_cells(parity: Parity) -> Sequence[str]:
    return (
        f"{parity.max_difference:.2g}",
        f"{parity.eager_max_difference:.2g}",
        f"{parity.kl:.1e}",
        f"{parity.eager_kl:.1e}",
    )


def _speed_up(record: BucketRecord) -> str:
    """The factor; "inconclusive" if the difference is within the spread of the measurements."""
    assert record.eager_ms is not None and record.compiled_ms is not None
    spread = (record.eager_spread_ms or 0.0) + (record.compiled_spread_ms or 0.0)
    if spread and abs(record.eager_ms - record.compiled_ms) <= spread:
        return "inconclusive"
    return f"{record.eager_ms / record.compiled_ms:.2f}x"
