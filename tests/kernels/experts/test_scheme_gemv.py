"""The GEMVs of quantised experts: how PTX makes values of codes, the order of loads, and rows of several steps."""

from __future__ import annotations

import random
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton.backends.nvidia
from torch import Tensor

from tcdeploy.kernels.experts import matmul as experts_matmul
from tcdeploy.kernels.experts.matmul import matmul, sum_experts
from tcdeploy.kernels.experts.scheme_gemv_kernel import _e2m1_ptx, _int4_ptx
from tcdeploy.kernels.experts.tiles import CODE_GEMV_TILES, ExpertGemvTile, scheme_sum_tile
from tests.kernels.experts.expert_cases import expected, product
from tests.kernels.linear.matmul_cases import assert_agrees
from tests.triton_tools import Launch, compile_for_hopper, record_launches

CUOBJDUMP = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E2M1 = (*MAGNITUDES, *(-value for value in MAGNITUDES))
INTEGERS = {"int4": list(range(16)), "e2m1": [16 + 2 * value for value in E2M1]}  # c of each code
PTX = {"int4": _int4_ptx(), "e2m1": _e2m1_ptx()}


def permute(low: int, high: int, selectors: int) -> int:
    """prmt.b32. A selector of 8 or more replicates the top bit of its byte."""
    source, result = low.to_bytes(4, "little") + high.to_bytes(4, "little"), []
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = source[selector & 7]
        result.append(byte if selector < 8 else 255 * (byte >> 7))
    return int.from_bytes(bytes(result), "little")


def and_or(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA
    return a & b | c


OPERATIONS: dict[str, Callable[..., int]] = {
    "prmt.b32": permute,
    "lop3.b32": and_or,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "sub.u32": lambda a, b: a - b & 0xFFFFFFFF,
    "add.u32": lambda a, b: a + b & 0xFFFFFFFF,
}


def run_ptx(text: str, word: int) -> list[float]:
    """The floats in the registers $0 to $7."""
    registers = {"$8": word, "$9": 0}
    for statement in filter(None, map(str.strip, text.strip("{}").split(";"))):
        name, _, operands = statement.partition(" ")
        if name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = OPERATIONS[name](*values)
    return [struct.unpack("f", registers[f"${i}"].to_bytes(4, "little"))[0] for i in range(8)]


@pytest.mark.parametrize("format", PTX)
def test_ptx_makes_the_floats_of_all_codes(format: str) -> None:
    generator = random.Random(1)
    for word in (*(0x11111111 * code for code in range(16)), *(generator.getrandbits(32) for _ in range(500))):
        codes = [word >> 4 * i & 15 for i in range(8)]
        in_order = [*codes[::2], *codes[1::2]]  # the low codes of the four bytes, then the high ones
        assert run_ptx(PTX[format], word) == [1 + INTEGERS[format][code] / 128 for code in in_order]


@pytest.mark.parametrize("tile", CODE_GEMV_TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("case", ["int4 with zeros", "int4 by row", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("k", [1152, 2304])  # neither is a multiple of a step
def test_rows_of_several_steps_agree(
    case: str, tile: ExpertGemvTile, k: int, device: str, poisoned_outputs: list[Tensor]
) -> None:
    arguments = product(case, [[1, 0]], device=device, experts=2, n=16, k=k)
    x, ids, tensors, bias, scheme = arguments
    assert_agrees(matmul(x, ids, None, tensors, bias, scheme, tile), expected(arguments))
    assert poisoned_outputs[-1][2:].isnan().all()


def test_tiles_of_sums() -> None:
    assert scheme_sum_tile(384, 8).name == scheme_sum_tile(1440, 8).name == "n4_b512"
    assert scheme_sum_tile(1440, 4).name == "n8_b512"


# Compiled for Hopper


def opcodes(launch: Launch, folder: Path) -> list[str]:
    """SASS, without predicates and operands."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compile_for_hopper(launch).asm["cubin"])
    text = subprocess.run([CUOBJDUMP, "-sass", binary], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", text)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs cuobjdump")
@pytest.mark.parametrize("case", ["int4 with zeros", "mxfp4"])
@pytest.mark.parametrize("k", [2048, 2880])
@pytest.mark.parametrize("summed", [False, True])
def test_all_loads_of_a_step_are_issued_before_its_arithmetic(
    case: str, k: int, summed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the word that orders them is loaded after the barrier."""
    if case == "int4 with zeros" and k == 2880:
        k = 2816  # its groups have 64 columns
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(experts_matmul, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, ids, tensors, bias, scheme = product(case, [[4, 1]], False, row_per_pair=summed, n=64, k=k)
    if summed:
        sum_experts(x, ids, torch.ones(ids.shape).bfloat16(), tensors, bias, None, scheme)
    else:
        matmul(x, ids, None, tensors, bias, scheme)
    names = opcodes(launches[0], tmp_path)
    before = names[: names.index("FFMA")]
    assert sum(".EF" in name for name in before) in (4, 8), "16 bytes of each row of the tile"
    barrier = max(i for i, name in enumerate(before) if name.startswith("BAR"))
    assert sum(name.startswith("LDG") for name in before[barrier:]) == 1
