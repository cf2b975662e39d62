"""The arithmetic of sampling that every backend repeats bit by bit: weights, random numbers and logarithms.

A token that is drawn on a GPU must be the token that is drawn on a CPU, so the libraries' exponentials and logarithms,
which differ in the last bits, are not used. These functions consist of IEEE additions, multiplications and divisions
in float64, in a fixed order, and of integer operations. A backend must not contract a multiplication and an addition
into one operation. The Triton kernels use the same constants and the same order: `_relative_weights` in
row_kernels.py, `_uniform` in sample_kernels.py, `_natural_log` in logprob_kernels.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = 1 / math.log(2)
LN_2 = math.log(2)
SMALLEST_EXPONENT = -64.0  # of a weight; 2^-64 is below one unit for every vocabulary
ROUNDING = 1.5 * 2.0**52  # added to a small float64, leaves it rounded to an integer in the lowest bits
# 2^f = 1 + f * (C[0] + C[1] f + ...) for f in -1/2 to 1/2: interpolation at nine Chebyshev nodes, relative error below
# 4e-14.
EXP2_COEFFICIENTS = (
    0.6931471805599453, 0.2402265069581299, 0.055504108664760424, 0.009618129159402558, 0.0013333558179043112,
    0.00015403455452853838, 1.525268684626772e-05, 1.3255224878668817e-06, 1.0203121063391729e-07,
)  # fmt: skip
CACHED_ELEMENTS = 32768  # float64 values that fit in a CPU core's cache; also the least that torch gives to a thread
LOG_TERMS = 10  # of the series of the logarithm: an error below 1e-16
SQRT_2 = math.sqrt(2)


def relative_weights(scores: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """exp((score - top) / temperature) in float64, of scores [n, vocab] with the row maxima `top` [n, 1] float64.

    `temperature` [n, 1] float64 is above 0. The result [n, vocab] float64 is 1 for the top score, and at least 2^-64.
    Relative error: below 1e-13, plus 1e-16 times the exponent, because the scaled difference is rounded.
    """
    scale = LOG2_E / temperature
    if scores.is_cuda:
        return _exp2((scores - top).mul_(scale))
    weights = torch.empty(scores.shape, dtype=torch.float64)
    columns = max(1, CACHED_ELEMENTS * torch.get_num_threads() // len(scores))
    for part, source in zip(weights.split(columns, dim=1), scores.split(columns, dim=1), strict=True):
        part.copy_(_exp2((source - top).mul_(scale)))
    return weights


def _exp2(exponents: Tensor) -> Tensor:
    """2 to the power of float64 exponents of at most 0, in a fixed order of operations. Overwrites them."""
    fraction = exponents.clamp_(min=SMALLEST_EXPONENT)
    shifted = fraction + ROUNDING
    fraction -= shifted - ROUNDING
    power = fraction * EXP2_COEFFICIENTS[-1]
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        power.add_(coefficient).mul_(fraction)
    power.add_(1.0)
    return power.view(torch.int64).add_(shifted.view(torch.int64) << 52).view(torch.float64)  # times 2^round(exponent)


def unit_bits(vocab_size: int) -> int:
    """A weight of 1 has 2 to the power of this many integer units, so that a vocabulary's sum stays below 2^62."""
    return 62 - vocab_size.bit_length()


def to_units(weights: Tensor) -> Tensor:
    """Weights [n, vocab] float64 in [0, 1] as integer units, rounded down."""
    return (weights * 2.0 ** unit_bits(weights.shape[1])).long()


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each seed and position, [n] float64 with 53 random bits.

    SplitMix64 (Steele, Lea, Flood 2014), with its constants as signed numbers, as int64 arithmetic wraps. The streams
    of seeds that differ by up to 2^20 start at least 2^40 steps apart.
    """
    bits = seeds * -0x2ECBDABC217D106B + positions * -0x61C8864680B583EB
    bits = (bits ^ _logical_shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _logical_shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return _logical_shift_right(bits ^ _logical_shift_right(bits, 31), 11).double() * 2.0**-53


def _logical_shift_right(bits: Tensor, by: int) -> Tensor:
    """A logical right shift; torch's `>>` on int64 is arithmetic."""
    return (bits >> by) & (2 ** (64 - by) - 1)


def natural_log(values: Tensor) -> Tensor:
    """The logarithm of normal positive float64 numbers, as 2 atanh((m - 1) / (m + 1)) + e ln 2; error below 1e-15."""
    bits = values.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & (2**52 - 1)) | (1023 << 52)).view(torch.float64)
    is_large = mantissa > SQRT_2
    mantissa = torch.where(is_large, mantissa * 0.5, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.zeros_like(ratio)
    for term in range(LOG_TERMS, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return ratio * series * 2.0 + (exponent + is_large).double() * LN_2


def sortable(scores: Tensor) -> Tensor:
    """Integers [n, vocab] int64 that order float32 scores as numbers, and NaN above all; equal for 0.0 and -0.0."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(scores.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
