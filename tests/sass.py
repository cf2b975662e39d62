"""Find uniform registers and predicates that the machine code (SASS) of a Hopper kernel may read before it writes them.

Other registers are not checked. ptxas often leaves bits of them undefined that nothing uses: halves, and predicates
that it packs into one register.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from typing import NamedTuple

from triton import knobs

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?(U?P)(\w) +)?([A-Z]\S*) ?([^;]*?)) *;")
DOUBLE = ("DADD", "DMUL", "DFMA", "DSETP")  # instructions whose sources have 64 bits
_FIRST_BIT = {"UR": 0, "P": 64, "UP": 72}  # of each kind of register in a mask


class _Instruction(NamedTuple):
    text: str
    reads: int  # masks of registers
    writes: int
    successors: list[int]


def unwritten_registers(cubin: bytes) -> list[str]:
    """`unwritten_in` of a binary. Uses Triton's nvdisasm; without it, a RuntimeError names the variable to set."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name]
        return unwritten_in(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def unwritten_in(sass: str) -> list[str]:
    """The instructions that read a uniform register or a predicate that some path from the entry has not written.

    Conditional writes count as writes.
    """
    functions = re.split(r"^\.text\.\S+:$", sass, flags=re.MULTILINE)[1:]
    assert functions, "no machine code"
    return [text for function in functions for text in _unwritten(_parse(function))]


def _unwritten(code: list[_Instruction]) -> list[str]:
    written, pending = {0: 0}, [0]  # by index of each reached instruction: what all paths to it write
    while pending:
        at = pending.pop()
        after = written[at] | code[at].writes
        for following in code[at].successors:
            common = after & written.get(following, -1)
            if common != written.get(following):
                written[following] = common
                pending.append(following)
    return [code[at].text for at in sorted(written) if code[at].reads & ~written[at]]


def _parse(function: str) -> list[_Instruction]:
    labels, found = {}, []
    for line in function.splitlines():
        if label := re.match(r"(\S+):$", line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.search(line):
            found.append(instruction)
    code: list[_Instruction] = []
    for i, match in enumerate(found):
        text, guard, guard_index, opcode, operands = match.groups()
        reads, writes = _operands(opcode, operands.split(", "))
        if guard and guard_index != "T":
            reads |= 1 << _FIRST_BIT[guard] + int(guard_index)
        is_branch = opcode.startswith(("BRA", "CALL"))  # BSYNC joins threads at the instruction after it
        successors = [labels[name] for name in re.findall(r"`\((\S+)\)", operands) if is_branch]
        ends = opcode.startswith(("EXIT", "RET")) or (opcode == "BRA" and operands.startswith("`"))
        if (guard or not ends) and i + 1 < len(found):
            successors.append(i + 1)
        assert not opcode.startswith("BRX"), f"an indirect branch: {text}"
        code.append(_Instruction(text, reads, writes, successors))
    for i, step in enumerate(code):
        if step.text.startswith("CALL"):  # the callee is at the end of the function
            results = functools.reduce(int.__or__, (callee.writes for callee in code[step.successors[0] :]))
            code[i] = step._replace(writes=results)
    return code


def _operands(opcode: str, operands: list[str]) -> tuple[int, int]:
    """Masks of the registers that an instruction reads and writes. If unclear, an operand counts as written."""
    base, *suffixes = opcode.split(".")
    width = 4 if "128" in suffixes else 2 if {"64", "WIDE"} & set(suffixes) else 1
    kinds = "".join(operand[-2] if re.fullmatch(r"U?P\w", operand) else operand[:1] for operand in operands)
    # Results come first. A predicate is followed by the second result of a comparison, or by what a shuffle or an
    # atomic instruction returns; a register is followed by carries.
    results = 0 if base == "BRA" else len(re.match(r"P.?|[RU]P*|", kinds)[0])
    if base == "UPRMT" and operands[-1] == operands[0]:  # writes one half of a register, and keeps the other
        operands = operands[:-1]
    reads, writes = 0, 0xFF << _FIRST_BIT["P"] if operands[0] == "PR" else 0
    for i, operand in enumerate(operands):
        for context, kind, number in re.findall(r"(\w*\[|)(?<![\w.])(UR|U?P)(\d+)\b", operand):
            first, count, unused = _FIRST_BIT[kind] + int(number), 1, 0
            if kind == "UR" and i < results:
                count = width
            elif kind == "UR":
                is_wide = base in DOUBLE or {"S64", "U64"} & set(suffixes) or ("WIDE" in suffixes and i == results + 2)
                count = {"gdesc[": 4, "desc[": 2, "": width if base == "UIADD3" else 1 + bool(is_wide)}.get(context, 1)
                unused = 2 * (context == "gdesc[" and operands[1].startswith("R"))  # of a wgmma with A in registers
            mask = (1 << count) - (1 << unused) << first
            reads, writes = (reads, writes | mask) if i < results else (reads | mask, writes)
    return reads, writes
