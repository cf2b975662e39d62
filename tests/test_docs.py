"""Links of the documentation resolve, and messages of the package name only files that are installed with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tcdeploy.host.python_source import parse_source
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / ".github").glob("*.md"))]
PACKAGE = ROOT / "tcdeploy"
LINK = re.compile(r"\]\(([^)\s]+)\)")
CONFLICT = re.compile(r"(<{7} |={7}$|>{7} )")  # git's
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
DOCUMENT = re.compile(r"[\w./-]+\.md\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_missing_file_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[1](#a-b-c) [2](#a) [3](page.md#a-b-c) [4](none.md) [5](https://example.com/x)")
    assert list(broken_links(page)) == ["#a", "none.md"]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_marks_of_an_unresolved_merge(page: Path) -> None:
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if CONFLICT.match(line)] == []


def named_documents(source: str) -> set[str]:
    """Names of Markdown files in the strings of a module that are not docstrings: messages, hints and help texts."""
    tree = parse_source(source)
    documented = (node.body[0] for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and node.body)
    docstrings = {id(first.value) for first in documented if isinstance(first, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    texts = [str(node.value) for node in strings if id(node) not in docstrings]
    return {name for text in texts for name in DOCUMENT.findall(text)}


def test_messages_name_only_files_that_are_installed_with_the_package() -> None:
    named = {name for path in PACKAGE.rglob("*.py") for name in named_documents(path.read_text(encoding="utf-8"))}
    assert {name for name in named if not (PACKAGE / name).exists()} == set()
    pages = [path for kind in ("html", "js", "jinja") for path in PACKAGE.rglob(f"*.{kind}")]
    assert pages and not [path for path in pages if "docs/" in path.read_text(encoding="utf-8")]


def test_a_name_in_a_hint_is_found_and_one_in_a_docstring_is_not() -> None:
    source = '"""See docs/a.md."""\ndef f(x):\n    "docs/b.md"\n    raise Error(f"{x} failed", "read docs/c.md")'
    assert named_documents(source) == {"docs/c.md"}
