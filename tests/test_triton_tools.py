"""The Triton interpreter patches must not outlive their context."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch.testing import assert_close
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tcdeploy.kernels.attention import prefill
from tests.triton_tools import triton_interpreter


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
