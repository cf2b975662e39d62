"""Attention of a mixed step by the Triton kernels: the prompts' on a second stream, beside the decode rows'.

Few prompt tokens occupy a part of the GPU, and decode attention waits for memory, so the two kernels run at the same
time. With 20 decode rows and 160 prompt tokens, 32 layers of attention and its two GEMMs take 2.90 ms, and 3.09 ms one
after the other (8B shape, H100). In a CUDA graph the streams become two branches.

The kernels write different rows of the result and different KV blocks. Blocks that both read were written by earlier
kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tcdeploy.attention import decode, prefill


def paged_mixed(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, row_block_table: Tensor, row_seq_lens: Tensor,
    decode_counters: Tensor, prefill_counters: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None, splits: int,
) -> Tensor:  # fmt: skip
    """As `ops.mixed_attention` with the decode rows of row_seq_lens [rows]; without any, it computes only the prompts.

    decode_counters: the split counters of `decode.paged_decode`, whose argument `splits` also is.
    prefill_counters: for `prefill.make_split_workspace`.
    """
    rows = len(row_seq_lens)
    # The workspace and the result are memory of the current stream, which waits for the other one before it reuses it.
    workspace = prefill.make_split_workspace(q, v_cache, len(block_table), prefill_counters)
    compute_prompts = functools.partial(
        prefill.paged_prefill, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, window, softcap, sinks,
        workspace,
    )  # fmt: skip
    if not rows:
        return compute_prompts()
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    with _second_stream(q.device):
        compute_prompts(out, row_seq_lens)
    decode.paged_decode(
        q[:rows], k[:rows], v[:rows], k_cache, v_cache, row_block_table, row_seq_lens, decode_counters,
        scale, window, softcap, sinks, splits, None, None, out[:rows],
    )  # fmt: skip
    _join_second_stream(q.device)
    return out


@contextlib.contextmanager
def _second_stream(device: torch.device) -> Iterator[None]:
    """Launch kernels on another stream, after all that the current one has; on a CPU, without any effect."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _join_second_stream(device: torch.device) -> None:
    """Let the current stream wait for the kernels of `_second_stream`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
