"""A source file's digest follows its code, and ignores docstrings, comments, formatting and positions."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tcdeploy.planning import keys, plan
from tcdeploy.planning.keys import combined_digest, source_digests
from tcdeploy.programs.passes.post_grad import op_source_digests
from tests.machines import H100, LLAMA_8B, make_recipe

SOURCE = '''"""Module docstring, measured on 2026-01-01."""

LIMIT = 8  # rows


class Config:
    """Class docstring."""

    size: int = 4

    def double(self):
        """Method docstring."""
        return 2 * self.size


if LIMIT:

    def kernel(x):
        """Docstring of a function inside a block."""
        # a comment
        return x + 1


async def wait():
    """Docstring of a function with no other statement."""
'''
DOCUMENTATION_EDITS = {
    "module docstring": ("measured on 2026-01-01", "measured on 2026-02-02"),
    "class docstring": ("Class docstring.", "Another text.\n\n    In two paragraphs."),
    "method docstring": ("Method docstring.", "Another text."),
    "docstring in a block": ("Docstring of a function inside a block.", "Another text."),
    "docstring as the only statement": ("Docstring of a function with no other statement.", "Another text."),
    "comment": ("# a comment", "# another comment\n        # of two lines"),
    "trailing comment": ("  # rows", ""),
    "blank lines": ("\n\n\nclass", "\n\n\n\n\nclass"),
    "parentheses": ("return 2 * self.size", "return (2 * self.size)"),
}
CODE_EDITS = {
    "constant": ("LIMIT = 8", "LIMIT = 16"),
    "body": ("x + 1", "x - 1"),
    "default": ("size: int = 4", "size: int = 5"),
    "decorator": ("    def double", "    @property\n    def double"),
    "statement": ("# a comment", "x = x.float()"),
    "string that is no docstring": ("return x + 1", 'return "x"'),
    "order": ("2 * self.size", "self.size * 2"),
}


def digest_of(folder: Path, text: str) -> str:
    path = folder / "ops.py"
    path.write_text(text)
    return source_digests(folder, [path])["ops.py"]


def edited(edit: tuple[str, str]) -> str:
    assert SOURCE.count(edit[0]) == 1
    return SOURCE.replace(*edit)


@pytest.mark.parametrize("edit", DOCUMENTATION_EDITS.values(), ids=DOCUMENTATION_EDITS.keys())
def test_documentation_and_formatting_do_not_change_the_digest(tmp_path: Path, edit: tuple[str, str]) -> None:
    assert digest_of(tmp_path, edited(edit)) == digest_of(tmp_path, SOURCE)


@pytest.mark.parametrize("edit", CODE_EDITS.values(), ids=CODE_EDITS.keys())
def test_code_changes_the_digest(tmp_path: Path, edit: tuple[str, str]) -> None:
    assert digest_of(tmp_path, edited(edit)) != digest_of(tmp_path, SOURCE)


def test_a_string_after_the_docstring_is_code(tmp_path: Path) -> None:
    sources = [f'def f():\n    """Docstring."""\n    "{text}"\n' for text in ("a", "b")]
    assert len({digest_of(tmp_path, source) for source in sources}) == 2


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="ast.dump has another format")
def test_code_is_described_as_by_ast_dump() -> None:
    for path in Path(keys.__file__).parents[1].rglob("*.py"):
        described = keys.describe_code(tree := ast.parse(path.read_bytes()))
        keys.drop_docstrings(tree)
        assert described == ast.dump(tree), path


def test_a_file_s_name_and_digest_enter_the_combined_digest() -> None:
    mappings = [{"a.py": "1", "b.py": "2"}, {"a.py": "2", "b.py": "1"}, {"a.py": "1", "c.py": "2"}, {"a.py": "1"}]
    assert len({combined_digest(mapping) for mapping in mappings}) == len(mappings)


def test_op_sources_are_named_by_their_paths_in_the_package() -> None:
    names = list(op_source_digests())
    assert {
        "kernels/attention/ops.py",
        "kernels/attention/decode.py",
        "kernels/linear/skinny_gemm.py",
        "programs/passes/post_grad.py",
    } <= set(names)
    assert names == sorted(names) and len(names) > 15


def test_the_release_number_does_not_enter_the_plan_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan.make_plan(make_recipe(), H100, LLAMA_8B)
    monkeypatch.setattr("tcdeploy.__version__", "99.0.0")
    assert plan.make_plan(make_recipe(), H100, LLAMA_8B) == before


def test_the_epoch_enters_the_plan_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan.make_plan(make_recipe(), H100, LLAMA_8B)
    monkeypatch.setattr(plan, "CACHE_EPOCH", keys.CACHE_EPOCH + 1)
    after = plan.make_plan(make_recipe(), H100, LLAMA_8B)
    assert after.key != before.key and replace(after, key=before.key) == before
