"""The attention backends: one row each, with everything that planning needs to know about them. Does not import torch.

The table is in order of preference. attention.py checks a row against a machine and a model, and chooses.
kernels/attention/backends.py holds the functions that implement each row. To add a backend, add a row here, an
implementation there, and its name to `recipe.Attention`. No other module compares backend names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tcdeploy.planning.recipe import Attention, DType, KVDType

HALF_DTYPES: tuple[DType, ...] = ("bfloat16", "float16")
ALL_DTYPES: tuple[DType, ...] = ("float32", *HALF_DTYPES)
FP8_KV: KVDType = "float8_e4m3fn"
Phase = Literal["prefill", "decode"]
Selection = Literal["default", "tuned", "fallback"]
TORCH_FLASH = "torch-flash attention"  # the private interface of torch, as torch_compat/torch_flash.py names it


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What one attention backend requires and supports. Every backend serves prefill.

    module: importable module that holds its interface; empty if the backend ships with torch or with this package.
    distribution: package that `module` belongs to, as pip names it.
    internal: private interface of torch that it calls, as torch_compat names it; empty for none.
    requires_gpu: it has no CPU implementation.
    uses_triton: its kernels are written in Triton, and decode steps use those of engine/step/advance.py too.
    capability_majors: major compute capabilities that its kernels are built for; None for all.
    dtypes: dtypes of Q, K and V.
    supports_fp8_kv: it reads K and V of all tokens from the cache, and converts those that are stored in FP8.
    max_head_dim: largest head dimension; None for no limit.
    head_dim_multiple: head dimensions must be a multiple of this.
    requires_equal_head_dims: K and V must have the same head dimension.
    supports_softcap: logit soft-capping.
    is_capturable: it reads nothing on the host, so a CUDA graph can contain it.
    selection: `default` rows are chosen in table order, `tuned` ones only when timed by `--mode auto` or requested,
        and a `fallback` only when no other row is supported.
    prefill_reason, decode_reason: why it is chosen; "" if it does not serve decode. A decode backend implements
        `tcdeploy::kv_write` too, with which prefill writes K and V, so that one cache layout serves both.
    """

    name: Attention
    module: str = ""
    distribution: str = ""
    internal: str = ""
    requires_gpu: bool = True
    uses_triton: bool = False
    capability_majors: range | None = None
    dtypes: tuple[DType, ...] = HALF_DTYPES
    supports_fp8_kv: bool = False
    max_head_dim: int | None = 256
    head_dim_multiple: int = 8
    requires_equal_head_dims: bool = True
    supports_softcap: bool = True
    is_capturable: bool = False
    selection: Selection = "default"
    prefill_reason: str = "installed"
    decode_reason: str = ""

    @property
    def serves_decode(self) -> bool:
        return bool(self.decode_reason)

    def reason(self, phase: Phase) -> str:
        """Why it is chosen; "" if it does not serve this phase."""
        return self.prefill_reason if phase == "prefill" else self.decode_reason


# Timings behind the order: docs/performance-log.md. Prefill of 2048 tokens on an H100 takes Triton 0.113 ms and torch's
# FlashAttention-2 0.190 ms. FlashAttention-4 takes 0.108 ms, but its first call takes 5 s, so it is only tuned. The
# package flash-attn 2 is 6% faster than torch's from 2048 tokens, and slower for short prompts.
_ROWS = (
    Backend(
        name="triton",
        uses_triton=True,
        dtypes=ALL_DTYPES,
        supports_fp8_kv=True,
        max_head_dim=512,
        requires_equal_head_dims=False,
        is_capturable=True,
        prefill_reason="reads the paged KV cache in place; measured faster than torch's FlashAttention-2",
        decode_reason="split-KV paged decode; FlashAttention-2 took 3 times as long on an H100",
    ),
    Backend(
        name="torch-flash",
        internal=TORCH_FLASH,
        capability_majors=range(8, 100),
        supports_softcap=False,
        prefill_reason="FlashAttention-2 as shipped with torch",
    ),
    Backend(name="flash-attn-2", module="flash_attn", distribution="flash-attn", capability_majors=range(8, 100)),
    Backend(
        name="flash-attn-4",
        module="flash_attn.cute",
        distribution="flash-attn-4",
        capability_majors=range(9, 12),
        max_head_dim=128,
        selection="tuned",
    ),
    Backend(
        name="reference",
        requires_gpu=False,
        dtypes=ALL_DTYPES,
        supports_fp8_kv=True,
        max_head_dim=None,
        head_dim_multiple=1,
        requires_equal_head_dims=False,
        selection="fallback",
        prefill_reason="plain PyTorch",
        decode_reason="plain PyTorch",
    ),
)
BACKENDS: dict[Attention, Backend] = {row.name: row for row in _ROWS}
