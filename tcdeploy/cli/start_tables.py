"""The tables of a start: the plan, and one row per bucket after `compile`, `warm` and `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcdeploy.cli.tables import Cells, Column, Table, optional, tabulate

if TYPE_CHECKING:
    from tcdeploy.planning.plan import Plan

PLAN_CELLS: Cells = (
    (Column("plan", "name"), lambda decision: decision.name),
    (Column("value", "text"), lambda decision: decision.value),
    (Column("why", "text"), lambda decision: decision.reason),
)
PARITY_CELLS: Cells = (
    (Column("dlogit", rank=6), lambda record: f"{record.parity.max_difference:.2g}"),
    (Column("eager dlogit", rank=8), lambda record: f"{record.parity.eager_max_difference:.2g}"),
    (Column("KL", rank=7), lambda record: f"{record.parity.kl:.1e}"),
    (Column("eager KL", rank=9), lambda record: f"{record.parity.eager_kl:.1e}"),
)
COMPILE_CELLS: Cells = (
    (Column("bucket", "name"), lambda record: record.bucket),
    (Column("compile s", rank=3), lambda record: f"{record.compile_seconds:.2f}"),
    (Column("cache", "name"), lambda record: record.outcome),
    (Column("programs", rank=5), lambda record: str(record.programs)),
    (Column("uncompiled ms", rank=1), lambda record: f"{record.eager_ms:.2f}"),
    (Column("compiled ms"), lambda record: f"{record.compiled_ms:.2f}"),
    (Column("speed-up"), lambda record: _speed_up(record)),
    *PARITY_CELLS,
    (Column("breaks", rank=4), lambda record: str(record.graph_breaks)),
    (Column("peak memory", rank=2), lambda record: f"{record.peak_memory_bytes / 2**30:.2f} GiB"),
)
WARM_CELLS: Cells = (
    (Column("bucket", "name"), lambda record: record.bucket),
    (Column("cache", "name"), lambda record: record.outcome),
    (Column("compile s"), lambda record: f"{record.compile_seconds:.2f}"),
    (Column("cold s", rank=1), lambda record: optional(record.cold_seconds, ".2f")),
    (Column("capture s", rank=3), lambda record: f"{record.capture_seconds:.2f}"),
    (
        Column("graph MB", rank=10),
        lambda record: optional(record.graph_memory_bytes and record.graph_memory_bytes / 1e6, ".0f"),
    ),
    (Column("check s", rank=5), lambda record: f"{record.check_seconds:.2f}"),
    (Column("kernels", "name", rank=2), lambda record: record.variant),
    (Column("programs", rank=11), lambda record: str(record.programs)),
    (Column("breaks", rank=4), lambda record: str(record.graph_breaks)),
    *PARITY_CELLS,
)


def plan_table(plan: Plan) -> Table:
    return tabulate(plan.decisions, PLAN_CELLS, title=f"plan for {plan.model}")


def _speed_up(record: Any) -> str:
    """The factor; "inconclusive" if the difference is within the spread of the measurements."""
    spread = (record.eager_spread_ms or 0.0) + (record.compiled_spread_ms or 0.0)
    if spread and abs(record.eager_ms - record.compiled_ms) <= spread:
        return "inconclusive"
    return f"{record.eager_ms / record.compiled_ms:.2f}x"
