"""README is short, and its table and pictures are those of docs/results.json."""

from __future__ import annotations

from pathlib import Path

from tests.test_scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 110


def summary(p50: float, p99: float, mean: float) -> dict[str, float]:
    return {"p10": 0.0, "p50": p50, "p90": 0.0, "p99": p99, "mean": mean, "max": 0.0}


LATENCIES = {
    "first_token_ms": summary(1, 3, 2), "request_gap_ms": summary(4, 6, 5), "token_gap_ms": summary(7, 9, 8)
}  # fmt: skip
ROW = {"failures": {}, "latencies": LATENCIES, "output_tokens_per_second": 100}
REPORT = {"rows": [ROW], "sampling_parameters": {"temperature": 1}}


def test_it_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_its_table_and_pictures_are_made_from_the_results() -> None:
    readme_results = load_script("readme_results.py")
    results = readme_results.read()
    [table] = readme_results.TABLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert table == readme_results.table(results)
    for dark, path in readme_results.PICTURES.items():
        assert path.read_text(encoding="utf-8") == readme_results.picture(results, dark)


def test_writing_replaces_the_table_only(tmp_path: Path) -> None:
    readme_results = load_script("readme_results.py")
    results = readme_results.read()
    readme_results.PICTURES = {True: tmp_path / "dark.svg"}
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- made by scripts/bench-readme -->\n\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    readme_results.write(results, path)
    table = readme_results.table(results)
    assert path.read_text(encoding="utf-8") == (
        f"before\n<!-- made by scripts/bench-readme -->\n\n{table}\n<!-- end -->\nafter\n"
    )
    assert (tmp_path / "dark.svg").read_text(encoding="utf-8") == readme_results.picture(results, True)


def test_latencies_are_those_of_the_load() -> None:
    script = load_script("bench-readme")
    assert script.summarize(REPORT) == {
        "first_token_ms": {"p50": 1.0, "p99": 3.0, "mean": 2.0},
        "per_token_ms": {"p50": 4.0, "p99": 6.0, "mean": 5.0},
        "gap_ms": {"p50": 7.0, "p99": 9.0, "mean": 8.0},
        "output_tokens_per_second": 100.0,
        "sampling_parameters": {"temperature": 1},
    }
