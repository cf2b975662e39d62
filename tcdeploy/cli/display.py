"""Terminal output: the plan, progress per bucket, and reports. The only module that imports rich.

Progress goes to stderr, and reports to stdout, where --json prints a single JSON document and nothing else. rich is
imported when bars or a table are drawn: that takes 0.1 s, and a server without a terminal draws neither.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tcdeploy.cli.start_tables import COMPILE_CELLS, WARM_CELLS, plan_table
from tcdeploy.cli.tables import GAP, Table, as_blocks, fit, tabulate, wrap
from tcdeploy.errors import OutputError, SpaceError
from tcdeploy.host.stages import describe_imports
from tcdeploy.planning.memory import gib

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tcdeploy.planning.bucket_record import BucketRecord
    from tcdeploy.planning.dry_run import PlanFinding
    from tcdeploy.planning.plan import Plan
    from tcdeploy.start.deployment import Deployment

JSON_SCHEMA = 3  # raise when a key of any report is renamed or removed
MAX_LAYER_KINDS = 4  # a model has at most this many kinds of layers; the layers of a kind share a program
COMMAND_FLAGS = ("--require-hit", "--allow-unsigned", "--dry-run", "--json")  # of warm and compile
COMMAND_OPTIONS = ("--cache-from", "--cache-to", "--sign", "--budget", "--trusted-keys", "--from")  # take a value


@contextmanager
def show_progress() -> Iterator[PlainProgress]:
    """Progress display for stderr: bars on a terminal, lines otherwise. The first stage is `import`, of torch."""
    progress = PlainProgress()
    if not sys.stderr.isatty():
        progress.stage("import")
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[outcome]}"),
        console=Console(stderr=True),
    )
    with bars:
        progress = BarProgress(bars)
        progress.stage("import")
        yield progress


def _warn_about_fallbacks(plan: Plan) -> None:
    for decision in plan.decisions:
        if decision.is_fallback:
            print(f"warning: {decision.name} is {decision.value}: {decision.reason}", file=sys.stderr)


def _outcome(record: BucketRecord) -> str:
    captured = ", captured" if record.captured else ""
    programs = "1 program" if record.programs == 1 else f"{record.programs} programs"
    kernels = f", {record.kernels_compiled} kernels compiled" if record.kernels_compiled and record.cache_hits else ""
    return f"{record.outcome}, {programs}{kernels}{captured}, KL {record.parity.kl:.1e}"


class PlainProgress:
    """Prints one line to stderr per stage and per finished bucket."""

    def finish(self) -> None:
        """Nothing to stop."""

    def stage(self, name: str) -> None:
        print(f"{name} ...", file=sys.stderr, flush=True)

    def planned(self, plan: Plan) -> None:
        _warn_about_fallbacks(plan)

    def bucket_started(self, bucket: str, number: int, total: int) -> None:
        self._label = f"[{number}/{total}] {bucket}"

    def bucket_finished(self, record: BucketRecord) -> None:
        print(f"{self._label}: {record.seconds:.1f} s, {_outcome(record)}", file=sys.stderr, flush=True)


class BarProgress(PlainProgress):
    """One bar per bucket: pulsing during warm-up, then full, with the outcome. After `finish`, one line per event."""

    def __init__(self, bars: Progress) -> None:
        self._bars: Progress | None = bars
        self._tasks: dict[str, TaskID] = {}  # the bars of the current stage and of the current bucket

    def finish(self) -> None:
        """Stop redrawing the bars, which would overwrite what a server prints while it runs."""
        if self._bars is not None:
            self._complete("stage")
            self._bars.stop()
            self._bars = None

    def stage(self, name: str) -> None:
        if self._bars is None:
            super().stage(name)
            return
        self._complete("stage")
        self._complete("bucket", outcome="is checked again")
        if name != "compile":  # shown as one bar per bucket
            self._tasks["stage"] = self._bars.add_task(f"{name:<14}", total=None, outcome="")

    def bucket_started(self, bucket: str, number: int, total: int) -> None:
        super().bucket_started(bucket, number, total)
        if self._bars is not None:
            self._tasks["bucket"] = self._bars.add_task(f"{bucket:<14}", total=None, outcome=f"{number} of {total}")

    def bucket_finished(self, record: BucketRecord) -> None:
        if self._bars is None:
            super().bucket_finished(record)
        self._complete("bucket", outcome=_outcome(record))

    def _complete(self, task: str, outcome: str = "") -> None:
        if self._bars is not None and task in self._tasks:
            self._bars.update(self._tasks.pop(task), total=1, completed=1, outcome=outcome)


def show_plan(plan: Plan, findings: Sequence[PlanFinding], as_json: bool) -> None:
    """Print the plan of a dry run, and what this machine lacks for it."""
    if as_json:
        print(json_document("plan", plan=plan, findings=findings))
        return
    show_table(plan_table(plan))
    for finding in findings:
        show_sentence(f"finding: {finding.message}")
        show_sentence(f"hint: {finding.hint}")
    _warn_about_fallbacks(plan)


def show_compile_report(deployment: Deployment, as_json: bool) -> None:
    """Print the plan, one row per bucket with eager and compiled times, totals, and the next command."""
    if as_json:
        print_report("compile", deployment)
        return
    show_table(plan_table(deployment.plan))
    show_table(tabulate(deployment.records, COMPILE_CELLS))
    contexts = sorted({record.timed_context for record in deployment.records if record.timed_context}, reverse=True)
    lengths = " and ".join(str(context) for context in contexts)
    show_sentence(
        f"ms: median of whole steps, decode at a context of {lengths} tokens; uncompiled: the same steps with the "
        "plan's attention, without torch.compile and CUDA graphs, while `bench decode --baseline eager` times "
        "transformers' own attention"
    )
    show_sentence(_explain_parity(deployment.records))
    if skipped := sum(record.cudagraph_skips for record in deployment.records):
        show_sentence(f"Inductor skipped CUDA graphs for {skipped} regions that mutate the KV cache or use CPU tensors")
    _print_totals(deployment)
    print(next_after_compile(deployment.records))


def next_after_compile(records: Sequence[BucketRecord]) -> str:
    """A start from the cache, unless this was one."""
    command = "serve" if all(record.outcome == "hit" for record in records) else "warm"
    return f"next: tcdeploy {command} {_carried_arguments()}"


def show_warm_report(deployment: Deployment, as_json: bool) -> None:
    if as_json:
        print_report("warm", deployment)
        return
    show_table(tabulate(deployment.records, WARM_CELLS))
    show_sentence(_explain_parity(deployment.records))
    _print_totals(deployment)
    print(f'next: tcdeploy generate {_carried_arguments()} "This module provides"')


def show_server_is_ready(deployment: Deployment, address: str, example: str, as_json: bool) -> None:
    """Print the warm-up table, the address and an example request. After an eager start there is no table yet.

    A server that cannot write to stdout prints a warning to stderr and keeps serving.
    """
    try:
        if as_json:
            print_report("serve", deployment, address=address)
            sys.stdout.flush()
            return
        if deployment.swaps is None:
            show_table(tabulate(deployment.records, WARM_CELLS))
            _print_totals(deployment)
        else:
            _print_stages(deployment)
            show_sentence("answers with uncompiled steps; /ready?level=warm returns 200 once all buckets run programs")
        show_sentence(f"sampling defaults of the model: {deployment.planned.generation_defaults.describe()}")
        print(f"ready: {address}\n  {example}", flush=True)
    except (OutputError, SpaceError) as error:
        print(f"warning: {error.message}; ready: {address}", file=sys.stderr)


def show_bench(tables: list[Table], remarks: list[str], document: str, as_json: bool) -> bool:
    """Print tables and remarks, or the JSON document. Returns whether the document was printed.

    On a terminal stdout has one of them. Otherwise it has the document, and stderr has the tables.
    """
    is_terminal = sys.stdout.isatty()
    if not (as_json and is_terminal):
        out = sys.stdout if is_terminal else sys.stderr
        for table in tables:
            show_table(table, out)
        for remark in remarks:
            show_sentence(remark, out)
    if as_json or not is_terminal:
        print(document)
    return as_json or not is_terminal


def _explain_parity(records: Sequence[BucketRecord]) -> str:
    dtypes = sorted({record.parity.reference_dtype for record in records})
    return (
        f"dlogit: largest difference of the logits from a {' or '.join(dtypes)} computation; KL: divergence from it, "
        "in nats; eager: the same for transformers' own attention"
    )


def _print_totals(deployment: Deployment) -> None:
    records, plan, architecture = deployment.records, deployment.plan, deployment.planned.architecture
    num_layers = len(architecture.attention_layers)
    hits = sum(record.outcome == "hit" for record in records)
    compile_seconds = sum(record.compile_seconds for record in records)
    programs = f"{sum(record.programs for record in records)} programs for {num_layers} layers"
    show_sentence(f"{hits} of {len(records)} buckets were cache hits; {programs}; compile {compile_seconds:.1f} s")
    if num_layers > MAX_LAYER_KINDS and all(record.programs >= num_layers for record in records):
        show_sentence(
            "each layer has its own program, because a Python constant, such as the attention scale, differs between "
            "layers"
        )
    for record in records:
        if record.trials:
            show_sentence(f"{record.bucket} variants: {_format_trials(record)}")
    if deployment.workspace_bytes is not None:
        show_sentence(
            f"device memory: weights {gib(plan.weight_bytes)}, KV cache {gib(plan.kv_bytes)}, everything else "
            f"{gib(deployment.workspace_bytes)} ({gib(plan.workspace_bytes)} predicted)"
        )
    _print_stages(deployment)


def _print_stages(deployment: Deployment) -> None:
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in deployment.stage_seconds.items())
    copied = " (read-only: used a private copy)" if deployment.cache_dir != deployment.plan.cache_dir else ""
    show_sentence(f"stages: {stages}; cache folder {deployment.plan.cache_dir}{copied}")
    if (total := deployment.weights_read) is not None:
        show_sentence(
            f"weights: {total.num_bytes / 1e9:.2f} GB read in {total.seconds:.2f} s ({total.gb_per_second:.1f} GB/s), "
            "in parallel with these stages"
        )
    show_sentence(f"imports, in all stages: {describe_imports(deployment.import_seconds)}")


def _format_trials(record: BucketRecord) -> str:
    """Every variant with its step time, fastest first, then those that failed."""
    timed = sorted((trial.step_ms, trial.variant) for trial in record.trials if trial.step_ms is not None)
    failed = [f"{trial.variant} failed: {trial.error}" for trial in record.trials if trial.step_ms is None]
    return ", ".join([f"{variant} {step_ms:.3f} ms" for step_ms, variant in timed] + failed)


def _carried_arguments() -> str:
    """The model and recipe arguments of this command line, for a next command on the same deployment.

    Options of this command alone are left out: the next command does not accept them, and a URL may hold secrets.
    """
    carried, is_value = [], False
    for word in sys.argv[2:]:
        name = word.partition("=")[0]
        if not is_value and name not in COMMAND_FLAGS and name not in COMMAND_OPTIONS:
            carried.append(word)
        is_value = not is_value and word in COMMAND_OPTIONS
    return shlex.join(carried)


def show_table(table: Table, out: TextIO | None = None) -> None:
    """Print to `out`, by default stdout. On a terminal the table fits its width (tables.py)."""
    out = out or sys.stdout
    draw_table(table, _terminal_width(out), out)


def show_sentence(text: str, out: TextIO | None = None, indent: str = "") -> None:
    """Print to `out`, by default stdout. On a terminal a long sentence wraps at spaces."""
    out = out or sys.stdout
    width = _terminal_width(out)
    for line in [text] if width is None else wrap(text, width - len(indent)):
        print(f"{indent}{line}", file=out)


def _terminal_width(out: TextIO) -> int | None:
    """In columns; None if `out` is not a terminal."""
    if not out.isatty():
        return None
    from rich.console import Console

    return Console(file=out).width


def draw_table(table: Table, width: int | None, out: TextIO) -> None:
    """Print for a terminal of `width` columns; with all columns if it is None."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if table.title:
        print(table.title, file=out)
    layout = fit(table, width, cell_len)
    if layout is None:
        assert width is not None
        print("\n".join(as_blocks(table, width)), file=out)
        return
    drawn = RichTable(box=None, header_style="bold", padding=(0, GAP, 0, 0), pad_edge=False)
    for index, column_width in layout.widths.items():
        header, kind, _ = table.columns[index]
        drawn.add_column(Text(header), justify="right" if kind == "number" else "left", width=column_width)
    for row in table.rows:
        drawn.add_row(*(Text(table.columns[index].cut(row[index], size)) for index, size in layout.widths.items()))
    Console(file=out, width=sum(layout.widths.values()) + GAP * len(layout.widths)).print(drawn)
    if width is not None and layout.omitted:
        print("\n".join(wrap(f"omitted at a width of {width}: {', '.join(layout.omitted)}", width)), file=out)


def print_report(command: str, deployment: Deployment, **more: Any) -> None:
    """Print the JSON document of a start, with `more` of the command."""
    start = {
        "plan": deployment.plan,
        "stage_seconds": deployment.stage_seconds,
        "import_seconds": deployment.import_seconds,
        "weights_read": deployment.weights_read,
        "workspace_bytes": deployment.workspace_bytes,
        "buckets": deployment.records,
    }
    print(json_document(command, **start, **more))


def report(command: str, as_json: bool, shown: str | Table, **content: Any) -> None:
    """Print the text as it is, or the table; or the JSON document."""
    if isinstance(shown, Table) and not as_json:
        show_table(shown)
    else:
        print(json_document(command, **content) if as_json else shown)


def json_document(command: str, **content: Any) -> str:
    """`content` may contain paths and dataclasses."""
    document = {"schema": JSON_SCHEMA, "command": command, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **content}
    return json.dumps(document, indent=1, default=lambda item: str(item) if isinstance(item, Path) else asdict(item))
