"""The programs of docs/library.md run, and their types are checked strictly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import TINY_BATCH_SIZES, TINY_BUCKETS, cli_environment
from tests.fork_server import ForkServer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
PROGRAMS = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE, re.DOTALL | re.M)}

WRONG = """from tcdeploy import LLM, SamplingParams

SamplingParams(max_new_tokens=3)
answers: str = LLM("builtin:tiny").generate("a")
from tcdeploy import Motor
"""

RUN = """
for name, text in programs.items():
    print("==", name)
    exec(text, {"__name__": "__main__"})
"""


def test_the_page_has_four_programs() -> None:
    assert list(PROGRAMS) == ["batch.py", "chat.py", "stream.py", "loop.py"]
    assert PAGE.count("```python") == 4


def test_the_programs_run(fork_server: ForkServer, filled_cache: Path, tmp_path: Path) -> None:
    """One after another in one process, with the buckets of the shared cache, so that nothing compiles."""
    cache = str(shutil.copytree(filled_cache, tmp_path / "cache"))
    fields = f'"builtin:tiny", buckets={TINY_BUCKETS}, batch_sizes={TINY_BATCH_SIZES}, cache_dir={cache!r}'
    assert all('"builtin:tiny"' in text for text in PROGRAMS.values())
    programs = {name: text.replace('"builtin:tiny"', fields) for name, text in PROGRAMS.items()}
    # An open LLM keeps the programs of the process, so that each start takes 1.5 s.
    script = f"from tcdeploy import LLM\nkeep = LLM({fields})\nprograms = {programs!r}\n{RUN}"
    done = fork_server.run(environ=cli_environment(tmp_path), script=script)
    assert done.returncode == 0, done.stderr
    outputs = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert outputs["batch.py"].count(" -> ") == 3
    assert "A list is a mutable sequence" in outputs["chat.py"] and "A dictionary is a mapping" in outputs["chat.py"]
    assert outputs["stream.py"].splitlines()[-1].count(",") == 2
    assert outputs["loop.py"].count(": 16") == 12


def test_the_programs_pass_strict_type_checks(tmp_path: Path) -> None:
    """With the settings of `mypy --strict` for the programs, and those of this repository, whose cache is used."""
    folder = tmp_path / "library_programs"
    folder.mkdir()
    for name, text in {**PROGRAMS, "wrong.py": WRONG}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "library_programs"]
    environ = {**os.environ, "MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    errors = [line.split(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    assert [place.rpartition("/")[2] for place, _ in errors] == ["wrong.py:3", "wrong.py:4", "wrong.py:5"], done.stdout
