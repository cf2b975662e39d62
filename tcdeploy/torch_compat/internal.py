"""Describes a private name of another package: its location, the check for it, and what is lost without it.

The checks look at names, signatures and the constants in a function's code. They run nothing of the other package
beyond importing the module that should hold the name, and treat every failure of that import as "not supported".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from tcdeploy.planning.extras import is_installed


@dataclass(frozen=True)
class Internal:
    """A private name that this package depends on. Call it to find out whether the installed version has the name."""

    name: str  # what it is for; names the Plan's decision
    symbol: str  # its location, as users can search for it
    consequence: str  # what is lost without it: a clause that reads on with ": torch 2.16 moved ..."
    check: Callable[[], bool]

    @property
    def package(self) -> str:
        """The distribution that owns it, a key of TESTED_VERSIONS."""
        return self.symbol.partition(".")[0]

    def __call__(self) -> bool:
        """True also if the package is not installed, because nothing is lost then."""
        return not is_installed(self.package) or self.check()


def internal(name: str, symbol: str, consequence: str) -> Callable[[Callable[[], bool]], Internal]:
    """Decorates the check, which becomes an `Internal`."""
    return lambda check: Internal(name, symbol, consequence, check)


def find(path: str) -> Any:
    """The object at "module:attribute.attribute", or None if it is missing or its module cannot be imported."""
    module, _, attributes = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for attribute in filter(None, attributes.split(".")):
            value = getattr(value, attribute)
    except Exception:  # an import may raise any exception, and each means that the name cannot be used
        return None
    return value


def find_code(path: str) -> CodeType | None:
    """The code of the function or class at "module:name.name", or None. Imports the module's packages, but not itself.

    For modules that take long to import and that a start may not need.
    """
    module, _, names = path.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        loader: Any = spec and spec.loader
        code: CodeType | None = loader.get_code(module)
    except Exception:  # as in `find`
        return None
    for name in names.split("."):
        parts = code.co_consts if code is not None else ()
        code = next((part for part in parts if isinstance(part, CodeType) and part.co_name == name), None)
    return code


def is_imported(module: str) -> bool:
    """Whether this process has imported a module. Does not import it."""
    return module in sys.modules


def mentions(owner: object, *words: str) -> bool:
    """Whether the code of a function, of a class's functions or from `find_code` uses all `words`.

    Names and string constants are words.
    """
    codes = [owner] if isinstance(owner, CodeType) else [function.__code__ for function in _functions(owner)]
    return {word for code in codes for word in _words(code)}.issuperset(words)


def has_parameters(function: object, *names: str) -> bool:
    """Whether a callable takes parameters of these names."""
    try:
        return set(names) <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _functions(owner: object) -> Iterator[Any]:
    members: list[Any] = list(vars(owner).values()) if inspect.isclass(owner) else [owner]
    for member in members:
        function = inspect.unwrap(getattr(member, "__func__", member))
        if hasattr(function, "__code__"):
            yield function


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (item for item in constant if isinstance(item, str))
