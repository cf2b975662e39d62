"""transformers is imported with fewer reads of files, has the same names and versions, and is unchanged afterwards."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.torch_compat.transformers.fast_import import EXPORTS_FUNCTION, DistributionNames, faster_functions
from tests.conftest import PACKAGES, cli_environment

IMPORT = """
import importlib.metadata, json, re, sys
from pathlib import Path
from tcdeploy.torch_compat.transformers import fast_import as transformers_import

opened, read_all = [], []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
packages_distributions = importlib.metadata.packages_distributions
def count_reads():
    read_all.append(True)
    return packages_distributions()
importlib.metadata.packages_distributions = count_reads
"""
DESCRIBE = """
import transformers, transformers.models
from transformers.utils import import_utils

source = Path(transformers.models.__file__).parent / "llama" / "modeling_llama.py"
reads = opened.count(str(source)), len(read_all)
packages = re.findall(r'_is_package_available\\("(\\w+)"', Path(import_utils.__file__).read_text())
def names(module):
    listed = {name: sorted(values) for name, values in module._import_structure.items()}
    return listed, sorted(module._modules), module._class_to_module, module._object_missing_backend
print(json.dumps([reads, {
    "names": [names(transformers), names(transformers.models)],
    "versions": {name: import_utils._is_package_available(name, return_version=True) for name in packages},
    "loaders": [type(import_utils.__loader__).__name__, type(import_utils.__spec__.loader).__name__],
    "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "limit of the cache": import_utils.create_import_structure_from_path.cache_parameters()["maxsize"],
    "functions": [import_utils.fetch__all__.__name__, importlib.metadata.packages_distributions.__name__],
}], default=str))
"""
FASTER = "transformers_import.import_with_fewer_reads()\n"
WITHOUT_FUNCTIONS = "transformers_import.LISTING_FUNCTION = 'moved'\n"
# Distribution and the package that it contains: of the same name, of two names, in two distributions, of another name
FAKE_DISTRIBUTIONS = (
    ("torchao", "torchao"), ("mamba-ssm", "mamba_ssm"), ("flash-attn", "flash_attn"), ("flash-attn-4", "flash_attn"),
    ("flash-linear-attention", "fla"), ("amd-quark", "quark"), ("amd-quark-extras", "quark"),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has FAKE_DISTRIBUTIONS, of versions 1.0, 2.0 and so on."""
    for number, (distribution, package) in enumerate(FAKE_DISTRIBUTIONS, start=1):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
        information = tmp_path / f"{distribution.replace('-', '_')}-{number}.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {number}.0\n")
        (information / "RECORD").write_text(f"{package}/__init__.py,,\n")
    return tmp_path


def run(folder: Path, script: str) -> Any:
    environ = cli_environment(folder, PYTHONPATH=f"{folder}:{PACKAGES}", PYTHONHASHSEED="0")
    result = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_transformers_has_the_same_names_and_versions_after_fewer_reads(folder: Path) -> None:
    """Fails when the ordinary import reads each source once: then delete torch_compat/transformers/fast_import.py."""
    (reads, _), ordinary = run(folder, IMPORT + DESCRIBE)
    (faster_reads, reads_of_all), faster = run(folder, IMPORT + FASTER + DESCRIBE)
    assert (reads, faster_reads, reads_of_all) == (2, 1, 0)
    assert faster == ordinary
    assert faster["versions"]["fla"] == [True, "5.0"] and faster["versions"]["torchao"] == [True, "1.0"]


def test_a_transformers_without_these_functions_is_imported_unchanged(folder: Path) -> None:
    (reads, _), ordinary = run(folder, IMPORT + DESCRIBE)
    (other_reads, _), other = run(folder, IMPORT + WITHOUT_FUNCTIONS + FASTER + DESCRIBE)
    assert (other_reads, other) == (reads, ordinary)


UP_TO_5_17 = """
import importlib.metadata
PACKAGE_DISTRIBUTION_MAPPING = importlib.metadata.packages_distributions()
"""
LOOK_UP = """
from transformers.utils import import_utils
mapping = import_utils.PACKAGE_DISTRIBUTION_MAPPING
own = [mapping.get(name, []) for name in ("torchao", "mamba_ssm", "flash_attn")], len(read_all)
other = mapping.get("fla", []), mapping.get("no_such_package", []), len(read_all)
print(json.dumps([own, other, list(mapping) == list(packages_distributions())]))
"""


