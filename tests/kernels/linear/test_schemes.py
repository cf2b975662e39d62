"""The schemes of the package: their tensors have the values of a format's definition, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.kernels.linear import fp4_scheme
from tcdeploy.kernels.linear.int4_scheme import SCALE_DTYPES
from tcdeploy.kernels.linear.scheme_linear import scheme_linear
from tcdeploy.kernels.linear.scheme_values import pack_nibbles, unpack_nibbles
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.planning.schemes import SCHEMES, Shape, int4_scheme_name

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E2M1_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]  # by code
# The largest error of a quantised weight, as a share of the largest element of the row.
LARGEST_ERRORS = {"fp8": 1 / 27, "int8": 1 / 250, "int4": 1 / 13, "mxfp4": 1 / 3, "nvfp4": 1 / 5}
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
each_scheme = pytest.mark.parametrize("name", SCHEMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def dequantise(name: str, *tensors: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return SCHEMES[name].dequantise(tensors, dtype)


def random_weight(rows: int, columns: int) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, columns) * torch.logspace(-2, 1, rows)[:, None]


def test_the_names_are_those_that_checkpoints_are_converted_to() -> None:
    int4 = {
        f"int4_{dtype}{suffix}"
        for dtype in ("float16", "bfloat16", "float32")
        for suffix in ("", "_zeros", "_permuted", "_zeros_permuted", "_interleaved", "_permuted_interleaved")
    }
    assert set(SCHEMES) == {"fp8_channel", "fp8_block", "int8", "mxfp4", "nvfp4"} | int4
    assert {name: scheme.name for name, scheme in SCHEMES.items()} == {name: name for name in SCHEMES}
    assert int4_scheme_name("bfloat16", True, True) == "int4_bfloat16_zeros_permuted"


# Values


@each_dtype
def test_fp8_has_one_scale_for_each_row(dtype: torch.dtype) -> None:
    """448 is e4m3's largest value, 2**-9 its smallest and 2**-6 its smallest normal one."""
    weight = torch.tensor([[448, -448, 2**-9, 2**-6], [0.4375, -0.0, 1.125, 15]]).to(FP8)
    expected = torch.tensor([[224, -224, 2**-10, 2**-7], [1.75, -0.0, 4.5, 60]], dtype=dtype)
    assert torch.equal(dequantise("fp8_channel", weight, torch.tensor([0.5, 4]), dtype=dtype), expected)


def test_fp8_blocks_at_the_ends_are_partial() -> None:
    weight, scale = torch.full((130, 260), 3.0), torch.tensor([[1.0, 2, 4], [8, 16, 32]])
    expected = torch.empty(130, 260)
    for row in range(130):
        for column in range(260):
            expected[row, column] = 3 * scale[row // 128, column // 128]
    assert torch.equal(dequantise("fp8_block", weight.to(FP8), scale), expected)
    assert torch.equal(dequantise("fp8_block", weight[:1, :1].to(FP8), scale[:1, :1]), torch.tensor([[3.0]]))


@each_dtype
def test_int8_has_one_scale_for_each_group_of_a_row(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1, 2, 3, -128], [127, -1, 0, 5]], dtype=torch.int8)
    scale = torch.tensor([[0.5, 2], [1, 0.25]])
    expected = torch.tensor([[0.5, 1, 6, -256], [127, -1, 0, 1.25]], dtype=dtype)
    assert torch.equal(dequantise("int8", weight, scale, dtype=dtype), expected)
    per_row = torch.tensor([[0.5, 1, 1.5, -64], [508, -4, 0, 20]], dtype=dtype)
    assert torch.equal(dequantise("int8", weight, torch.tensor([[0.5], [4]]), dtype=dtype), per_row)


def test_the_even_column_is_in_the_low_nibble() -> None:
    packed = torch.tensor([[0x10, 0xFE], [0x8F, 0x07]], dtype=torch.uint8)
    codes = torch.tensor([[0, 1, 14, 15], [15, 8, 7, 0]], dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(packed), codes)
    assert torch.equal(pack_nibbles(codes), packed)


