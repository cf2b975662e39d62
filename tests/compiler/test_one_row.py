"""A product of one row that has a bias is written in its parts too, where torch writes those without one so."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.nn.functional import linear

from tcdeploy.compiler import one_row
from tests.compiler.rewriting import rewritten

ADDMM, MM, SUM = torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.sum.dim_IntList
CUT, MEAN = torch.ops.aten.as_strided.default, torch.ops.aten.mean.dim
torch.manual_seed(11)
WEIGHT, BIAS, GAIN = torch.randn(96, 64).bfloat16() / 8, torch.randn(96).bfloat16(), torch.randn(64).bfloat16()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch writes a product of one row in its parts under coordinate descent."""
    monkeypatch.setattr(one_row, "DEVICES", {"cpu"})


def row(rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(12)
    return torch.randn(1, rows, 64, dtype=dtype)


def biased(x: Tensor) -> Tensor:
    return torch.sigmoid(linear(torch.relu(x), WEIGHT.to(x.dtype), BIAS.to(x.dtype)))


def thirds(x: Tensor) -> Tensor:
    packed = linear(torch.relu(x), WEIGHT, BIAS)
    first, second, third = (packed[..., start : start + 32].view(1, 4, 8).transpose(0, 1) for start in (0, 32, 64))
    return first + second * third


def normalised(x: Tensor) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * GAIN
    return linear(normed, WEIGHT, BIAS)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_product_with_a_bias_is_a_reduction_like_those_without() -> None:
    with inductor_config.patch(coordinate_descent_tuning=True):
        found = rewritten(biased, row())
        assert (found[ADDMM], found[MM], found[SUM]) == (0, 0, 1)
        found = rewritten(thirds, row())
        assert (found[ADDMM], found[SUM], found[CUT]) == (0, 1, 3), "its slices are cut out of what is stored"
        found = rewritten(normalised, row(), fuses=True)
        assert (found[ADDMM], found[SUM], found[MEAN]) == (0, 2, 0), "and its norm folds"


@pytest.mark.usefixtures("on_a_gpu")
def test_several_rows_other_dtypes_and_no_descent_stay_with_cublas() -> None:
    assert rewritten(biased, row())[ADDMM] == 1, "no descent"
    with inductor_config.patch(coordinate_descent_tuning=True):
        assert rewritten(biased, row(2))[ADDMM] == 1
        assert rewritten(biased, row(dtype=torch.float32))[ADDMM] == 1


def test_a_cpu_keeps_its_own_products() -> None:
    with inductor_config.patch(coordinate_descent_tuning=True):
        assert rewritten(biased, row())[ADDMM] == 1