@pytest.fixture
def other_transformers(folder: Path) -> Callable[[str], None]:
    """Writes a package `transformers` with the given source of `utils.import_utils`."""

    def write(source: str) -> None:
        sources = {
            "__init__": "from .utils import import_utils",
            "models": "",
            "utils": "",
            "utils/import_utils": source,
        }
        for name, text in sources.items():
            path = folder / "transformers" / (f"{name}.py" if "_" in name else f"{name}/__init__.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_distributions_are_read_only_for_packages_of_another_name(
    other_transformers: Callable[[str], None], folder: Path
) -> None:
    other_transformers(UP_TO_5_17)
    own, other, is_complete = run(folder, IMPORT + FASTER + LOOK_UP)
    assert own == [[["torchao"], ["mamba-ssm"], ["flash-attn", "flash-attn-4"]], 0]
    assert other == [["flash-linear-attention"], [], 1]
    assert is_complete


WITHOUT_CACHE = """
def fetch__all__(file_content): return []
def create_import_structure_from_path(path): return fetch__all__(path) or create_import_structure_from_path(path[1:])
def define_import_structure(path): return create_import_structure_from_path(path)
"""


def test_functions_without_a_cache_are_not_replaced(other_transformers: Callable[[str], None], folder: Path) -> None:
    other_transformers(WITHOUT_CACHE)
    assert run(folder, IMPORT + FASTER + "print(json.dumps(transformers_import.supported()))") is False


def test_a_failed_import_leaves_nothing_replaced(other_transformers: Callable[[str], None], folder: Path) -> None:
    other_transformers("raise ImportError('incompatible')")
    attempt = f"""
finders = list(sys.meta_path)
try:
    {FASTER}except ImportError as error:
    print(json.dumps([str(error), sys.meta_path == finders, importlib.metadata.packages_distributions is count_reads]))
"""
    assert run(folder, IMPORT + attempt) == ["incompatible", True, True]


def test_the_lazy_mapping_equals_packages_distributions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    read_all = importlib.metadata.packages_distributions()
    names = DistributionNames(lambda: read_all)
    assert list(names) == list(read_all) and len(names) == len(read_all)
    assert {"torchao", "mamba_ssm", "flash_attn", "fla", "quark", "yaml", "numpy"} <= set(read_all)
    for package, complete in read_all.items():
        assert set(names[package]) <= {*complete, package}, package
        assert version(names[package]) == version(complete), package
    assert sorted(names["flash_attn"]) == sorted(read_all["flash_attn"])


def version(distributions: list[str]) -> str:
    """transformers prefers the distribution that is named like its package, which sorts first here."""
    return importlib.metadata.version(min(distributions, key=len))


def test_the_mapping_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    reads = []
    names = DistributionNames(lambda: reads.append(True) or {"fla": ["flash-linear-attention"]})
    assert (names.get("torchao"), reads) == (["torchao"], [])
    assert (names.get("fla"), names.get("quark"), "quark" in names) == (["flash-linear-attention"], None, False)
    assert reads == [True]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "x = 1\n",
        "__all__ = ['A']",
        "x = 1\n__all__ = ['A', 'B']\n",
        "x = 1\n__all__ = [\n    'A',\n    'B',\n]\ny = 2\n",
        "__all__ = ['A']\n__all__ = [\n    'B',\n]\n",
        "x = 1\n__all__ = ['A']\x0c__all__ = ['B']",
        "x = 1\x0c__all__ = ['A']",
        "# __all__ is empty\n    __all__ = ['A']\n",
        "x = 1\n__all__ = ['A']\n# see __all__\n",
    ],
)
def test_searching_from_the_last_all_finds_the_same_public_names(content: str) -> None:
    from transformers.utils import import_utils

    assert faster_functions(import_utils)[EXPORTS_FUNCTION](content) == import_utils.fetch__all__(content)
