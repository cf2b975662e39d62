"""The values of every type of blocks in GGUF: by llama.cpp's definition, by gguf, and as the product computes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tcdeploy.models.weights.gguf_file import TYPES_BY_NAME
from tcdeploy.models.weights.gguf_values import DECODERS, gguf_values, q4_0_nibbles
from tests.formats.gguf_blocks import SIZES, decode, random_blocks


@pytest.mark.parametrize("kind", SIZES)
def test_the_values_of_a_type_are_those_of_the_definition(kind: str) -> None:
    blocks = random_blocks(kind, 3, 512)
    values = gguf_values([blocks], kind)
    assert values.dtype == torch.float32 and values.shape == (3, 512)
    assert torch.equal(values, decode(kind, blocks))
    assert len(values.unique()) > 50


@pytest.mark.parametrize("kind", SIZES)
def test_the_values_of_a_type_are_those_of_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks, number = random_blocks(kind, 3, 512), gguf.GGMLQuantizationType[kind]
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), number).copy())
    assert torch.equal(gguf_values([blocks], kind), expected)
    assert gguf.GGML_QUANT_SIZES[number] == SIZES[kind]
    assert (TYPES_BY_NAME[kind].columns, TYPES_BY_NAME[kind].num_bytes) == SIZES[kind]


def test_every_type_of_blocks_has_a_definition() -> None:
    assert DECODERS.keys() == SIZES.keys() == {name for name, kind in TYPES_BY_NAME.items() if not kind.dtype}


def test_chunks_and_leading_dimensions_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks("Q5_1", 6, 512)
    expected = gguf_values([blocks], "Q5_1")
    monkeypatch.setattr("tcdeploy.models.weights.gguf_values.CHUNK_VALUES", 96)
    assert torch.equal(gguf_values([blocks.view(2, 3, -1)], "Q5_1"), expected.view(2, 3, 512))


def test_nibbles_of_q4_0_are_packed_in_the_order_of_columns() -> None:
    row = torch.tensor([[0, 60, *(code | (15 - code) << 4 for code in range(16))]], dtype=torch.uint8)
    assert decode("Q4_0", row).tolist() == [[*range(-8, 8), *range(7, -9, -1)]]
    assert q4_0_nibbles([row]).tolist() == [
        [low | low + 1 << 4 for low in range(0, 16, 2)] + [high | high - 1 << 4 for high in range(15, 0, -2)]
    ]


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scale off": lambda blocks: torch.cat([blocks[:, :1], blocks[:, 1:2] ^ 1, blocks[:, 2:]], 1),
    "minimum dropped": lambda blocks: torch.cat([blocks[:, :2], blocks[:, 2:4] * 0, blocks[:, 4:]], 1),
    "order of nibbles": lambda blocks: torch.cat([blocks[:, :16], blocks[:, 16:] >> 4 | blocks[:, 16:] << 4], 1),
    "scales of other sub-blocks": lambda blocks: torch.cat([blocks[:, :4], blocks[:, 4:16].flip(1), blocks[:, 16:]], 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_block_changes_its_values(fault: str) -> None:
    """So the comparison above cannot pass by chance."""
    blocks = random_blocks("Q4_K", 1, 256)
    assert not torch.equal(gguf_values([FAULTS[fault](blocks)], "Q4_K"), decode("Q4_K", blocks))
