"""How the kernels of quantised weights make values of codes. FORMAT is "int4", "e2m1", "fp8" or "int8".

Instructions limit the kernels of 4-bit weights, so four bytes are converted at a time, with PTX that permutes bytes and
computes with pairs of 16-bit numbers. A code of four bits stands for an integer c between 0 and 31, and its value is
(c - zero) * unit:

- int4: c is the code, the unit is 1, and the zero point is 8 or that of the group.
- e2m1: c is 16 plus twice the value, the unit is 0.5 and the zero point 16. A permutation of bytes whose selectors are
  four codes looks up their magnitudes.

The lowest bit of the mantissa is worth 1 in the number 2**7 of bfloat16, and in 2**10 of float16. So the bits of such a
base, combined with those of c, are the number base + c. One fused multiply-add of a pair then gives two values, which
are exact. In float32, codes become 1 + c / 128, and the sums of products are corrected (`_multiply_tile`).

Triton's interpreter cannot run PTX, so each function also has a plain form, which returns equal values.
"""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments

NEGATIVE_ZEROS = "0x80008000"  # a pair of -0.0, the addend of an fma: GPUs before Hopper have no mul.bf16x2
HAS_PTX = tl.constexpr(not triton.knobs.runtime.interpret)


def _e2m1_bytes(word: str, flags: int) -> str:
    """PTX: c of the first four codes of a word as the bytes of `first`, and of the other four as those of `last`.

    A permutation replicates the top bit of a byte if its selector is 8 or more, so bits 0 to 6 of a byte of `mask` are
    set if its code is negative. `flags`: bits that are set in each byte.
    """
    above = [flags | 16 + magnitude for magnitude in (0, 1, 2, 3, 4, 6, 8, 12)]
    below = [flags | 16 - magnitude for magnitude in (0, 1, 2, 3, 4, 6, 8, 12)]

    def table(values: list[int]) -> str:
        return ", ".join(f"{int.from_bytes(bytes(part), 'little'):#010x}" for part in (values[:4], values[4:]))

    def codes(target: str, source: str) -> str:
        return f"""
            and.b32 digits, {source}, 0x77777777;
            prmt.b32 {target}, {table(above)}, digits;
            prmt.b32 negative, {table(below)}, digits;
            prmt.b32 mask, 0x80808080, 0x80808080, {source};
            lop3.b32 {target}, negative, {target}, mask, 0xE4;
        """

    registers = ".reg .b32 digits, negative, mask, upper;"
    return f"{registers} {codes('first', word)} shr.u32 upper, {word}, 16; {codes('last', 'upper')}"


def _pairs_ptx(format: str, dtype: str) -> str:
    """PTX: the two values of each of four bytes ($4), in one register each ($0 to $3).

    $5 to $8: minus the unit times (base + zero), twice, in the same dtype.
    """
    base, top_byte = {"bf16": (0x43004300, 0x43434343), "f16": (0x64006400, 0x64646464)}[dtype]
    units = {("int4", "bf16"): 0x3F80, ("int4", "f16"): 0x3C00, ("e2m1", "bf16"): 0x3F00, ("e2m1", "f16"): 0x3800}
    lines = [f".reg .b32 first, last, unit; mov.b32 unit, {units[format, dtype] * 0x10001:#x};"]
    if format == "int4":
        lines.append("shr.u32 first, $4, 4;")
        for i in range(4):
            lines.append(f"prmt.b32 $0, $4, first, 0x{4 + i}{4 + i}{i}{i};".replace("$0", f"${i}"))
            lines.append(f"lop3.b32 ${i}, ${i}, 0x000F000F, {base:#x}, 0xEA;")
    else:
        lines.append(_e2m1_bytes("$4", 0))
        for i in range(4):
            lines.append(f"prmt.b32 ${i}, {('first', 'last')[i // 2]}, {top_byte:#x}, {('0x4140', '0x4342')[i % 2]};")
    lines += [f"fma.rn.{dtype}x2 ${i}, ${i}, unit, ${5 + i};" for i in range(4)]
    return "{" + " ".join(lines) + "}"


