"""README's table of results and its picture, made from docs/results.json, which scripts/bench-readme writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results.json"
PICTURES = {False: ROOT / "docs/results-light.svg", True: ROOT / "docs/results-dark.svg"}  # by whether it is dark
TABLE = re.compile(r"(?<=<!-- made by scripts/bench-readme -->\n\n).*?(?=\n<!-- end -->)", re.S)

WIDTH, NAME_WIDTH, BAR_WIDTH = 760, 190, 460  # px
BAR_HEIGHT, ROW_HEIGHT, GROUP_HEIGHT = 16, 24, 44
TEXT_COLORS, OUR_COLORS, OTHER_COLORS = ("#1f2328", "#e6edf3"), ("#0b7285", "#3bc9db"), ("#adb5bd", "#6e7681")


class Bars(NamedTuple):
    """One group of bars of the picture: a caption, and a value and its text by name."""

    caption: str
    values: dict[str, tuple[float, str]]


def write(results: dict[str, Any], readme: Path = ROOT / "README.md") -> None:
    """Write the pictures, and the table between its two comments in README.md."""
    for dark, path in PICTURES.items():
        path.write_text(picture(results, dark), encoding="utf-8")
    text, count = TABLE.subn(lambda _: table(results), readme.read_text(encoding="utf-8"))
    assert count == 1, f"{readme} has no comments around its table"
    readme.write_text(text, encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """Four rows of results in Markdown."""
    ours, other = results["servers"]
    rows = [
        (results["model"], "tcdeploy", other["name"]),
        ("---", "---", "---"),
        ("restart to the first token, everything cached", restarts(ours), restarts(other)),
        ("1 client: first token; then per token", one_client(ours), one_client(other)),
        ("12 requests/s: first token, median / p99; then per token", arrivals(ours), arrivals(other)),
        ("256 requests at once", at_once(ours), at_once(other)),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def restarts(server: dict[str, Any]) -> str:
    """The fastest and the slowest restart."""
    return f"{min(server['restart_seconds']):.1f} to {max(server['restart_seconds']):.1f} s"


def one_client(server: dict[str, Any]) -> str:
    load = server["loads"]["one-client"]
    return f"{load['first_token_ms']['p50']:.1f} ms; {load['per_token_ms']['mean']:.2f} ms"


def arrivals(server: dict[str, Any]) -> str:
    load = server["loads"]["arrivals"]
    first = load["first_token_ms"]
    return f"{first['p50']:.0f} / {first['p99']:.0f} ms; {load['per_token_ms']['mean']:.2f} ms"


def at_once(server: dict[str, Any]) -> str:
    return f"{server['loads']['256-at-once']['output_tokens_per_second']:,.0f} tokens/s"


def groups(results: dict[str, Any]) -> Iterator[Bars]:
    ours, other = results["servers"]
    names = {"tcdeploy": ours, other["name"]: other}
    seconds = {name: min(server["restart_seconds"]) for name, server in names.items()}
    yield Bars(
        "Restart to the first token, everything cached, the fastest",
        {name: (value, f"{value:.1f} s") for name, value in seconds.items()},
    )
    for caption, load, key, statistic in (
        ("Time per token, 1 client", "one-client", "per_token_ms", "mean"),
        ("First token at 12 requests/s, median", "arrivals", "first_token_ms", "p50"),
    ):
        milliseconds = {name: server["loads"][load][key][statistic] for name, server in names.items()}
        yield Bars(
            caption, {name: (value, f"{value:.{2 if value < 10 else 0}f} ms") for name, value in milliseconds.items()}
        )


def picture(results: dict[str, Any], dark: bool) -> str:
    """Horizontal bars as SVG. Shorter is better in each group."""
    lines, top = [], 0
    for group in groups(results):
        lines.append(f'<text x="0" y="{top + 22}" font-weight="600">{group.caption}</text>')
        longest = max(value for value, _ in group.values.values())
        for number, (name, (value, text)) in enumerate(group.values.items()):
            y = top + 34 + number * ROW_HEIGHT
            width = BAR_WIDTH * value / longest
            color = (OUR_COLORS if name.startswith("tcdeploy") else OTHER_COLORS)[dark]
            lines += [
                f'<text x="{NAME_WIDTH - 12}" y="{y + 13}" text-anchor="end">{name}</text>',
                f'<rect x="{NAME_WIDTH}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{color}"/>',
                f'<text x="{NAME_WIDTH + width + 8:.1f}" y="{y + 13}">{text}</text>',
            ]
        top += GROUP_HEIGHT + len(group.values) * ROW_HEIGHT
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{TEXT_COLORS[dark]}">\n{body}\n</svg>\n'
    )


def read() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results
