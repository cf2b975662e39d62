"""Arguments of custom ops that packages cannot pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.custom_op import custom_op


def test_an_op_cannot_take_an_enumeration_of_torch() -> None:
    def to_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        return x.to(dtype)

    with pytest.raises(TypeError, match="tcdeploy::to_dtype_of_test takes a ScalarType"):
        custom_op("to_dtype_of_test")(to_dtype)
    assert not hasattr(torch.ops.tcdeploy, "to_dtype_of_test")
