"""The examples of docs/serving.md run against a server of the embedded model, and print what the page states."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.server.conftest import ServerProcess

PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^## (?P<section>[^\n]+)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    section: str
    language: str
    code: str
    output: str  # as in doctests, "..." stands for any text


def read_examples(page: str) -> list[Example]:
    """Each example is a block of `sh` or `python`, followed by its output, a block of `text`."""
    examples, section, code = [], "", None
    for block in BLOCK.finditer(page):
        if block["section"]:
            section = block["section"]
        elif block["language"] == "text":
            assert code is not None, f"an output without an example in {section!r}"
            examples.append(Example(section, *code, block["text"]))
            code = None
        else:
            assert code is None, f"an example without an output in {section!r}"
            code = block["language"], block["text"]
    assert code is None and examples
    return examples


EXAMPLES = read_examples(PAGE)


def run(example: Example, address: str) -> str:
    """What the example prints. Python runs in this process, which has imported the clients already."""
    code = example.code.replace(ADDRESS, address)
    if example.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert example.language == "python"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs/serving.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.section}-{example.language}")
def test_an_example_prints_what_the_page_states(server: ServerProcess, example: Example) -> None:
    if example.language == "sh" and shutil.which("curl") is None:
        pytest.skip("needs curl")
    server.wait_until_idle(5)  # the metrics of the page are those of an idle server
    printed = run(example, server.address)
    lines = "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"
    assert doctest.OutputChecker().check_output(example.output, lines, doctest.ELLIPSIS), printed


def test_the_page_has_an_example_for_each_task() -> None:
    tasks = {"Completions with curl", "Chat with the openai client", "Tools", "JSON that follows a schema", "Reasoning"}
    assert tasks | {"OpenAI's Responses API", "Anthropic's Messages API"} <= {item.section for item in EXAMPLES}
    assert all(ADDRESS in item.code for item in EXAMPLES), "an example that asks no server cannot fail"