def _fragments_ptx(dtype: str, has_scale: bool) -> str:
    """PTX: the values of codes i and i + 4 of a word ($4), for i from 0 to 3, as a pair in the register $i.

    $5: a pair of -8 - base in the same dtype. $6, if has_scale: a pair of the factor of the values.
    """
    base, unit = {"bf16": (0x43004300, 0x3F803F80), "f16": (0x64006400, 0x3C003C00)}[dtype]
    lines = [f".reg .b32 second, third, fourth, unit, zeros; mov.b32 unit, {unit:#x}; mov.b32 zeros, {NEGATIVE_ZEROS};"]
    sources = ("$4", "second", "third", "fourth")
    lines += [f"shr.u32 {sources[i]}, $4, {4 * i};" for i in (1, 2, 3)]
    lines += [f"lop3.b32 ${i}, {sources[i]}, 0x000F000F, {base:#x}, 0xEA;" for i in range(4)]
    lines += [f"fma.rn.{dtype}x2 ${i}, ${i}, unit, $5;" for i in range(4)]
    lines += [f"fma.rn.{dtype}x2 ${i}, ${i}, $6, zeros;" for i in range(4) if has_scale]
    return "{" + " ".join(lines) + "}"


def _fp8_fragments_ptx(dtype: str) -> str:
    """PTX: the values of codes 0 and 1 of a word ($2) as a pair in the register $0, and those of codes 2 and 3 in $1.

    The sign of a code is extended to 16 bits. Shifted, its exponent and mantissa are the lowest bits of an exponent and
    the highest of a mantissa of the dtype, so that a factor makes the value, of subnormal codes too.
    """
    shift, mask, factor = {"bf16": (4, 0x87F087F0, 0x7B807B80), "f16": (7, 0xBF80BF80, 0x5C005C00)}[dtype]
    lines = [f".reg .b32 factor, zeros; mov.b32 factor, {factor:#x}; mov.b32 zeros, {NEGATIVE_ZEROS};"]
    for i, selector in enumerate(("0x9180", "0xB3A2")):
        lines.append(f"prmt.b32 ${i}, $2, 0, {selector}; shl.b32 ${i}, ${i}, {shift}; and.b32 ${i}, ${i}, {mask:#x};")
        lines.append(f"fma.rn.{dtype}x2 ${i}, ${i}, factor, zeros;")
    return "{" + " ".join(lines) + "}"


def _floats_ptx(format: str) -> str:
    """PTX: 1 + c / 128 in float32 of the low ($0 to $3) and the high ($4 to $7) codes of four bytes ($8)."""
    lines = [".reg .b32 first, last;"]
    if format == "int4":
        lines.append("lop3.b32 first, $8, 0x0F0F0F0F, 0x80808080, 0xEA;")
        lines.append("shr.u32 last, $8, 4;")
        lines.append("lop3.b32 last, last, 0x0F0F0F0F, 0x80808080, 0xEA;")
        sources = [(word, byte) for word in ("first", "last") for byte in range(4)]
    else:
        lines.append(_e2m1_bytes("$8", 0x80))
        sources = [(word, byte) for half in (0, 1) for word in ("first", "last") for byte in (half, half + 2)]
    lines += [f"prmt.b32 ${i}, {word}, 0x3F, 0x4{byte}55;" for i, (word, byte) in enumerate(sources)]
    return "{" + " ".join(lines) + "}"


_INT4_FLOATS, _E2M1_FLOATS = tl.constexpr(_floats_ptx("int4")), tl.constexpr(_floats_ptx("e2m1"))
_INT4_BF16, _INT4_F16 = tl.constexpr(_pairs_ptx("int4", "bf16")), tl.constexpr(_pairs_ptx("int4", "f16"))
_FRAGMENTS_BF16, _FRAGMENTS_F16 = (
    tl.constexpr(_fragments_ptx("bf16", False)),
    tl.constexpr(_fragments_ptx("f16", False)),
)
_SCALED_BF16, _SCALED_F16 = tl.constexpr(_fragments_ptx("bf16", True)), tl.constexpr(_fragments_ptx("f16", True))
_FP8_BF16, _FP8_F16 = tl.constexpr(_fp8_fragments_ptx("bf16")), tl.constexpr(_fp8_fragments_ptx("f16"))
_E2M1_BF16, _E2M1_F16 = tl.constexpr(_pairs_ptx("e2m1", "bf16")), tl.constexpr(_pairs_ptx("e2m1", "f16"))


@ignore_comments
@triton.jit
def _default_zero(FORMAT: tl.constexpr):
    return 8.0 if FORMAT == "int4" else 16.0


@ignore_comments
@triton.jit
def _unit(FORMAT: tl.constexpr):
    return 1.0 if FORMAT == "int4" else 0.5


