"""Patches of the Triton interpreter do not outlive their context, and descriptors of two swizzles are found in PTX."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch.testing import assert_close
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tcdeploy.kernels.attention import prefill
from tests.triton_tools import addresses_of_two_swizzles, triton_interpreter


def test_the_interpreter_restores_triton() -> None:
    def attributes() -> dict[tuple[str, str], int]:
        owners = [tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter, interpreter.InterpreterBuilder, JITFunction]
        return {(repr(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}

    before = attributes()
    k, cache = torch.randn(3, 2, 32), torch.zeros(2, 16, 2, 32)
    with pytest.MonkeyPatch.context() as patch, triton_interpreter(patch):
        assert attributes() != before
        prefill.write_kv(k, k, cache, cache.clone(), torch.arange(3))
    assert attributes() == before
    assert_close(cache[0, :3], k, atol=0, rtol=0)


def test_descriptors_of_two_swizzles_from_one_address_are_found() -> None:
    ptx = """
    add.s64         %rd1, %rd9, 64;
    or.b64          %rd2, %rd9, 4611686293305294848;
    add.s64         %rd3, %rd9, 4611686293305294850;
    or.b64          %rd4, %rd8, -9223371899415822336;
    """
    assert addresses_of_two_swizzles(ptx) == []
    assert addresses_of_two_swizzles(ptx.replace("%rd8", "%rd9")) == ["descriptors from %rd9"]