@each_dtype
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_int4_subtracts_the_zero_point_before_it_scales(scale_dtype: str, dtype: torch.dtype) -> None:
    codes = torch.tensor([[0, 15, 8, 7], [1, 2, 0, 15]], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2], [1, 4]], dtype=getattr(torch, scale_dtype))
    name, packed = int4_scheme_name(scale_dtype, False, False), pack_nibbles(codes)
    expected = torch.tensor([[-4, 3.5, 0, -2], [-7, -6, -32, 28]], dtype=dtype)
    assert torch.equal(dequantise(name, packed, scale, dtype=dtype), expected)
    zeros = torch.tensor([[0, 8], [15, 16]], dtype=torch.uint8)
    expected = torch.tensor([[0, 7.5, 0, -2], [-14, -13, -64, -4]], dtype=dtype)
    name = int4_scheme_name(scale_dtype, True, False)
    assert torch.equal(dequantise(name, packed, scale, zeros, dtype=dtype), expected)


def test_column_j_of_the_stored_matrix_is_column_columns_j_of_the_weight() -> None:
    codes, scale = torch.tensor([[9, 10, 11, 12]], dtype=torch.uint8), torch.tensor([[1.0, 10]])
    columns = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    weight = dequantise("int4_float32_permuted", pack_nibbles(codes), scale, columns)
    assert torch.equal(weight, torch.tensor([[2.0, 40, 1, 30]]))
    x, stored = torch.tensor([[1.0, 2, 3, 4]]), dequantise("int4_float32", pack_nibbles(codes), scale)
    assert torch.equal(x @ weight.T, x[:, columns] @ stored.T)
    zeros = torch.tensor([[9, 12]], dtype=torch.uint8)
    weight = dequantise("int4_float32_zeros_permuted", pack_nibbles(codes), scale, zeros, columns)
    assert torch.equal(weight, torch.tensor([[1.0, 0, 0, -10]]))


@each_dtype
def test_each_code_of_e2m1_has_its_value(dtype: torch.dtype) -> None:
    codes, values = torch.arange(16, dtype=torch.uint8), torch.tensor(E2M1_VALUES, dtype=dtype)
    assert torch.equal(fp4_scheme.decode(codes, dtype), values)
    assert torch.equal(fp4_scheme.decode(codes, dtype).signbit(), values.signbit())
    assert torch.equal(fp4_scheme.encode(values.float()), codes)


def test_e2m1_rounds_to_the_nearest_value() -> None:
    values = torch.tensor([0.24, 0.26, -0.74, 0.76, 1.24, 1.26, 1.74, 1.76, 2.4, -2.6, 3.4, 3.6, 4.9, 5.1, 99])
    expected = torch.tensor([0, 0.5, -0.5, 1, 1, 1.5, 1.5, 2, 2, -3, 3, 4, 4, 6, 6])
    assert torch.equal(fp4_scheme.decode(fp4_scheme.encode(values), torch.float32), expected)


@each_dtype
def test_mxfp4_scales_by_a_power_of_two(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 4)
    exponents = torch.tensor([[127, 128], [121, 135]], dtype=torch.uint8)
    values = torch.tensor(E2M1_VALUES, dtype=dtype).repeat(2)
    expected = torch.stack([torch.cat([values, values * 2]), torch.cat([values / 64, values * 256])])
    assert torch.equal(dequantise("mxfp4", pack_nibbles(codes), exponents, dtype=dtype), expected)
    extremes = torch.tensor([[0, 254]], dtype=torch.uint8)
    weight = dequantise("mxfp4", pack_nibbles(torch.full((1, 64), 2, dtype=torch.uint8)), extremes)
    assert weight[0, 0] == 2.0**-127 and weight[0, 32] == 2.0**127


