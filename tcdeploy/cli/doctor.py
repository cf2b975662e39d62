"""`tcdeploy doctor`: checks whether this machine can deploy models."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tcdeploy.cli.cache_target import TrustCacheDir
from tcdeploy.cli.report_options import Json
from tcdeploy.errors import Interrupted, ThresholdError
from tcdeploy.server.settings import SERVER_VARIABLES, ServerSettings


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
    json: Json = False,
) -> None:
    """Check this machine, and print a cure for each finding. Exits with code 6 if there is a finding.

    The first line names the worst finding. Notes need no action. Nothing is changed, and no model is started. Packages
    are imported in a process of its own, so the checks work if torch is missing or broken.
    """
    from tcdeploy.cli import doctor_display
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
    doctor_display.show_results(results, bug_report(request, results) if report or json else "", json)
    findings = sum(result.state == "finding" for result in results)
    if findings:
        raise ThresholdError(
            f"{findings} finding{'s' if findings > 1 else ''} on this machine",
            "apply the cures above; for a bug report: tcdeploy doctor --report",
        )
