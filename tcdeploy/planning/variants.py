"""The ways in which a bucket's step can be made, and which of them each mode tries. No torch.

A candidate is a set of Inductor settings, and who multiplies. Every mode but `auto` names one candidate for all
buckets; `auto` times several for each and keeps the fastest (engine/warmup.py), so nothing here claims to know which
that is: only the order, the likely winners first, for the case that the time for trying ends early.

What `warm --mode auto` timed on an H100, 8B shape, context 512, ms per decode step; each column of a block in one run,
so compare down a column only. In decode all had programs for the edges, which `default` no longer has.

    batch                1      4     16     32    128    256
    default           6.33   6.34   6.74   7.10
    pdl               6.29   6.30   6.69   7.10
    descent              -      -      -   7.15                  changes products of one row only
    descent+pdl       5.52      -      -      -                  Inductor writes the product with one row itself
    streamed             -   5.99      -   6.85
    streamed+pdl         -   5.80   6.24   6.68
    max-autotune      5.71      -      -      -
    max-autotune+pdl  5.57   6.26      -      -                  it times products on weights in the L2 cache, and errs
    later, with decode attention launched early and, at batch 1, the long row stored (passes/gemv.py):
    pdl                  -      -      -      -   9.80  13.64
    descent+pdl       5.42      -      -      -
    streamed+pdl         -   5.76   6.15   6.58
    streamed+pdl+combo   -      -   6.09      -
    max-autotune+pdl     -      -      -      -   9.72  13.65

In another run of that state the `combo` candidates took 5.36, 5.76, 6.14, 6.59, 9.78 and 13.75. With the residual added
by the streamed product (passes/residual_add.py), two runs on two cards:

    streamed+pdl         -   5.82   6.11   6.54
    streamed+pdl+combo   -   5.78   6.08   6.50                  on the other card 5.70, 6.11, 6.58
    pdl+combo            -      -      -      -   9.82  13.77
    pdl+combo+adds       -      -      -      -   9.87  13.76    no longer tried

With a kernel for one row (linear/gemv.py), and `fused`: products of our kernels end in the MLP's gate and, of one
row, normalise their input; decode attention turns q and k (passes/rms_norm.py, gates.py, rotary.py). Before the line the
8B shape, Qwen2.5 7B's and Llama 3.2 1B's, a run each; after it what each part brought in another run, the norms in
Inductor's own product:

    batch                      1      4     16     32
    streamed+pdl               -   5.76   6.16   6.56
    streamed+pdl+combo      5.44   5.73   6.09   6.49
    +fused                  5.37   5.60   5.95   6.47
    another card               -   5.71   6.16   6.57
    +fused                  5.38   5.61   6.37   6.87
    Qwen: streamed+pdl         -   5.39   5.72   5.92
    streamed+pdl+combo      5.20   5.32   5.70   5.87
    +fused                  5.10   5.32   5.56   5.75
    1B: streamed+pdl+combo     -      -   1.28   1.50
    +fused                  1.07   1.15   1.25   1.46
    --
    descent+pdl+combo       5.42
    +norms                  5.62                                 no longer there
    +rotary                 5.47
    streamed+pdl+combo         -   5.72   6.09   6.46
    +rotary                    -   5.67   5.97   6.55
    +gates                     -   5.66   6.02   6.51

Prefill, ms at the power limit, three runs apart by the lines:

    tokens             128    512   1024   2048   8192 (one prompt)
    default           7.10   13.3   25.4   51.3   233
    last-token-rows        7.08   13.2   24.8   49.9   229
    max-autotune      6.87                                       3% at 128 tokens; from 512 on it lost or drew
    --
    pdl                      13.0          50.9   231            in a run in which default took 13.2, 50.8 and 231
    --
    default           7.05   13.1   24.5   50.4   230
    last-token-rows               12.7   24.0   49.0   224
    last-token-rows+inplace          12.8   23.8   48.4
    last-token-rows+pdl    7.22          24.0                         no longer tried, nor max-autotune+pdl: 7.08 for 7.04

Coordinate descent helps at batch 1 alone: there Inductor takes a product for a reduction and writes it itself, and the
tuning is of that reduction; from two rows on products stay with cuBLAS. It times kernels of tens of microseconds one by
one, and noise may decide: two descents on the same program took 5.51 and 5.89 ms a step, which is why it helped on one
machine and not on the next; our kernel for one row is tuned once, in its file. Not among the candidates: fewer
parts for decode attention at batch 1 (16, 8 and 4 parts took 5.46, 5.47 and 5.50 ms in one run); max-autotune at 256
rows, which in a later run took 93 s of the start to end at 14.06 where pdl had 13.63, nor at 128, for 1%.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """`inductor_config` are settings of torch._inductor.config by dotted name.

    `skinny_gemm` gives products of few rows to our own kernels (linear/). `inplace_residual` has cuBLAS add a layer's last product to
    the residual in its place. `fused_epilogues` has a product of our kernels end in the MLP's gate and, of one row, normalise its
    input, and decode attention turn its queries and keys. `compile_head` makes programs of what a decode step runs before
    and after its layers too (final norm, rotary factors, head): some 50 us less for 0.3 s more at every start.
    `last_token_rows` has the last layer of a prefill step work, after its attention, on the sampled rows alone, for a
    program more (passes/last_token_rows.py).
    """

    name: str
    inductor_config: tuple[tuple[str, bool | str], ...] = ()
    skinny_gemm: bool = False
    inplace_residual: bool = False
    fused_epilogues: bool = False
    compile_head: bool = True
    last_token_rows: bool = False
    attention: str | None = None  # the prefill backend, where it is not the plan's
    required_speedup: float = 1.0  # times this, its time is compared with the others'

    def shares_programs_with(self, other: Variant) -> bool:
        """Whether what runs all rows in both is made but once."""
        return self._layer_program_key == other._layer_program_key

    @property
    def _layer_program_key(self) -> tuple[object, ...]:
        return self.inductor_config, self.skinny_gemm, self.inplace_residual, self.fused_epilogues, self.attention


PDL = ("triton.enable_pdl", True)  # a kernel may start while the one before it ends
COMBO_KERNELS = ("combo_kernels", True)  # small kernels that do not wait for one another in one launch
# The next start reads again what a descent found only for kernels that are not launched statically (torch 2.11; with
# PDL none are), that no worker hands over (compiler/programs.py), and whose blocks torch does not halve afterwards: it
# saves the half as if there had been no descent.
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
# One row and a few are for our kernels; many are for cuBLAS.
DECODE_BATCH_1 = (
    SKINNY_PDL_COMBO_FUSED, SKINNY_PDL_COMBO, COORDINATE_DESCENT_PDL_COMBO, DEFAULT, PDL_ONLY, MAX_AUTOTUNE_PDL,
)  # fmt: skip
DECODE_SMALL_BATCH = (
    SKINNY_PDL_COMBO_FUSED, SKINNY_PDL_COMBO, SKINNY_PDL, DEFAULT, PDL_ONLY, MAX_AUTOTUNE_PDL,
)  # fmt: skip
DECODE_LARGE_BATCH = (PDL_COMBO, PDL_ONLY, DEFAULT)
DECODE_NOT_HOPPER = (Variant("coordinate-descent", COORDINATE_DESCENT), DEFAULT, MAX_AUTOTUNE)
LAST_TOKEN_ROWS = Variant("last-token-rows", compile_head=False, last_token_rows=True)
LAST_TOKEN_ROWS_INPLACE = Variant(
    "last-token-rows+inplace", inplace_residual=True, compile_head=False, last_token_rows=True
)
# Default first: what it compiles serves last-token-rows too.
PREFILL_NOT_HOPPER = (DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE, MAX_AUTOTUNE)
PREFILL_SHORT, PREFILL_LONG = (DEFAULT, MAX_AUTOTUNE), (DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE)
SHORT_PREFILL_TOKENS = 256
SKINNY_GEMM_MAX_ROWS = 64  # our kernel's most
CPU_PREFILL, CPU_DECODE = (DEFAULT, LAST_TOKEN_ROWS, MAX_AUTOTUNE), (DEFAULT, MAX_AUTOTUNE)


def attention_variant(backend: str) -> Variant:
    """A long prefill by a package's attention: its import costs every start 5 to 10 s, so it must bring something."""
    return Variant(backend, compile_head=False, attention=backend, required_speedup=1.05)


def variants(mode: str, device: str, is_hopper: bool, is_prefill: bool, size: int) -> tuple[Variant, ...]:
    """What `mode` tries for a bucket of `size`, in this order; all but `auto` name one.

    Streamed products and Inductor's dependent launches are for Hopper: other GPUs lack the shared memory or the
    instruction, or were not measured.
    """
    if mode == "max-autotune":
        return (MAX_AUTOTUNE,)
    if mode != "auto":
        return (DEFAULT,)
    if device == "cpu":
        return CPU_PREFILL if is_prefill else CPU_DECODE
    if is_prefill:
        return PREFILL_NOT_HOPPER if not is_hopper else PREFILL_SHORT if size <= SHORT_PREFILL_TOKENS else PREFILL_LONG
    if not is_hopper:
        return DECODE_NOT_HOPPER
    return DECODE_BATCH_1 if size == 1 else DECODE_SMALL_BATCH if size <= SKINNY_GEMM_MAX_ROWS else DECODE_LARGE_BATCH
