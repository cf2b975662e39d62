"""The variants of a bucket's step, and which of them each mode tries. Does not import torch.

A variant is a set of Inductor settings plus the choice of kernels and passes. Every mode except `auto` uses one variant
for all buckets. `auto` has several candidates per bucket, and uses the first, the known winner, without timing. With
`--tune-seconds`, candidates are timed in order and the fastest is kept (engine/warm/tuning.py). Without timing, a
candidate that does not compile or fails its parity check is replaced by the next, up to `default`, the plainest.

The order comes from timings of Llama 3.1 8B on an H100 (docs/performance-log.md). Rejected there: coordinate descent
beyond batch 1, where Inductor leaves GEMMs to cuBLAS and descent has nothing to tune, and max-autotune for large
batches, which at batch 256 added 93 s to the start and was slower than `pdl`. On other GPUs and on CPUs, which were not
measured, `default` is the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from tcdeploy.planning.recipe import Attention, Device, Mode


@dataclass(frozen=True)
class Variant:
    """One way to build a bucket's step."""

    name: str
    inductor_config: tuple[tuple[str, bool | str], ...] = ()  # settings of torch._inductor.config, by dotted name
    skinny_gemm: bool = False  # use the Triton kernels in kernels/linear/ for few-row GEMMs instead of cuBLAS
    inplace_residual: bool = False  # cuBLAS accumulates a layer's last GEMM into the residual (beta = 1)
    # Fuse SwiGLU into the skinny GEMM's output, RMSNorm into the GEMV's input, and RoPE into decode attention.
    fused_epilogues: bool = False
    # Also compile the final norm, the rotary factors and the LM head of a decode step. Saves about 50 us a step and
    # adds 0.3 s to each start.
    compile_head: bool = True
    # After the attention of a prefill step's last layer, compute only the rows that are sampled from. Adds one program
    # (programs/passes/last_token_rows.py).
    last_token_rows: bool = False
    attention: Attention | None = None  # prefill backend, if it differs from the plan's
    required_speedup: float = 1.0  # its measured time is multiplied by this before it is compared with the others

    def shares_programs_with(self, other: Variant) -> bool:
        """Whether both use the same programs for the layers that compute all rows."""
        fields = ("inductor_config", "skinny_gemm", "inplace_residual", "fused_epilogues", "attention")
        return all(getattr(self, name) == getattr(other, name) for name in fields)


