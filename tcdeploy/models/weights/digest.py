"""A digest of a model's weights as they lie in memory, fast enough for every start.

Two sums modulo 2^64 are computed over the 64-bit words x_i of each storage: of x_i * a_i, and of (x_i >> 32) * b_i.
The factors a_i and b_i are random odd numbers, the same in every process; a factor is that of the position in a chunk,
times that of the chunk. Changes of the top bits of two words cancel in the first sum, but not in the second. The sums
detect accidents, such as another checkpoint, a truncated file or a flipped bit. They are no protection against a file
that was made to have the same sums. 1 GiB takes 0.5 s on two CPU cores.
"""

from __future__ import annotations

import functools
import hashlib
import json

import torch
from torch import Tensor, nn

WORD_BYTES = 8
CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 22}  # on a CPU the factors and a chunk fit into the second-level cache
SEED = 20_261_125


def weights_digest(model: nn.Module) -> str:
    """64 hex digits over the parameters and buffers: their names, types, shapes, strides and bytes.

    Each storage is read once, as a whole, so tied weights and slices of packed weights are not read twice. Equal
    weights in another layout have another digest, and so has a model on another type of device.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    storages: dict[int, int] = {}  # number by address
    layout: list[list[object]] = []
    sums: list[list[int]] = []
    factors = functools.cache(_Factors)
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        number = storages.setdefault(storage.data_ptr(), len(storages))
        layout.append([name, str(tensor.dtype), tensor.shape, tensor.stride(), tensor.storage_offset(), number])
        if number == len(sums):
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            sums.append([storage.nbytes(), *_checksums(content, factors(tensor.device))])
    return hashlib.sha256(json.dumps([layout, sums]).encode()).hexdigest()


class _Factors:
    """Random odd int64 factors: [2, words] of the words of a chunk, and the generator of the factors of chunks."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(SEED)
        self.words = _odd_factors(2 * CHUNK_WORDS[device.type], self.generator).view(2, -1).to(device)


def _odd_factors(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1


def _checksums(content: Tensor, factors: _Factors) -> list[int]:
    """Both sums of a storage, given as [bytes] uint8."""
    chunk_words = factors.words.shape[1]
    rest = len(content) % WORD_BYTES
    pieces = list(content[: len(content) - rest].view(torch.int64).split(chunk_words))
    if rest:
        last_word = torch.nn.functional.pad(content[-rest:], (0, WORD_BYTES - rest))
        pieces.append(last_word.view(torch.int64))
    if not pieces:
        return [0, 0]
    products = torch.empty(chunk_words, dtype=torch.int64, device=content.device)
    sums = []
    for words in pieces:
        low, high = factors.words[:, : len(words)]
        product = torch.mul(words, low, out=products[: len(words)])
        first = product.sum()
        torch.bitwise_right_shift(words, 32, out=product).mul_(high)
        sums.append(torch.stack([first, product.sum()]))
    by_chunk = torch.stack(sums).cpu()
    factors_of_chunks = _odd_factors(len(pieces), factors.generator)
    return (by_chunk * factors_of_chunks[:, None]).sum(dim=0).tolist()  # type: ignore[no-any-return]