@each_dtype
def test_nvfp4_scales_groups_of_16_and_rows(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
    scale = torch.tensor([[1, 448], [2**-9, 1.125]]).to(FP8)
    values = torch.tensor(E2M1_VALUES, dtype=dtype)
    expected = torch.stack([torch.cat([values / 4, values * 112]), torch.cat([values / 64, values * 9])])
    weight = dequantise("nvfp4", pack_nibbles(codes), scale, torch.tensor([0.25, 8]), dtype=dtype)
    assert torch.equal(weight, expected)


def test_small_scales_of_a_float16_weight_are_not_rounded_to_float16() -> None:
    """3 * 2**-26 would be 2**-24 in float16, and the weight 0.008 percent of what it is."""
    weight = dequantise("fp8_channel", torch.tensor([[256.0]]).to(FP8), torch.tensor([3 * 2.0**-26]), dtype=torch.half)
    assert weight.dtype == torch.float16 and weight.item() == 3 * 2.0**-18
    codes, scale = torch.full((1, 16), 7, dtype=torch.uint8), torch.tensor([[256.0]]).to(FP8)
    weight = dequantise("nvfp4", pack_nibbles(codes), scale, torch.tensor([3 * 2.0**-26]), dtype=torch.half)
    assert weight[0, 0].item() == 18 * 2.0**-18


# Random weights


@each_scheme
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (24, 256), (130, 192)])
def test_a_quantised_weight_is_near_the_weight_and_quantises_to_itself(name: str, rows: int, columns: int) -> None:
    columns = columns if "interleaved" not in name else columns * 2
    scheme, weight = SCHEMES[name], random_weight(rows, columns)
    tensors = scheme.quantise(weight)
    assert scheme.dense_shape([tuple(tensor.shape) for tensor in tensors]) == (rows, columns)
    for tensor, item in zip(tensors, scheme.tensors, strict=True):
        assert tensor.dtype == getattr(torch, item.dtype)
        assert item.fits(tuple(tensor.shape), rows, columns) and tensor.is_contiguous()
    dequantised = scheme.dequantise(tensors, torch.float32)
    largest = weight.abs().amax() if name == "fp8_block" else weight.abs().amax(1, keepdim=True)
    error = ((dequantised - weight).abs() / largest).max()
    assert 0 < error < LARGEST_ERRORS[name.partition("_")[0]]
    again = scheme.dequantise(scheme.quantise(dequantised), torch.float32)
    assert ((again - dequantised).abs() / largest).max() <= (error if "zeros" in name else 1e-6)


@each_scheme
def test_a_weight_of_zeros_stays_zeros(name: str) -> None:
    scheme = SCHEMES[name]
    assert torch.equal(scheme.dequantise(scheme.quantise(torch.zeros(16, 64)), torch.float32), torch.zeros(16, 64))


@each_scheme
def test_fake_weights_are_quantised_and_multiplied(name: str) -> None:
    scheme = SCHEMES[name]
    real = scheme.quantise(random_weight(16, 256))
    with FakeTensorMode() as mode:
        weight, x = torch.empty(16, 256, dtype=torch.bfloat16), torch.empty(2, 3, 256, dtype=torch.bfloat16)
    for context in (mode, torch.no_grad()):  # in the mode, as models are made, and outside it
        with context:
            tensors = scheme.quantise(weight)
    assert [(item.shape, item.dtype) for item in tensors] == [(item.shape, item.dtype) for item in real]
    out = scheme_linear(x, list(tensors), None, name)
    assert out.shape == (2, 3, 16) and out.dtype == torch.bfloat16 and out.is_contiguous()


# Shapes


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("fp8_channel", [(8,), (8,)]),
        ("fp8_block", [(8, 128, 1), (1, 1)]),
        ("int8", [(8, 128), (8,)]),
        ("int8", [(8, 128), (8, 3)]),
        ("int8", [(8, 128), (8, 0)]),
        ("int4_float16", [(8, 64), (8, 3)]),
        ("int4_float16", [(8, 0), (8, 1)]),
        ("int4_float16_zeros", [(8, 64), (8, 2), (8, 1)]),
        ("int4_float16_permuted", [(8, 64), (8, 2), (64,)]),
        ("int4_float16_zeros_permuted", [(8, 64), (8, 2), (8, 2), (129,)]),
        ("mxfp4", [(8, 24), (8, 2)]),
        ("nvfp4", [(8, 12), (8, 2), (8,)]),
    ],
)
def test_impossible_shapes_are_errors(name: str, shapes: list[Shape]) -> None:
    with pytest.raises((ValueError, IndexError)):
        SCHEMES[name].dense_shape(shapes)


