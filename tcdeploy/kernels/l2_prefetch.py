"""Prefetches into the L2 cache what this kernel or the next one will load.

A prefetch takes no registers, and nothing waits for it. Triton has no such operation, so it is a PTX instruction.
Triton's interpreter cannot run it, so kernels prefetch only if they use PDL.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def prefetch_rows(rows, COLUMNS: tl.constexpr):
    """Prefetch COLUMNS elements from each pointer on. They must be in mapped memory."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    for column in tl.static_range(0, COLUMNS, LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(rows + column).to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
