"""The report of `tcdeploy explain` on stdout: findings with their cures, regions, kernels, and when compiling pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy.cli.display import json_document, show_sentence, show_table
from tcdeploy.cli.tables import NO_VALUE, Cells, Column, Table, optional, tabulate

if TYPE_CHECKING:
    from tcdeploy.explain.break_even import BucketPayoff, Payoff, RequestPayoff
    from tcdeploy.explain.explain import Explanation
    from tcdeploy.explain.findings import EagerCost, Finding, RegionTrace
    from tcdeploy.explain.kernels import BucketKernels

INDENT = "  "
MAX_KERNELS = 20  # rows of a table; the JSON document has all
REGION_CELLS: Cells = (  # of a (region, phase)
    (Column("region", "name"), lambda item: item[0].kind),
    (Column("module", "name", rank=2), lambda item: item[0].type),
    (Column("modules"), lambda item: str(item[0].modules)),
    (Column("phase", "name"), lambda item: item[1]),
    (Column("graphs"), lambda item: str(item[0].graphs[item[1]])),
    (Column("guards", rank=1), lambda item: str(item[0].guards[item[1]])),
    (Column("recompilations"), lambda item: str(item[0].recompilations[item[1]])),
)
PAYOFF_CELLS: Cells = (
    (Column("bucket", "name"), lambda bucket: bucket.bucket),
    (Column("uncompiled ms", rank=1), lambda bucket: f"{bucket.uncompiled_ms:.2f} ± {bucket.uncompiled_spread_ms:.2f}"),
    (Column("compiled ms", rank=2), lambda bucket: f"{bucket.compiled_ms:.2f} ± {bucket.compiled_spread_ms:.2f}"),
    (Column("saved ms"), lambda bucket: f"{bucket.uncompiled_ms - bucket.compiled_ms:.2f}"),
    (Column("cold s", rank=3), lambda bucket: optional(bucket.cold_seconds, ".2f")),
    (Column("warm s", rank=4), lambda bucket: optional(bucket.warm_seconds, ".2f")),
    (Column("break-even cold"), lambda bucket: _tokens(bucket, bucket.break_even_tokens_cold)),
    (Column("break-even warm"), lambda bucket: _tokens(bucket, bucket.break_even_tokens_warm)),
)
KERNEL_COLUMNS = (Column("kernel", "long name"), Column("per step", rank=1), Column("us"), Column("share"))


@dataclass
class WrittenTrace:
    """`omitted_records`: their number, because the file had reached its maximum size. Set after the last record."""

    path: Path
    omitted_records: int = 0


def show_explanation(explanation: Explanation, trace: WrittenTrace | None, as_json: bool) -> None:
    if as_json:
        print(json_document("explain", **vars(explanation), trace=trace))
        return
    show_sentence(headline(explanation))
    for number, finding in enumerate(explanation.findings, 1):
        print()
        _show_finding(number, finding, explanation)
    if explanation.regions:
        print()
        show_table(regions_table(explanation.regions))
        show_sentence(
            "graphs and guards: of one call of a region; one graph is best, and guards are checked before each call. "
            "recompilations: in calls with other prompt lengths and of the other modules; they are counted only if "
            "there is no graph break"
        )
    for kernels in explanation.kernels:
        print()
        show_table(kernels_table(kernels))
    print()
    _show_payoff(explanation)
    if trace is not None:
        _show_trace(trace)


def headline(explanation: Explanation) -> str:
    """The number of findings, and whether the model can be compiled."""
    findings = explanation.findings
    if not findings:
        modules = sum(region.modules for region in explanation.regions)
        regions = f"{_count(modules, 'region')} of {_count(len(explanation.regions), 'kind')}"
        return f"no graph breaks, no recompilations: {regions}, one graph each"
    blocking = sum(finding.is_blocking for finding in findings)
    text = f"{_count(len(findings), 'finding')} in {explanation.model}"
    if blocking:
        return f"{text}; {blocking} of them prevent{'s' if blocking == 1 else ''} the model from being compiled"
    return f"{text}; the model can be compiled"


def _show_finding(number: int, finding: Finding, explanation: Explanation) -> None:
    location = finding.location
    show_sentence(f"{number}. {finding.kind}: {finding.title} ({finding.cause})")
    if location.file:
        print(f"{INDENT}{location.file}:{location.line}\n{INDENT}    {location.code}")
    where = [f"module {finding.module}"] if finding.module else []
    where += [f"region {finding.region}"] if finding.region else []
    where += [" and ".join(finding.phases)] if any(finding.phases) else []
    fields = [
        ("in", ", ".join(where)),
        ("meaning", finding.meaning),
        ("effect", describe_effect(finding, explanation)),
        *(("cost", describe_cost(cost)) for cost in finding.costs),
        ("cure", finding.cure),
        ("torch", finding.torch_reason),
    ]
    for name, text in fields:
        if text:
            show_sentence(f"{name}: {text}", indent=INDENT)


def describe_effect(finding: Finding, explanation: Explanation) -> str:
    """What stays uncompiled because of a finding, or what the finding costs."""
    region = next((region for region in explanation.regions if region.kind == finding.region), None)
    if region is None:
        if explanation.regions:
            return "the model cannot be compiled, so all of it stays uncompiled"
        return "the model cannot be started, and code after this line was not examined"
    regions = f"{'the region' if region.modules == 1 else f'all {region.modules} regions of kind'} {region.kind}"
    if finding.is_blocking:
        return f"a start fails, because each region must be one graph: {regions} would stay uncompiled"
    if finding.kind == "input mutation":
        return f"it does not prevent {regions} from being compiled, but adds a copy to each call"
    return f"torch.compile needs {_count(finding.count, 'more program')} for {regions} in the calls that were traced"


def describe_cost(cost: EagerCost) -> str:
    text = f"{cost.bucket}: {cost.region_ms:.2f} of {cost.step_ms:.2f} ms stay uncompiled ({cost.region_share:.0%})"
    if cost.module_ms is None:
        return text
    return f"{text}; the modules with this line take {cost.module_ms:.2f} ms ({cost.module_share:.0%})"


def regions_table(regions: Sequence[RegionTrace]) -> Table:
    """A row for each kind and phase."""
    return tabulate([(region, phase) for region in regions for phase in region.graphs], REGION_CELLS)


def kernels_table(kernels: BucketKernels) -> Table:
    """The largest rows, one for the rest, and their total."""
    shown, rest = kernels.kernels[:MAX_KERNELS], kernels.kernels[MAX_KERNELS:]
    rows = [(row.name, f"{row.count:.4g}", f"{row.us:.1f}", f"{row.share:.1%}") for row in shown]
    if rest:
        us, share = sum(row.us for row in rest), sum(row.share for row in rest)
        rows.append((f"{len(rest)} others", f"{sum(row.count for row in rest):.4g}", f"{us:.1f}", f"{share:.1%}"))
    rows.append(("total", "", f"{kernels.step_us:.1f}", f"{sum(row.share for row in kernels.kernels):.1%}"))
    return Table(KERNEL_COLUMNS, rows, title=f"kernels of {kernels.bucket}, in a step")


def payoff_table(payoff: Payoff) -> Table:
    return tabulate(payoff.buckets, PAYOFF_CELLS, title="tokens after which compiling pays (break-even)")


def _tokens(bucket: BucketPayoff, tokens: int | None) -> str:
    if not bucket.is_conclusive:
        return "inconclusive"
    if bucket.saved_ms <= 0:
        return "never"
    return NO_VALUE if tokens is None else f"{tokens:,}"


def _show_payoff(explanation: Explanation) -> None:
    payoff = explanation.payoff
    if payoff is None:
        show_sentence(f"compile times and step times were not measured: {explanation.not_measured}")
        return
    show_table(payoff_table(payoff))
    show_sentence(
        "ms: of a full step, ± half of the range of three measurements; uncompiled: the same step without "
        "torch.compile and CUDA graphs; cold: seconds to compile with an empty cache folder; warm: seconds to load "
        "from it; both with the capture of CUDA graphs"
    )
    for sentence in verdict(payoff.request):
        show_sentence(sentence)


def verdict(request: RequestPayoff) -> list[str]:
    """Whether to compile, in sentences."""
    what = f"one request at a time, of {request.prompt_tokens} prompt and {request.output_tokens} output tokens"
    times = (
        f"{what}: {request.uncompiled_seconds:.2f} s uncompiled ({request.uncompiled_token_ms:.2f} ms per output "
        f"token), {request.compiled_seconds:.2f} s compiled ({request.compiled_token_ms:.2f} ms)"
    )
    if not request.is_conclusive:
        return [
            times,
            f"inconclusive: the difference of {abs(request.uncompiled_seconds - request.compiled_seconds):.2f} s is "
            f"within the spread of repeated measurements (± {request.uncompiled_spread_seconds:.2f} s uncompiled, "
            f"± {request.compiled_spread_seconds:.2f} s compiled); run the command again on an idle machine",
        ]
    if not request.pays:
        return [
            times,
            "do not compile this model on this machine: compiling never pays for such requests, because compiled steps "
            "are not faster; run it with transformers' generate",
        ]
    sentences = [times]
    for start, seconds, requests in (
        ("cold", request.start_seconds_cold, request.break_even_requests_cold),
        ("warm", request.start_seconds_warm, request.break_even_requests_warm),
    ):
        if seconds is not None and requests is not None:
            sentences.append(
                f"{start} start: compiling takes {seconds:.1f} s for all buckets and pays after "
                f"{_count(requests, 'such request')} ({requests * request.output_tokens:,} output tokens)"
            )
    if request.start_seconds_warm is None:
        sentences.append("run the command again to measure a warm start")
    if request.start_seconds_cold is not None:
        once = request.compiled_seconds + request.start_seconds_cold
        sentences.append(
            f"a single such request: {request.uncompiled_seconds:.2f} s uncompiled, {once:.2f} s with a cold start; do "
            "not compile for one-off prompts; `serve --start eager` answers with uncompiled steps while it compiles"
        )
    return sentences


def _show_trace(trace: WrittenTrace) -> None:
    show_sentence(f"torch's trace: {trace.path}")
    if trace.omitted_records:
        show_sentence(
            f"its last {trace.omitted_records} records were omitted, because the file had reached its maximum size"
        )
    report = trace.path.with_suffix("")
    show_sentence(
        f"to read it: pip install tlparse; tlparse {trace.path} -o {report} --no-browser; open {report}/index.html"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