@pytest.mark.parametrize(
    ("name", "shapes", "is_possible"),
    [
        ("fp8_block", [(130, 260), (2, 3)], True),
        ("fp8_block", [(130, 260), (1, 3)], False),
        ("fp8_block", [(130, 260), (2, 2)], False),
        ("fp8_channel", [(8, 128), (8, 1)], False),
        ("int8", [(8, 128), (8, 4)], True),
        ("int8", [(8, 128), (7, 4)], False),
        ("mxfp4", [(8, 32), (8, 2)], True),
        ("mxfp4", [(8, 32), (8, 4)], False),
        ("nvfp4", [(8, 32), (8, 4), (1,)], False),
    ],
)
def test_each_tensor_must_fit_the_dense_shape(name: str, shapes: list[Shape], is_possible: bool) -> None:
    rows, columns = SCHEMES[name].dense_shape(shapes)
    fits = [item.fits(shape, rows, columns) for item, shape in zip(SCHEMES[name].tensors, shapes, strict=True)]
    assert all(fits) == is_possible


# Layers and the op


@each_scheme
def test_layers_that_are_packed_have_the_values_that_they_had_apart(name: str) -> None:
    scheme = SCHEMES[name]
    rows = (128, 256) if name == "fp8_block" else (48, 16)
    weights = [random_weight(count, 128) for count in rows]
    layers = nn.ModuleDict(
        {f"l{index}": SchemeLinear(scheme, scheme.quantise(weight), None) for index, weight in enumerate(weights)}
    )
    before = [layer.dequantised(torch.float32) for layer in layers.values()]
    pack_linears(layers, (("l0", "l1"),))
    assert (layers["l0"].weight is layers["l1"].weight) == ("permuted" not in name)
    for layer, expected in zip(layers.values(), before, strict=True):
        assert torch.equal(layer.dequantised(torch.float32), expected)
    if "permuted" not in name:
        assert torch.equal(scheme.dequantise(layers["l0"].tensors, torch.float32), torch.cat(before))


def test_layers_whose_blocks_are_partial_are_not_packed() -> None:
    scheme = SCHEMES["fp8_block"]
    layers = nn.ModuleDict({name: SchemeLinear(scheme, scheme.quantise(random_weight(64, 128)), None) for name in "ab"})
    pack_linears(layers, (("a", "b"),))
    assert layers["a"].weight is not layers["b"].weight


def test_layers_with_groups_of_different_sizes_are_not_packed() -> None:
    scheme, weight = SCHEMES["int8"], torch.ones(4, 8, dtype=torch.int8)
    layers = nn.ModuleDict(
        {f"l{groups}": SchemeLinear(scheme, [weight, torch.ones(4, groups)], None) for groups in (2, 4)}
    )
    pack_linears(layers, (("l2", "l4"),))
    assert layers["l2"].weight is not layers["l4"].weight


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # one dtype per scheme by default, in turns
        pytest.param(
            name, DTYPES[index], marks=pytest.mark.long if (number + index) % 2 else (), id=f"{name}-{DTYPES[index]}"
        )
        for number, name in enumerate(SCHEMES)
        for index in range(2)
    ],
)
def test_opcheck_passes(name: str, dtype: torch.dtype) -> None:
    tensors = list(SCHEMES[name].quantise(random_weight(16, 128)))
    weight = SCHEMES[name].dequantise(tensors, torch.float32)
    has_fp8 = any(tensor.dtype == FP8 for tensor in tensors)
    checks = OPCHECKS[1:] if has_fp8 else OPCHECKS  # test_schema compares tensors by an op that float8 lacks
    for x, bias in ((torch.randn(5, 128), None), (torch.randn(2, 3, 128), torch.randn(16))):
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        torch.library.opcheck(scheme_linear.overload, (x, tensors, bias, name), test_utils=checks)
        expected = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2.0}
        assert_close(scheme_linear(x, tensors, bias, name).float(), expected, **tolerance)
