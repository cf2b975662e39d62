"""What `--quantize` and `tcdeploy quantize --to` ask for: the numbers as which weights of linear layers are stored.

    fp8          8-bit floats (e4m3), a scale for each row
    int8         8-bit integers, a scale for each row
    int4:GROUP   4-bit integers, a scale for each GROUP columns of a row; `int4` is int4:128

All are symmetric, and rounded to nearest: no calibration data is needed. Does not import torch.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from tcdeploy.errors import UsageError

Numbers = Literal["fp8", "int8", "int4"]
GROUP_SIZE = 128
GROUP_STEP = 8  # codes in the 32-bit words of checkpoints
CHOICES = "fp8|int8|int4"  # and int4:GROUP
REQUEST = re.compile(r"(?P<numbers>fp8|int8|int4)(?::(?P<group>[0-9]{1,6}))?")


class QuantizeRequest(NamedTuple):
    """group_size: the columns that share a scale; 0: all columns of a row."""

    numbers: Numbers
    group_size: int

    @property
    def text(self) -> str:
        return f"{self.numbers}:{self.group_size}" if self.group_size else self.numbers


def parse_quantize(text: str, option: str = "--quantize") -> QuantizeRequest:
    """Raises UsageError, which names the option."""
    match = REQUEST.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} is {text!r:.80}; it must be fp8, int8, int4 or int4:GROUP", f"{option} fp8")
    numbers: Numbers = match["numbers"]  # type: ignore[assignment]  # as REQUEST says
    if match["group"] is None:
        return QuantizeRequest(numbers, GROUP_SIZE if numbers == "int4" else 0)
    group_size = int(match["group"])
    if numbers != "int4":
        raise UsageError(f"{option} is {text}, but {numbers} has one scale for each row", f"{option} {numbers}")
    if group_size == 0 or group_size % GROUP_STEP:
        raise UsageError(
            f"{option} is {text}; a group must be a multiple of {GROUP_STEP}", f"{option} int4:{GROUP_SIZE}"
        )
    return QuantizeRequest(numbers, group_size)
