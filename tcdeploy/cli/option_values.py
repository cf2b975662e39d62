"""Converts simple option values without pydantic. typer 0.29 converts every value, defaults included, with pydantic.

Importing pydantic takes 0.07 s, and the adapters for the 45 options of `serve` take 0.04 s. Other values, among them
all invalid ones, are left to typer, which writes the error messages.
"""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

from typer.core import TyperArgument, TyperCommand, TyperOption

from tcdeploy.cli.completion import complete_values
from tcdeploy.cli.foreign_errors import PARSER_ERROR
from tcdeploy.cli.help_panels import advanced_names, help_all_option, write_panels
from tcdeploy.errors import UsageError
from tcdeploy.planning.option import RENAMED, field_type

NUMBER_PATTERNS = {int: re.compile("-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")}


class HelpWithoutConversion:
    """Base class of commands and groups. The default of a switch is False, so that it need not be converted.

    typer's default of --help, --install-completion and --show-completion is None, which it would convert to False.
    """

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.callback is not None and parameter.default is None:
                parameter.default = False
        return parameters

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class Command(HelpWithoutConversion, TyperCommand):
    """A command that converts each value by the annotation of its function's parameter."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        hints = typing.get_type_hints(attributes["callback"])
        for parameter in self.params:
            if isinstance(parameter, TyperArgument | TyperOption) and parameter.callback is None:
                kind = field_type(hints[str(parameter.name)])
                _replace_conversion(parameter, kind)
                complete_values(parameter, kind)
        self.params.append(help_all_option())
        self.advanced = advanced_names(attributes["callback"])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except PARSER_ERROR as error:
            flag = getattr(error, "option_name", None)
            if new := RENAMED.get(f"{flag}") or RENAMED.get(f"{ctx.info_name} {flag}"):
                raise UsageError(f"{flag} is now {new}", f"use {new}") from None
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_panels(self.get_params(ctx), self.advanced, ctx, formatter)


def _replace_conversion(parameter: TyperArgument | TyperOption, kind: Any) -> None:
    convert_with_typer = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            return None
        if type(value) is kind or (typing.get_origin(kind) is Literal and value in typing.get_args(kind)):
            return value
        if kind in NUMBER_PATTERNS and isinstance(value, str) and NUMBER_PATTERNS[kind].fullmatch(value):
            return kind(value)
        if kind == list[str] and isinstance(value, list | tuple) and all(type(item) is str for item in value):
            return list(value)
        return convert_with_typer(ctx, value)

    parameter.process_value = process_value  # type: ignore[method-assign]
