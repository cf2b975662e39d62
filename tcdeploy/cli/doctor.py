"""`tcdeploy doctor`: checks whether this machine can deploy models."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.cli.cache_target import TrustCacheDir
from tcdeploy.cli.report_options import Json
from tcdeploy.errors import Interrupted, ThresholdError
from tcdeploy.server.settings import SERVER_VARIABLES, ServerSettings

if TYPE_CHECKING:
    from tcdeploy.doctor.result import Result


def doctor(
    cache_dir: Annotated[
        str | None, typer.Option(help="Cache folder to check; default: that of a start", envvar="TCDEPLOY_CACHE_DIR")
    ] = None,
    trust_cache_dir: TrustCacheDir = False,
    port: Annotated[int, typer.Option(help="Port that `serve` will listen on")] = ServerSettings.port,
    offline: Annotated[bool, typer.Option("--offline", help="Do not contact the Hugging Face Hub")] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Also print text for a bug report, without secrets and names of users and hosts"),
    ] = False,
    describe_gpu: Annotated[
        bool,
        typer.Option(
            "--describe-gpu",
            help="Only print a description of the first GPU, for `warm --dry-run --target-gpu` on another machine",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine, and print a cure for each finding. Exits with code 6 if there is a finding.

    The first line names the worst finding. Notes need no action. Nothing is changed, and no model is started. Packages
    are imported in a process of its own, so the checks work if torch is missing or broken.
    """
    if describe_gpu:
        from tcdeploy.planning.environment import detect_environment
        from tcdeploy.planning.gpu_description import describe_first_gpu

        print(describe_first_gpu(detect_environment()).to_json())
        return
    from tcdeploy.doctor.examination import examine
    from tcdeploy.doctor.report import bug_report
    from tcdeploy.doctor.result import Request

    request = Request(
        cache_dir=cache_dir, is_trusted=trust_cache_dir, port=port, is_offline=offline,
        other_variables=SERVER_VARIABLES,
    )  # fmt: skip
    if sys.stderr.isatty():
        print("checking this machine, which takes about 10 s ...", file=sys.stderr, flush=True)
    try:
        results = examine(request)
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    _show_results(results, bug_report(request, results) if report or json else "", json)
    findings = sum(result.state == "finding" for result in results)
    if findings:
        raise ThresholdError(
            f"{findings} finding{'s' if findings > 1 else ''} on this machine",
            "apply the cures above; for a bug report: tcdeploy doctor --report",
        )


def _show_results(results: Sequence[Result], report: str, json: bool) -> None:
    """`results`: the worst first. `report`: the text for a bug report; "" if it is not printed."""
    from tcdeploy.cli.display import json_document, show_sentence, show_table
    from tcdeploy.cli.tables import Column, Table

    counts = Counter(result.state for result in results)
    if json:
        print(json_document("doctor", findings=counts["finding"], results=results, report=report))
        return
    worst = results[0]
    if worst.state == "finding":
        show_sentence(f"{worst.check}: {worst.summary}")
    else:
        print(f"no findings: {counts['ok']} checks ok, {counts['note']} notes, which need no action")
    print()
    columns = (Column("", "name"), Column("check", "name"), Column("result", "text"))
    show_table(Table(columns, [row for result in results for row in _rows(result)]))
    if report:
        print(f"\n{report}")


def _rows(result: Result) -> list[tuple[str, str, str]]:
    """A row, and one with the cure below it."""
    label = "cure" if result.state == "finding" else "hint"
    cures = [("", "", f"{label}: {result.cure}")] if result.cure else []
    return [(result.state, result.check, result.summary), *cures]
