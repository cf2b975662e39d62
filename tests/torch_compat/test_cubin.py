"""Cubins are read as NVIDIA's compiler describes them."""

from __future__ import annotations

import functools
import re
import struct
import subprocess
from pathlib import Path

import pytest

from tcdeploy.torch_compat.blind.cubin import architecture, kernel_resources

triton_nvidia = pytest.importorskip("triton.backends.nvidia")
PTX = """
.version 8.4
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 out)
{
    .local .align 4 .b8 frame[64];
    .reg .b64 %rd<4>;
    .reg .b32 %r<4>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 15;
    mul.wide.u32 %rd3, %r2, 4;
    mov.u64 %rd1, frame;
    add.u64 %rd1, %rd1, %rd3;
    st.local.u32 [%rd1], %r1;
    xor.b32 %r2, %r2, 5;
    mul.wide.u32 %rd3, %r2, 4;
    mov.u64 %rd1, frame;
    add.u64 %rd1, %rd1, %rd3;
    ld.local.u32 %r3, [%rd1];
    st.global.u32 [%rd2], %r3;
    ret;
}
"""


@functools.cache
def compiled(name: str) -> tuple[bytes, str]:
    """A kernel with 64 bytes of local memory for an architecture, and what ptxas reports about it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(PTX)
        ptxas = Path(triton_nvidia.__path__[0], "bin", "ptxas")
        command = [str(ptxas), "-v", f"--gpu-name={name}", str(source), "-o", str(target)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return target.read_bytes(), report


@pytest.mark.parametrize(("name", "number"), [("sm_80", 80), ("sm_89", 89), ("sm_90a", 90), ("sm_100a", 100)])
def test_the_architecture_is_that_of_the_compilation(name: str, number: int) -> None:
    assert architecture(compiled(name)[0]) == number


def test_the_architecture_of_cuda_13_is_in_other_bits() -> None:
    cubin = bytearray(compiled("sm_90a")[0])
    for abi, flags in ((7, 0x5A055A), (8, 0x0600_5A02)):
        cubin[8] = abi
        struct.pack_into("<I", cubin, 48, flags)
        assert architecture(bytes(cubin)) == 90


def test_registers_and_spills_are_those_that_the_compiler_reports() -> None:
    cubin, report = compiled("sm_90a")
    registers, frame_bytes = (re.search(rf"(\d+) {unit}", report) for unit in ("registers", "bytes stack frame"))
    assert registers is not None and frame_bytes is not None
    assert int(frame_bytes[1]) == 64
    assert kernel_resources(cubin) == (int(registers[1]), 16)


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x01" + bytes(80), b"//ptx" + bytes(80), b"\x7fELF\x02"])
def test_anything_else_is_no_cubin(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        architecture(content)
