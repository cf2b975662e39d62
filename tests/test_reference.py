"""docs/reference.md is up to date with the code."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_the_reference_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/write-reference", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), "run scripts/write-reference"


def test_the_readme_stays_an_overview_and_its_links_resolve() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert links and [link for link in links if not (ROOT / link).exists()] == []
