"""The report of `tcdeploy explain` on stdout: findings with their cures, regions, kernels, and when compiling pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tcdeploy.cli.display import json_document, show_sentence, show_table
from tcdeploy.cli.tables import Column, Table

if TYPE_CHECKING:
    from tcdeploy.explain.break_even import BucketPayoff, Payoff, RequestPayoff
    from tcdeploy.explain.explain import Explanation
    from tcdeploy.explain.findings import EagerCost, Finding, RegionTrace
    from tcdeploy.explain.kernels import BucketKernels
    from tcdeploy.explain.trace_folder import WrittenTrace

NO_VALUE = "-"
INDENT = "  "
MAX_KERNELS = 20  # rows of a table; the JSON document has all
REGION_COLUMNS = (
    Column("region", "name"),
    Column("module", "name", rank=2),
    Column("modules"),
    Column("phase", "name"),
    Column("graphs"),
    Column("guards", rank=1),
    Column("recompilations"),
)
PAYOFF_COLUMNS = (
    Column("bucket", "name"),
    Column("uncompiled ms", rank=1),
    Column("compiled ms", rank=2),
    Column("saved ms"),
    Column("cold s", rank=3),
    Column("warm s", rank=4),
    Column("break-even cold"),
    Column("break-even warm"),
)
KERNEL_COLUMNS = (Column("kernel", "long name"), Column("per step", rank=1), Column("us"), Column("share"))


def show_explanation(explanation: Explanation, trace: WrittenTrace | None, as_json: bool) -> None:
    if as_json:
        print(explanation_document(explanation, trace))
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
    return Table(REGION_COLUMNS, [_region_row(region, phase) for region in regions for phase in region.graphs])


def _region_row(region: RegionTrace, phase: str) -> tuple[str, ...]:
    counts = (region.graphs, region.guards, region.recompilations)
    return (region.kind, region.type, str(region.modules), phase, *(str(count[phase]) for count in counts))


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
    return Table(
        PAYOFF_COLUMNS,
        [_payoff_row(bucket) for bucket in payoff.buckets],
        title="tokens after which compiling pays (break-even)",
    )


def _payoff_row(bucket: BucketPayoff) -> tuple[str, ...]:
    return (
        bucket.bucket,
        f"{bucket.uncompiled_ms:.2f} ± {bucket.uncompiled_spread_ms:.2f}",
        f"{bucket.compiled_ms:.2f} ± {bucket.compiled_spread_ms:.2f}",
        f"{bucket.uncompiled_ms - bucket.compiled_ms:.2f}",
        _seconds(bucket.cold_seconds),
        _seconds(bucket.warm_seconds),
        _tokens(bucket, bucket.cold_seconds, bucket.break_even_tokens_cold),
        _tokens(bucket, bucket.warm_seconds, bucket.break_even_tokens_warm),
    )


def _seconds(seconds: float | None) -> str:
    return NO_VALUE if seconds is None else f"{seconds:.2f}"


def _tokens(bucket: BucketPayoff, seconds: float | None, tokens: int | None) -> str:
    if not bucket.is_conclusive:
        return "inconclusive"
    if bucket.saved_ms <= 0:
        return "never"
    return NO_VALUE if seconds is None or tokens is None else f"{tokens:,}"


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
    if trace.num_omitted:
        show_sentence(
            f"its last {trace.num_omitted} records were omitted, because the file had reached its maximum size"
        )
    report = trace.path.with_suffix("")
    show_sentence(
        f"to read it: pip install tlparse; tlparse {trace.path} -o {report} --no-browser; open {report}/index.html"
    )


def explanation_document(explanation: Explanation, trace: WrittenTrace | None) -> str:
    payoff = explanation.payoff
    return json_document(
        "explain",
        model=explanation.model,
        regions=[dataclasses.asdict(region) for region in explanation.regions],
        findings=[_finding_document(finding) for finding in explanation.findings],
        payoff=None if payoff is None else _payoff_document(payoff),
        not_measured=explanation.not_measured,
        kernels=[dataclasses.asdict(kernels) for kernels in explanation.kernels],
        trace=None if trace is None else {"path": str(trace.path), "omitted_records": trace.num_omitted},
    )


def _finding_document(finding: Finding) -> dict[str, Any]:
    location = finding.location
    document = dataclasses.asdict(finding)
    costs = [
        {**dataclasses.asdict(cost), "region_share": cost.region_share, "module_share": cost.module_share}
        for cost in finding.costs
    ]
    return {**document, "location": location._asdict(), "costs": costs}


def _payoff_document(payoff: Payoff) -> dict[str, Any]:
    buckets = [
        {
            **dataclasses.asdict(bucket),
            "is_conclusive": bucket.is_conclusive,
            "saved_ms": bucket.saved_ms,
            "break_even_tokens_cold": bucket.break_even_tokens_cold,
            "break_even_tokens_warm": bucket.break_even_tokens_warm,
        }
        for bucket in payoff.buckets
    ]
    request = payoff.request
    return {
        "buckets": buckets,
        "request": {
            **dataclasses.asdict(request),
            "is_conclusive": request.is_conclusive,
            "pays": request.pays,
            "break_even_requests_cold": request.break_even_requests_cold,
            "break_even_requests_warm": request.break_even_requests_warm,
        },
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
