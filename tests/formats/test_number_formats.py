"""Numbers of few bits are rounded and packed as their formats define them, by exact values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.formats.number_formats import (
    code_at,
    e2m1,
    e4m3,
    e8m0,
    e8m0_codes,
    fp4_codes,
    fp4_floats,
    pack_bits,
    powers_of_two,
    to_fp8_blocks,
    to_integers,
    to_mxfp4,
    to_nvfp4,
)


@pytest.mark.parametrize(("value_of", "dtype"), [(e4m3, torch.float8_e4m3fn), (e8m0, torch.float8_e8m0fnu)])
def test_every_code_of_eight_bits_has_the_value_that_torch_casts_it_to(
    value_of: Callable[[int], float], dtype: torch.dtype
) -> None:
    for code, value in enumerate(torch.arange(256).to(torch.uint8).view(dtype).float().tolist()):
        assert value_of(code) == value or math.isnan(value) and math.isnan(value_of(code))


def test_fp4_has_eight_sizes_with_a_sign() -> None:
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [e2m1(code) for code in range(16)] == [*sizes, *(-size for size in sizes)]
    codes = torch.arange(16, dtype=torch.uint8)
    assert fp4_floats(codes).tolist() == [e2m1(code) for code in range(16)]
    assert fp4_codes(torch.tensor([-6.9, -0.6, 0.2, 5.2])).tolist() == [15, 9, 0, 7]


WORDS = [(2, [0xE4E4]), (3, [0xFAC688]), (4, [0x76543210]), (8, [0x3020100, 0x7060504])]


@pytest.mark.parametrize(("bits", "words"), WORDS)
def test_codes_are_a_stream_of_bits_from_the_lowest(bits: int, words: list[int]) -> None:
    codes = torch.arange(8) % 2**bits
    assert pack_bits(codes[None], bits, 1).tolist() == [words]
    assert pack_bits(codes[:, None], bits, 0).T.tolist() == [words]
    assert [code_at(words, index, bits) for index in range(8)] == codes.tolist()


def test_a_code_may_lie_across_two_words() -> None:
    codes = torch.zeros(1, 32, dtype=torch.long)
    codes[0, 10] = 5  # the bits 30 to 32
    assert pack_bits(codes, 3, 1).tolist() == [[1 << 30, 1, 0]]


def test_a_symmetric_weight_has_the_zero_point_in_the_middle() -> None:
    integers = to_integers(torch.tensor([[-7.5, 7.5, 1.0, 0.0]]), 4, -1, True, torch.float32)
    assert (integers.scales.item(), integers.zeros.item()) == (1.0, 8)
    assert integers.codes.tolist() == [[0, 15, 9, 8]] and integers.weight.tolist() == [[-8, 7, 1, 0]]


def test_an_asymmetric_weight_uses_all_codes() -> None:
    integers = to_integers(torch.tensor([[-3.0, 12.0, 0.0, 5.0]]), 4, 2, False, torch.float32)
    assert integers.zeros.tolist() == [[3, 0]] and integers.groups.tolist() == [0, 0, 1, 1]
    assert integers.codes.tolist() == [[0, 15, 0, 15]] and integers.weight[0, :2].tolist() == [-3, 12]


def test_columns_of_a_group_may_be_apart() -> None:
    weight = torch.tensor([[7.5, 75.0, -7.5, -75.0]])
    integers = to_integers(weight, 4, 2, True, torch.float32, torch.tensor([0, 1, 0, 1]))
    assert integers.scales.tolist() == [[1, 10]] and integers.weight.tolist() == [[7, 70, -8, -80]]


def test_a_block_at_the_edge_has_its_own_scale() -> None:
    stored = to_fp8_blocks(torch.tensor([[448.0, 1.0, 896.0]]), 2, 2, torch.clone)
    assert stored.scale.tolist() == [[1, 2]] and stored.weight.tolist() == [[448, 1, 896]]


def test_scales_of_mx_formats_are_powers_of_two() -> None:
    assert powers_of_two(torch.tensor([0.3, 0.5, 3.0])).tolist() == [0.5, 0.5, 4]
    assert e8m0_codes(torch.tensor([6.0, 8.0, 0.5]), 2).tolist() == [127, 128, 124]


def test_the_first_fp4_code_is_in_the_low_nibble() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :3], weight[0, 16] = torch.tensor([6.0, 0.5, -1.0]), 3
    stored = to_mxfp4(weight)
    assert stored.packed[0, :2].tolist() == [0x17, 0x0A] and stored.scale.tolist() == [[127]]
    assert torch.equal(stored.weight, weight)
    nvfp4 = to_nvfp4(weight)
    assert nvfp4.packed[0, :2].tolist() == [0x17, 0x0A] and nvfp4.scale.float().tolist() == [[448, 224]]
    assert nvfp4.global_scale is not None and nvfp4.global_scale.item() == pytest.approx(1 / 448)
