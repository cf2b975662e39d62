"""Attention of a mixed step with the Triton kernels: prefill attention runs on a second stream.

A few prompt tokens use only part of the GPU, and decode attention is bound by memory, so the two kernels overlap. With
20 decode rows and 160 prompt tokens, 32 layers of attention and its two GEMMs take 2.90 ms, against 3.09 ms on one
stream (8B shape, H100). After a prefix of 30,000 tokens the second stream costs up to 4%. The kernels write different
rows and KV blocks, and KV blocks that both read were written before either starts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tcdeploy.kernels.attention import decode, prefill


def paged_mixed(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, row_block_table: Tensor, row_seq_lens: Tensor,
    decode_counters: Tensor, prefill_counters: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None, splits: int,
    kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `ops.mixed_attention`, with the decode rows of row_seq_lens [rows]. With 0 rows, it computes only the prompts.

    The counters and splits are those of `decode.paged_decode` and `prefill.make_split_workspace`.
    """
    rows = len(row_seq_lens)
    # The workspace and the result are allocated on the current stream. It waits for the second stream below, so their
    # memory is not reused while the second stream writes it.
    workspace = prefill.make_split_workspace(q, v_cache, len(block_table), prefill_counters)
    compute_prompts = functools.partial(
        prefill.paged_prefill, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, window, softcap, sinks,
        workspace,
    )  # fmt: skip
    if not rows:
        return compute_prompts(None, None, kv_scales)
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    with _second_stream(q.device) as stream:
        with stream:
            compute_prompts(out, row_seq_lens, kv_scales)
        decode.paged_decode(
            q[:rows], k[:rows], v[:rows], k_cache, v_cache, row_block_table, row_seq_lens, decode_counters,
            scale, window, softcap, sinks, splits, None, None, out[:rows], kv_scales,
        )  # fmt: skip
    return out


@contextlib.contextmanager
def _second_stream(device: torch.device) -> Iterator[AbstractContextManager[Any]]:
    """A context in which kernels are launched on a second stream, after the work that is queued on the current one.

    At the end, the current stream waits for them, also after an exception: the step's tensors are then freed, and a
    capture stays valid. No effect on a CPU.
    """
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    current, second = torch.cuda.current_stream(device), _stream(device)
    second.wait_stream(current)
    try:
        yield torch.cuda.stream(second)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the exception of the step is more useful
            current.wait_stream(second)
        raise
    current.wait_stream(second)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
