"""Keeps the next-token distributions of a reference model in a temporary file, and compares another model with them.

The two models run one after the other, because both rarely fit on one device. A whole distribution of Llama 3 has
513 kB in float32. The file keeps the TOP_TOKENS most likely tokens of each position, and all other tokens as one: 4.1
kB per position. The KL divergence between distributions that are merged in this way is at most that between the whole
ones (data processing inequality). What is missing is about the divergence within the merged tokens, weighted by their
probability.

Rejected: the most likely tokens of both models, of which neither has the log-probabilities of the other's.
"""

from __future__ import annotations

from io import FileIO
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.errors import SpaceError

TOP_TOKENS = 512


class Differences(NamedTuple):
    """Of the rows of a model from those of the reference."""

    kl: Tensor  # [rows] float64: KL(reference || model) in nats
    is_same_token: Tensor  # [rows] bool: whether the most likely token is the same


class StoredDistributions:
    """A row of the file is int32: the most likely token, `num_kept` token ids, the bits of num_kept + 1 float32."""

    def __init__(self, file: FileIO, vocab_size: int, top_tokens: int = TOP_TOKENS) -> None:
        """`file`: empty and unbuffered, for reading and writing; a buffered one fails again when it is closed."""
        self._file = file
        self.vocab_size, self.num_kept = vocab_size, min(top_tokens, vocab_size - 1)

    @property
    def row_bytes(self) -> int:
        return 4 * (2 + 2 * self.num_kept)

    def append(self, log_probs: Tensor) -> None:
        """Add rows of the reference: log_probs [rows, vocab] float64. Raises SpaceError if the disk is full."""
        ids = log_probs.topk(self.num_kept, dim=-1).indices
        parts = [log_probs.argmax(dim=-1, keepdim=True).int(), ids.int(), merge(log_probs, ids).view(torch.int32)]
        unwritten = memoryview(torch.cat(parts, dim=-1).cpu().numpy().tobytes())
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise SpaceError(
                f"{self._file.name} cannot be written: {error.strerror}",
                f"set TMPDIR to a folder with {self.row_bytes / 1e3:.1f} kB of space per token, or lower --tokens",
            ) from error

    def compare(self, first_row: int, log_probs: Tensor) -> Differences:
        """Compare rows of a model, log_probs [rows, vocab] float64, with those of the reference from `first_row` on."""
        best, ids, merged = self._read(first_row, len(log_probs), log_probs.device)
        reference, model = merged.double(), merge(log_probs, ids).double()
        probs = reference.exp()
        kl = torch.where(probs > 0, probs * (reference - model), 0.0).sum(dim=-1)
        return Differences(kl.clamp(min=0), log_probs.argmax(dim=-1) == best)  # rounding may leave it below 0

    def _read(self, first_row: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The most likely token [rows], and as `merge`: the ids [rows, kept] and log-probabilities [rows, kept + 1]."""
        self._file.seek(first_row * self.row_bytes)
        content = bytearray(self._file.read(count * self.row_bytes))
        rows = torch.frombuffer(content, dtype=torch.int32).view(count, -1).to(device)
        best, ids, merged = rows.split([1, self.num_kept, self.num_kept + 1], dim=-1)
        return best[:, 0].long(), ids.long(), merged.contiguous().view(torch.float32)


def merge(log_probs: Tensor, ids: Tensor) -> Tensor:
    """[rows, kept + 1] float32: the log-probabilities of the tokens `ids` [rows, kept], and that of all others."""
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], dim=-1).float()