PDL = ("triton.enable_pdl", True)  # programmatic dependent launch: a kernel starts before its predecessor has ended
COMBO_KERNELS = ("combo_kernels", True)  # independent small kernels share one launch
# A warm start does not repeat coordinate descent under three conditions (torch 2.11):
# 1. use_static_cuda_launcher is off: the result is not read from the cache for statically launched kernels.
# 2. dynamic_scale_rblock is off: torch halves blocks after tuning, and saves the halved config as not tuned.
# 3. Kernels are compiled in this process (torch_compat/dynamo/compile_threads.py): pickling drops the mark of a tuned
#   config.
COORDINATE_DESCENT = (
    ("coordinate_descent_tuning", True), ("use_static_cuda_launcher", False), ("dynamic_scale_rblock", False),
)  # fmt: skip
AUTOTUNE = (("max_autotune", True), *COORDINATE_DESCENT)
DEFAULT = Variant("default", compile_head=False)
PDL_ONLY = Variant("pdl", (PDL,))
PDL_COMBO = Variant("pdl+combo", (PDL, COMBO_KERNELS))
COORDINATE_DESCENT_PDL_COMBO = Variant("coordinate-descent+pdl+combo", (*COORDINATE_DESCENT, PDL, COMBO_KERNELS))
SKINNY_PDL = Variant("skinny+pdl", (PDL,), skinny_gemm=True)
SKINNY_PDL_COMBO = Variant("skinny+pdl+combo", (PDL, COMBO_KERNELS), skinny_gemm=True)
SKINNY_PDL_COMBO_FUSED = Variant("skinny+pdl+combo+fused", (PDL, COMBO_KERNELS), skinny_gemm=True, fused_epilogues=True)
MAX_AUTOTUNE = Variant("max-autotune", AUTOTUNE)
MAX_AUTOTUNE_PDL = Variant("max-autotune+pdl", (*AUTOTUNE, PDL))
# The kernels in kernels/linear/ are tried first up to SKINNY_GEMM_MAX_ROWS rows. Beyond that, they are tried only for
# int4 weights, whose whole steps were timed.
DECODE_BATCH_1 = (
    SKINNY_PDL_COMBO_FUSED, SKINNY_PDL_COMBO, DEFAULT, COORDINATE_DESCENT_PDL_COMBO, PDL_ONLY, MAX_AUTOTUNE_PDL,
)  # fmt: skip
DECODE_SMALL_BATCH = (
    SKINNY_PDL_COMBO_FUSED, SKINNY_PDL_COMBO, SKINNY_PDL, DEFAULT, PDL_ONLY, MAX_AUTOTUNE_PDL,
)  # fmt: skip
DECODE_LARGE_BATCH = (PDL_COMBO, PDL_ONLY, DEFAULT)
DECODE_LARGE_BATCH_INT4 = (SKINNY_PDL_COMBO_FUSED, *DECODE_LARGE_BATCH)
DECODE_NOT_HOPPER = (DEFAULT, Variant("coordinate-descent", COORDINATE_DESCENT), MAX_AUTOTUNE)
LAST_TOKEN_ROWS = Variant("last-token-rows", compile_head=False, last_token_rows=True)
LAST_TOKEN_ROWS_INPLACE = Variant(
    "last-token-rows+inplace", inplace_residual=True, compile_head=False, last_token_rows=True
)
# last-token-rows adds one program to those of `default`.
PREFILL_NOT_HOPPER = (DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE, MAX_AUTOTUNE)
PREFILL_BY_MIN_TOKENS = {  # on Hopper, longest first
    2048: (LAST_TOKEN_ROWS_INPLACE, DEFAULT, LAST_TOKEN_ROWS),
    512: (LAST_TOKEN_ROWS, DEFAULT, LAST_TOKEN_ROWS_INPLACE),
    257: (DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE),
    0: (DEFAULT, MAX_AUTOTUNE),
}
SKINNY_GEMM_MAX_ROWS = 64  # of kernels/linear/skinny_gemm.py
CPU_PREFILL, CPU_DECODE = (DEFAULT, LAST_TOKEN_ROWS, MAX_AUTOTUNE), (DEFAULT, MAX_AUTOTUNE)


def attention_variant(backend: Attention) -> Variant:
    """A long prefill with a package's attention.

    Importing the package adds 5 to 10 s to each start, so the variant is selected only if it is 5% faster.
    """
    return Variant(backend, compile_head=False, attention=backend, required_speedup=1.05)


def candidate_variants(
    mode: Mode, device: Device, is_hopper: bool, fuses_large_decode: bool, is_prefill: bool, size: int
) -> tuple[Variant, ...]:
    """The candidates of `mode` for a bucket of `size` tokens or rows, in order; one for every mode but `auto`.

    Skinny GEMMs and PDL are tried only on Hopper: other GPUs lack what they need, or were not measured.
    """
    if mode == "max-autotune":
        return (MAX_AUTOTUNE,)
    if mode != "auto":
        return (DEFAULT,)
    if device == "cpu":
        return CPU_PREFILL if is_prefill else CPU_DECODE
    if not is_hopper:
        return PREFILL_NOT_HOPPER if is_prefill else DECODE_NOT_HOPPER
    if is_prefill:
        return next(variants for min_tokens, variants in PREFILL_BY_MIN_TOKENS.items() if size >= min_tokens)
    if size <= SKINNY_GEMM_MAX_ROWS:
        return DECODE_BATCH_1 if size == 1 else DECODE_SMALL_BATCH
    return DECODE_LARGE_BATCH_INT4 if fuses_large_decode else DECODE_LARGE_BATCH


def untimed_variants(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """The candidates that are tried without timing: those up to `default`, until one compiles and passes its check.

    None of those after it is tried, since torch times kernels while it compiles some, and others import a package.
    """
    return variants[: variants.index(DEFAULT) + 1] if DEFAULT in variants else variants[:1]