@ignore_comments
@triton.jit
def _plain_integers(codes, FORMAT: tl.constexpr):
    """c of the low and of the high codes of bytes, int32."""
    bits = codes.to(tl.int32)
    low, high = bits & 15, bits >> 4
    if FORMAT == "e2m1":
        low, high = _e2m1_integer(low), _e2m1_integer(high)
    return low, high


@ignore_comments
@triton.jit
def _e2m1_integer(code):
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    return 16 + tl.where(code >= 8, -magnitude, magnitude)


@ignore_comments
@triton.jit
def _plain_floats(codes, FORMAT: tl.constexpr):
    low, high = _plain_integers(codes, FORMAT)
    return 1.0 + low.to(tl.float32) / 128.0, 1.0 + high.to(tl.float32) / 128.0


@ignore_comments
@triton.jit
def _code_floats(codes, FORMAT: tl.constexpr):
    """1 + c / 128 of the low and of the high codes of bytes, in float32."""
    if HAS_PTX:
        PTX: tl.constexpr = _INT4_FLOATS if FORMAT == "int4" else _E2M1_FLOATS
        low, high = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,=r,=r,=r,=r,r", [codes], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    else:
        low, high = _plain_floats(codes, FORMAT)
    return low, high


@ignore_comments
@triton.jit
def _plain_values(codes, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    low, high = _plain_integers(codes, FORMAT)
    shift = zero.to(tl.float32) if zero is not None else _default_zero(FORMAT)
    low = ((low.to(tl.float32) - shift) * _unit(FORMAT)).to(DTYPE)
    high = ((high.to(tl.float32) - shift) * _unit(FORMAT)).to(DTYPE)
    return low, high


@ignore_comments
@triton.jit
def _code_values(codes, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values of the low and of the high codes of bytes in a 16-bit DTYPE. `zero`: uint8, or None."""
    if HAS_PTX:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16
        INT4_PTX: tl.constexpr = _INT4_BF16 if IS_BF16 else _INT4_F16
        PTX: tl.constexpr = INT4_PTX if FORMAT == "int4" else _E2M1_BF16 if IS_BF16 else _E2M1_F16
        # Twice the bits of -unit * (base + zero). Without zero points they are a constant: Triton moves the conversion
        # to the layout of the tensor cores past constants and loads only, otherwise values go through shared memory.
        if FORMAT == "e2m1":
            shifts = tl.full([1, 1, 1], 0xC290C290 - 0x100000000 if IS_BF16 else 0xE010E010 - 0x100000000, tl.int32)
        elif zero is None:
            shifts = tl.full([1, 1, 1], 0xC308C308 - 0x100000000 if IS_BF16 else 0xE408E408 - 0x100000000, tl.int32)
        else:
            base: tl.constexpr = 0xC300C300 - 0x100000000 if IS_BF16 else 0xE400E400 - 0x100000000
            shifts = zero.to(tl.int32) * 0x10001 + base
        pairs = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r,r,r,r,r", [codes, shifts], dtype=tl.int32, is_pure=True, pack=4
        )
        low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        low, high = _plain_values(codes, zero, FORMAT, DTYPE)
    return low, high


@ignore_comments
@triton.jit
def _pair(pairs, DTYPE: tl.constexpr):
    """[..., 2]: the two 16-bit values in each int32."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)


@ignore_comments
@triton.jit
def _plain_fragment(words, i: tl.constexpr, DTYPE: tl.constexpr):
    """The int4 values of codes i and i + 4 of words: [..., 2]."""
    codes = tl.join(words >> 4 * i, words >> 4 * i + 16) & 15
    return (codes.to(tl.float32) - 8.0).to(DTYPE)


@ignore_comments
@triton.jit
def _fragment_values(words, scales, DTYPE: tl.constexpr):
    """The 8 int4 values of words [n, words] in a 16-bit DTYPE: [n, words, code // 4, code // 2 % 2, code % 2].

    They are multiplied by `scales` [n] in DTYPE, if not None.
    """
    if HAS_PTX:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16
        shifts = tl.full([1, 1], 0xC308C308 - 0x100000000 if IS_BF16 else 0xE408E408 - 0x100000000, tl.int32)
        if scales is None:
            PTX: tl.constexpr = _FRAGMENTS_BF16 if IS_BF16 else _FRAGMENTS_F16
            first, second, third, last = tl.inline_asm_elementwise(
                PTX, "=r,=r,=r,=r,r,r", [words, shifts],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            SCALED_PTX: tl.constexpr = _SCALED_BF16 if IS_BF16 else _SCALED_F16
            factors = scales.to(tl.int16, bitcast=True).to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001
            first, second, third, last = tl.inline_asm_elementwise(
                SCALED_PTX, "=r,=r,=r,=r,r,r,r", [words, shifts, factors[:, None]],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        first, second, third, last = _pair(first, DTYPE), _pair(second, DTYPE), _pair(third, DTYPE), _pair(last, DTYPE)
        values = tl.join(tl.join(first, third), tl.join(second, last))
    else:
        first, second = _plain_fragment(words, 0, DTYPE), _plain_fragment(words, 1, DTYPE)
        third, last = _plain_fragment(words, 2, DTYPE), _plain_fragment(words, 3, DTYPE)
        values = tl.join(tl.join(first, third), tl.join(second, last))
        if scales is not None:
            values *= scales[:, None, None, None, None]
    return values


@ignore_comments
@triton.jit
def _fp8_fragment_values(words, DTYPE: tl.constexpr):
    """The 4 e4m3 values of words [n, words] in a 16-bit DTYPE: [n, words, code // 2, code % 2]. NaN becomes 480."""
    if HAS_PTX:
        PTX: tl.constexpr = _FP8_BF16 if DTYPE == tl.bfloat16 else _FP8_F16
        first, last = tl.inline_asm_elementwise(
            PTX, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        values = tl.join(_pair(first, DTYPE), _pair(last, DTYPE))
        values = tl.permute(values, (0, 1, 3, 2))
    else:
        low = tl.join(words, words >> 16)
        codes = tl.join(low, low >> 8) & 255
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    return values


@ignore_comments
@triton.jit
def _wait_for_dot(sums):
    """`sums`, the result of a `tl.dot` with an accumulator, after its wgmma instructions have completed.

    Otherwise Triton leaves them running into the next step of the loop. Triton 3.6 may then overwrite registers of an
    operand that they still read (triton-lang/triton#9433). With more than 4 warps, Triton up to 3.7 may overwrite
    shared memory that the wgmma instructions of other warps still read (triton-lang/triton#11047). A use of the sums in
    the same step, here inline assembly without instructions, makes Triton wait. The wait added up to 20% to the time
    (GEMM of int4 experts, H200).
    """
    if HAS_PTX:
        sums = tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@ignore_comments
@triton.jit
def _byte_values(codes, DTYPE: tl.constexpr):
    """The values of fp8 or int8 codes. A conversion of float16 to bfloat16 is slower than two through float32."""
    if codes.dtype == tl.float8e4nv and DTYPE == tl.bfloat16:
        values = codes.to(tl.float16).to(tl.float32).to(DTYPE)
    else:
        values = codes.to(DTYPE)
    return values


@ignore_comments
@triton.jit
def _float_scales(scales, FORMAT: tl.constexpr):
    """Stored scales of groups in float32. Those of uint8 are exponents of 2 plus 127; 0 is 2**-127, and 255 is NaN."""
    if FORMAT == "e2m1" and scales.dtype == tl.uint8:
        bits = scales.to(tl.int32)
        is_special = (bits == 0) | (bits == 255)
        values = ((bits << 23) | (is_special.to(tl.int32) << 22)).to(tl.float32, bitcast=True)
    else:
        values = scales.to(tl.float32)
    return values


@ignore_comments
@triton.jit
def _load_scales(pointers, mask, FORMAT: tl.constexpr):
    """Scales of groups in float32."""
    return _float_scales(tl.load(pointers, mask=mask), FORMAT)


@ignore_comments
@triton.jit
def _slice_values(codes, zeros, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values [slices, n, k] of a tile of codes."""
    if FORMAT == "int4" or FORMAT == "e2m1":
        low, high = _code_values(codes, zeros, FORMAT, DTYPE)
        values = tl.reshape(tl.join(low, high), (codes.shape[0], codes.shape[1], 2 * codes.shape[2]))
    else:
        values = _byte_values(codes, DTYPE)
    return values


@ignore_comments
@triton.jit
def _scaled_values(values, scales):
    """Values [slices, n, k] times the scales [slices, n, groups] of their columns, in the same dtype.

    Exact for nvfp4: a value has two significant bits, and a scale four.
    """
    shape: tl.constexpr = (values.shape[0], values.shape[1], scales.shape[2], values.shape[2] // scales.shape[2])
    tile = tl.reshape(values, shape) * scales.to(values.dtype)[:, :, :, None]
    return tl.reshape(tile, values.shape)
