"""A Triton kernel's cache key after `ignore_comments` holds its code, not its documentation or position."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.host.python_source import parse_source
from tcdeploy.torch_compat.triton import source as triton_source
from tcdeploy.torch_compat.triton.source import ignore_comments, supported

triton = pytest.importorskip("triton")

SOURCE = '''
import triton
import triton.language as tl
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def scale(x, SIZE: tl.constexpr):
    """Docstring of the callee."""
    return x * 2.5


@ignore_comments
@triton.jit(do_not_specialize=["n"])
def kernel(  # type: ignore
    out, x, n,  # pointers, and elements
    SIZE: tl.constexpr,
):
    """Docstring of the kernel."""
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = offsets < n  # a comment
    tl.store(out + offsets, scale(tl.load(x + offsets, inside), SIZE), inside)
'''
DOCUMENTATION_EDITS = {
    "comment": ("# a comment", '# another comment, with a \\ and a "'),
    "comment in the signature": ("# pointers, and elements", "# two pointers and a number"),
    "docstring": ("Docstring of the kernel.", "Another text\n\n    of three lines."),
    "no docstring": ('    """Docstring of the kernel."""\n', ""),
    "callee's docstring": ("Docstring of the callee.", "Another text."),
    "line": ("import triton\n", "import triton\n\n\n# moved down\n\n"),
    "formatting": ("tl.program_id(0) * SIZE", "(tl.program_id(0) * SIZE)"),
}
CODE_EDITS = {
    "body": ("offsets < n", "offsets <= n"),
    "signature": ("out, x, n,", "out, x, m, n,"),
    "callee's body": ("x * 2.5", "x * 2.25"),
    "name": ("def kernel", "def kernel_of_another_name"),
}


def load(folder: Path, text: str) -> Any:
    """The kernel of a module with this source, in a file of the same name every time."""
    path = folder / "kernels_under_test.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop(path.stem, None)
    linecache.clearcache()
    exec(compile(text, str(path), "exec"), module.__dict__)
    return next(value for name, value in vars(module).items() if name.startswith("kernel"))


def edited(edit: tuple[str, str]) -> str:
    assert SOURCE.count(edit[0]) == 1
    return SOURCE.replace(*edit)


def without_decorator(text: str) -> str:
    return text.replace("@ignore_comments\n", "")


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have switched Triton's interpreter on for this process."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.mark.parametrize("edit", DOCUMENTATION_EDITS.values(), ids=DOCUMENTATION_EDITS.keys())
def test_documentation_and_position_do_not_change_the_key(tmp_path: Path, edit: tuple[str, str]) -> None:
    assert load(tmp_path, edited(edit)).cache_key == load(tmp_path, SOURCE).cache_key


@pytest.mark.parametrize("name", ["comment", "docstring", "line"])
def test_triton_s_own_key_changes_with_them(tmp_path: Path, name: str) -> None:
    """If this fails, Triton no longer needs tcdeploy/torch_compat/triton/source.py."""
    texts = (SOURCE, edited(DOCUMENTATION_EDITS[name]))
    before, after = (load(tmp_path, without_decorator(text)).cache_key for text in texts)
    assert before != after


@pytest.mark.parametrize("edit", CODE_EDITS.values(), ids=CODE_EDITS.keys())
def test_code_changes_the_key(tmp_path: Path, edit: tuple[str, str]) -> None:
    assert load(tmp_path, edited(edit)).cache_key != load(tmp_path, SOURCE).cache_key


def test_the_kernel_keeps_its_code(tmp_path: Path) -> None:
    def code(source: str) -> str:
        tree = parse_source(source)
        triton_source.drop_docstrings(tree)
        return ast.dump(tree)

    kernel, original = (load(tmp_path, text) for text in (SOURCE, without_decorator(SOURCE)))
    assert code(kernel.src) == code(original.src)
    assert kernel.arg_names == original.arg_names and kernel.starting_line_number == 1


def test_the_installed_triton_is_supported() -> None:
    assert supported()


@pytest.mark.parametrize("attribute", ["_src", "raw_src", "starting_line_number", "hash", "_unsafe_update_src"])
def test_without_a_private_attribute_the_kernel_keeps_triton_s_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    kernel = load(tmp_path, without_decorator(SOURCE))
    source, line = kernel.src, kernel.starting_line_number

    class Moved:
        """The kernel as made by a Triton version that has renamed the attribute."""

        def __getattr__(self, name: str) -> Any:
            if name == attribute:
                raise AttributeError(name)
            return getattr(kernel, name)

    moved = Moved()
    assert ignore_comments(moved) is moved
    assert (kernel.src, kernel.starting_line_number) == (source, line)


def test_an_interpreted_function_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    kernel = load(tmp_path, SOURCE)
    assert type(kernel).__name__ == "InterpretedFunction" and not hasattr(kernel, "src")


def test_every_kernel_of_the_package_ignores_comments() -> None:
    decorators = {}
    for path in Path(triton_source.__file__).parents[2].rglob("*.py"):
        for node in ast.walk(parse_source(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                decorators[f"{path.stem}.{node.name}"] = [ast.unparse(item) for item in node.decorator_list]
    kernels = {name for name, items in decorators.items() if any(item.startswith("triton.jit") for item in items)}
    assert len(kernels) >= 8
    assert sorted(name for name in kernels if decorators[name][0] != "ignore_comments") == []
