"""The KV write kernel stores each token in its slot and touches no other slot."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tcdeploy.kernels.attention import prefill
from tests.kernels.attention.paged import Case, some_models
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    record_launches,
    shared_memory_on_hopper,
    specialization_key,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "v_head_dim"),
    [(2, 64, 64), (3, 96, 32), (1, 32, 80), (40, 128, 128)],
    ids=["plain", "values smaller", "values larger", "more heads than one program writes"],
)
def test_each_token_is_written_to_its_slot_and_no_other(kv_heads, head_dim, v_head_dim, dtype, device):
    slots = torch.tensor([5, 63, 0, 31, 32], device=device)
    packed = torch.randn(5, 7 + kv_heads * (head_dim + v_head_dim)).to(dtype).to(device)
    k, v = packed[:, 7:].split([kv_heads * head_dim, kv_heads * v_head_dim], dim=1)
    k, v = k.unflatten(1, (kv_heads, head_dim)), v.unflatten(1, (kv_heads, v_head_dim))
    caches = [torch.full((4, 16, *x.shape[1:]), float("nan"), dtype=dtype, device=device) for x in (k, v)]
    expected_caches = [cache.clone() for cache in caches]
    for cache, new in zip(expected_caches, (k, v), strict=True):
        cache.flatten(0, 1)[slots] = new
    prefill.write_kv(k, v, *caches, slots)
    assert_close(caches, expected_caches, equal_nan=True, atol=0, rtol=0)


def test_one_launch_writes_keys_and_values(device, monkeypatch):
    launches = record_launches(monkeypatch)
    k, cache = torch.randn(3, 2, 32, device=device), torch.zeros(2, 16, 2, 32, device=device)
    prefill.write_kv(k, k, cache, cache.clone(), torch.arange(3, device=device))
    assert [recorded.kernel for recorded in launches] == [prefill.WRITE_KERNEL.function]


# No kernel runs below.


def launch(case: Case, batch: int) -> None:
    """Launch the kernel once, on zeros. With an odd batch the slots start at an unaligned address."""
    slots = torch.zeros(2 * batch, dtype=torch.int64)[batch % 2 :][:batch]
    dims = case.head_dim, case.v_head_dim or case.head_dim
    caches = [torch.zeros(1, case.block_size, case.kv_heads, dim, dtype=case.dtype) for dim in dims]
    k, v = (cache[0, :1].expand(batch, -1, -1) for cache in caches)
    prefill.write_kv(k, v, *caches, slots)


@some_models
def test_the_kernel_compiles_for_hopper_and_fits_its_shared_memory(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch(case, batch=1)
    assert [recorded.kernel for recorded in launches] == [prefill.WRITE_KERNEL.function]
    assert shared_memory_on_hopper(launches[0]) <= HOPPER_SHARED_BYTES


def test_another_batch_does_not_recompile(monkeypatch):
    launches = record_launches(monkeypatch)
    for batch in (1, 2, 3, 16, 17, 33):
        launch(Case(head_dim=128, group=4, dtype=torch.bfloat16), batch)
    assert len(launches) == 6
    assert len({specialization_key(recorded) for recorded in launches}) == 1
