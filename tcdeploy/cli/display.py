"""Terminal output: the plan, a moving line of progress, and reports. The only module that imports rich.

Progress goes to stderr (host/plain_progress.py), and reports to stdout, where --json prints a single JSON document and
nothing else. rich is imported when a moving line or a table is drawn: that takes 0.1 s, and a server without a terminal
draws neither.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from tcdeploy.cli.start_tables import COMPILE_CELLS, WARM_CELLS, plan_table
from tcdeploy.cli.tables import GAP, Table, as_blocks, fit, tabulate, wrap
from tcdeploy.errors import OutputError, SpaceError
from tcdeploy.host.plain_progress import PlainProgress, describe_position, fallback_warnings
from tcdeploy.host.progress import Position
from tcdeploy.host.stages import describe_imports
from tcdeploy.planning.memory import gib

if TYPE_CHECKING:
    from rich.progress import Progress

    from tcdeploy.bench.quality import Quality
    from tcdeploy.planning.bucket_record import BucketRecord
    from tcdeploy.planning.dry_run import PlanFinding
    from tcdeploy.planning.plan import Plan
    from tcdeploy.start.blind.process import BlindResult
    from tcdeploy.start.deployment import Deployment, StartReport
    from tcdeploy.start.package_build import PackageResult

BAR_WIDTH = 16
JSON_SCHEMA = 3  # raise when a key of any report is renamed or removed
MAX_LAYER_KINDS = 4  # a model has at most this many kinds of layers; the layers of a kind share a program
COMMAND_FLAGS = ("--require-hit", "--allow-unsigned", "--dry-run", "--json")  # of warm and compile
COMMAND_OPTIONS = (  # take a value
    "--cache-from", "--cache-to", "--sign", "--budget", "--trusted-keys", "--from", "--text", "--against", "--tokens",
    "--window", "--target-gpu", "--winners",
)  # fmt: skip


@contextmanager
def show_progress() -> Iterator[PlainProgress]:
    """Progress on stderr: lines, and on a terminal a moving line below them. The first stage is `import`, of torch."""
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        with PlainProgress() as progress:
            yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        TimeElapsedColumn(),
        TextColumn("{task.fields[position]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar, MovingProgress(bar) as progress:
        yield progress


class MovingProgress(PlainProgress):
    """Prints the lines of PlainProgress above one line that moves. After `finish`, only lines.

    While the line moves, rich redirects stdout and stderr, so what others print appears above it too.
    """

    def __init__(self, bar: Progress) -> None:
        self._bar: Progress | None = bar
        self._task = bar.add_task("", total=None, position="")
        super().__init__()

    def __enter__(self) -> Self:
        return self  # without the thread of PlainProgress

    def finish(self, is_complete: bool = True) -> None:
        """Also stop redrawing, which would overwrite what a server prints while it runs."""
        super().finish(is_complete)
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def move(self, position: Position) -> None:
        is_new = position.stage != self.position.stage
        super().move(position)
        bar = self._bar  # another thread may call `finish`
        if bar is None:
            return
        if is_new:
            bar.reset(self._task)  # the elapsed time
        total, completed = (position.total, position.number - 1) if position.total else (None, 0)
        bar.update(
            self._task, description=position.stage, total=total, completed=completed,
            position=describe_position(position),
        )  # fmt: skip

    def _print(self, line: str) -> None:
        bar = self._bar
        if bar is None:
            super()._print(line)
        else:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_plan(plan: Plan, findings: Sequence[PlanFinding], as_json: bool) -> None:
    """Print the plan of a dry run, and what this machine lacks for it."""
    if as_json:
        print(json_document("plan", plan=plan, findings=findings))
        return
    show_table(plan_table(plan))
    for finding in findings:
        show_sentence(f"finding: {finding.message}")
        show_sentence(f"hint: {finding.hint}")
    for warning in fallback_warnings(plan):
        print(warning, file=sys.stderr)


def show_compile_report(deployment: Deployment, quality: Quality | None, as_json: bool) -> None:
    """Print the plan, one row per bucket with eager and compiled times, totals, and the next command.

    `quality`: on the text of --text, in a few sentences.
    """
    if as_json:
        print_report("compile", deployment, quality=quality)
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
    for note in quality.notes if quality is not None else ():
        show_sentence(note)
    _print_totals(deployment)
    print(next_after_compile(deployment.records))


def next_after_compile(records: Sequence[BucketRecord]) -> str:
    """A start from the cache, unless this was one."""
    command = "serve" if all(record.outcome == "hit" for record in records) else "warm"
    return f"next: tcdeploy {command} {_carried_arguments()}"


def show_warm_report(deployment: StartReport, packages: PackageResult | None, as_json: bool) -> None:
    """`packages`: those that were built or found after the start; None if neither was tried."""
    if as_json:
        print_report("warm", deployment, cache_bytes=deployment.cache_bytes, packages=packages)
        return
    show_table(tabulate(deployment.records, WARM_CELLS))
    show_sentence(_explain_parity(deployment.records))
    _print_totals(deployment)
    if packages is not None and not packages.failure:
        seconds = f" after {packages.seconds:.1f} s" if packages.seconds else ""
        show_sentence(
            f"packages: {packages.bytes / 1e6:.1f} MB{seconds}; later starts load them without tracing the model"
        )
    print(f'next: tcdeploy generate {_carried_arguments()} "This module provides"')


def show_blind_build(result: BlindResult, target: str, as_json: bool) -> None:
    """What a build for a GPU that this machine does not have has left in the cache folder."""
    if as_json:
        print(json_document("warm", target_gpu=target, **vars(result)))
        return
    show_sentence(
        f"plan {result.plan_key} for {target} in {result.cache_dir}: compiled in {result.seconds:.1f} s with up to "
        f"{result.peak_bytes / 2**30:.1f} GiB of host memory, and not run; the first start on the GPU checks it"
    )
    for choice in result.choices:
        show_sentence(f"not timed: {choice}")


def show_server_is_ready(deployment: Deployment, address: str, example: str, seconds: float, as_json: bool) -> None:
    """Print what the server found, an example request, and last a line with the address and the seconds of the start.

    The seconds of stages and buckets are in the lines of the progress. A server that cannot write to stdout prints a
    warning to stderr and keeps serving.
    """
    ready = f"ready: {address} after {seconds:.1f} s"
    try:
        if as_json:
            print_report("serve", deployment, address=address)
            sys.stdout.flush()
            print(ready, file=sys.stderr)
            return
        if deployment.swaps is None:
            _print_totals(deployment)
        else:
            _print_folder(deployment)
            show_sentence("answers with uncompiled steps; /ready?level=warm returns 200 once all buckets run programs")
        show_sentence(f"sampling defaults of the model: {deployment.planned.generation_defaults.describe()}")
        print(f"example request:\n  {example}\n{ready}", flush=True)
    except (OutputError, SpaceError) as error:
        print(f"warning: {error.message}; {ready}", file=sys.stderr)


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


def _print_totals(deployment: StartReport) -> None:
    records, plan, architecture = deployment.records, deployment.plan, deployment.planned.architecture
    num_layers = architecture.num_layers
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
        slots = f", state slots {gib(plan.slot_bytes)}" if plan.slots else ""
        show_sentence(
            f"device memory: weights {gib(plan.weight_bytes)}, KV cache {gib(plan.kv_bytes)}{slots}, everything else "
            f"{gib(deployment.workspace_bytes)} ({gib(plan.workspace_bytes)} predicted)"
        )
    _print_folder(deployment)


def _print_folder(deployment: StartReport) -> None:
    """The cache folder, and what was read and imported in all stages."""
    copied = " (read-only: used a private copy)" if deployment.cache_dir != deployment.plan.cache_dir else ""
    show_sentence(f"cache folder {deployment.plan.cache_dir}{copied}")
    if (total := deployment.weights_read) is not None:
        show_sentence(
            f"weights: {total.num_bytes / 1e9:.2f} GB read in {total.seconds:.2f} s ({total.gb_per_second:.1f} GB/s), "
            "in parallel with the stages of the start"
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


def print_report(command: str, deployment: StartReport, **more: Any) -> None:
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
