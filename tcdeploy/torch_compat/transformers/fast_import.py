"""Imports transformers with fewer and faster file reads.

transformers 5.23 lists its models' public names from 1669 source files (35 MB), once for `transformers` and again for
`transformers.models`. The listing of a folder has an LRU cache of 128 entries, and there are 549 folders, so the second
pass reads every file again. During the import here, the cache is unbounded, and the search for `__all__` starts at the
last line that begins with it. Both passes take 0.13 instead of 0.51 s (docs/performance-log.md).

Up to 5.17, transformers also calls `importlib.metadata.packages_distributions()`, which reads the file list of every
installed distribution. Here it gets a lazy mapping, as in later versions of transformers.

An import hook installs both, and nothing remains replaced after the import. Rejected: deriving the second list from the
first, which is as fast, but depends on the list's format; storing the lists in a file, which is valid only while none
of the 1669 files changes. tests/torch_compat/test_transformers_import.py fails when transformers calls other functions.
Does not import torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tcdeploy.torch_compat.internal import find, internal, mentions

IMPORT_UTILS = "transformers.utils.import_utils"
LISTING_FUNCTION = "create_import_structure_from_path"
EXPORTS_FUNCTION = "fetch__all__"
# Packages that several distributions provide. transformers checks which of these distributions is installed.
DISTRIBUTIONS = {"flash_attn": ("flash-attn", "flash-attn-4")}


@internal("transformers imports", f"{IMPORT_UTILS}.{LISTING_FUNCTION}",
          "importing transformers lists the names of its models twice")  # fmt: skip
def supported() -> bool:
    return _has_functions(find(IMPORT_UTILS))


def _has_functions(import_utils: object) -> bool:
    """Whether the module has both functions, the first with an LRU cache, and calls them as expected."""
    list_names = getattr(import_utils, LISTING_FUNCTION, None)
    return (
        hasattr(list_names, "cache_parameters")
        and mentions(list_names, LISTING_FUNCTION, EXPORTS_FUNCTION)
        and mentions(getattr(import_utils, "define_import_structure", None), LISTING_FUNCTION)
        and callable(getattr(import_utils, EXPORTS_FUNCTION, None))
    )


def import_with_fewer_reads() -> None:
    """Import `transformers` and `transformers.models`, unless this process has imported them."""
    with ExitStack() as patches:
        finder = _ImportUtilsFinder(patches)
        sys.meta_path.insert(0, finder)
        patches.callback(sys.meta_path.remove, finder)
        import transformers.models  # noqa: F401


class _ImportUtilsFinder(MetaPathFinder):
    """Finds only IMPORT_UTILS. Its functions are replaced after its execution, until `patches` is closed."""

    def __init__(self, patches: ExitStack) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == IMPORT_UTILS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _ImportUtilsLoader(spec, spec.loader, self._patches)
        return spec


class _ImportUtilsLoader(Loader):
    def __init__(self, spec: ModuleSpec, loader: Loader, patches: ExitStack) -> None:
        self._spec, self._loader, self._patches = spec, loader, patches

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader  # so that other code sees the ordinary loader
        read_distributions = importlib.metadata.packages_distributions
        with _replace(importlib.metadata, packages_distributions=lambda: DistributionNames(read_distributions)):
            self._loader.exec_module(module)
        if _has_functions(module):
            self._patches.enter_context(_replace(module, **faster_functions(module)))


def faster_functions(import_utils: Any) -> dict[str, Callable[..., Any]]:
    """Faster equivalents by name. transformers shares cached lists too, and no caller changes them."""
    list_names, find_all = getattr(import_utils, LISTING_FUNCTION), getattr(import_utils, EXPORTS_FUNCTION)
    return {
        LISTING_FUNCTION: functools.cache(list_names.__wrapped__),
        EXPORTS_FUNCTION: lambda file_content: find_all(file_content[file_content.rfind("\n__all__") + 1 :]),
    }


@contextmanager
def _replace(module: ModuleType, **functions: Callable[..., Any]) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)


class DistributionNames(Mapping[str, list[str]]):
    """Maps a package to its distributions, like `importlib.metadata.packages_distributions()`, but lazily.

    A package with a distribution of its own name, or in DISTRIBUTIONS, is looked up alone. Other look-ups, and
    iteration, call `read_distributions`, once.
    """

    def __init__(self, read_distributions: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read_distributions = functools.cache(read_distributions)

    def __getitem__(self, package: str) -> list[str]:
        candidates = DISTRIBUTIONS.get(package, (package,))
        return [name for name in map(_installed_name, candidates) if name] or self._read_distributions()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read_distributions())

    def __len__(self) -> int:
        return len(self._read_distributions())


def _installed_name(distribution: str) -> str | None:
    """The name as its metadata spells it, or None. `distribution` may have "_" for "-"."""
    try:
        return importlib.metadata.distribution(distribution).metadata["Name"]
    except importlib.metadata.PackageNotFoundError:
        return None
