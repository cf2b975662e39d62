"""Distributions that were written to a file compare as whole ones do, up to merged tokens and float32."""

from __future__ import annotations

import math
from io import FileIO
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from tcdeploy.bench.stored_distributions import StoredDistributions, merge
from tcdeploy.errors import SpaceError

ROWS, VOCAB = 7, 40


def random_logits(seed: int) -> Tensor:
    return 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


REFERENCE = random_logits(1).log_softmax(dim=-1)
MODEL = (random_logits(1) + random_logits(2)).log_softmax(dim=-1)


@pytest.fixture
def file(tmp_path: Path) -> FileIO:
    return (tmp_path / "distributions").open("w+b", buffering=0)


def test_rows_are_compared_with_the_rows_of_the_same_tokens(file: FileIO) -> None:
    """Although they were appended in other pieces."""
    stored = StoredDistributions(file, VOCAB, VOCAB)
    stored.append(REFERENCE[:4])
    stored.append(REFERENCE[4:])
    parts = [stored.compare(start, MODEL[start:stop]) for start, stop in ((0, 1), (1, 6), (6, ROWS))]
    expected = kl_div(MODEL, REFERENCE, log_target=True, reduction="none").sum(dim=-1)
    assert torch.cat([part.kl for part in parts]).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    is_same = REFERENCE.argmax(dim=-1) == MODEL.argmax(dim=-1)
    assert torch.equal(torch.cat([part.is_same_token for part in parts]), is_same) and 0 < is_same.sum() < ROWS
    assert file.seek(0, 2) == ROWS * stored.row_bytes == ROWS * 4 * (2 + 2 * (VOCAB - 1))


def test_the_divergence_of_merged_tokens_is_that_of_their_sums(file: FileIO) -> None:
    stored = StoredDistributions(file, VOCAB, 2)
    stored.append(REFERENCE)
    for row, kl in enumerate(stored.compare(0, MODEL).kl.tolist()):
        p, q = REFERENCE[row].exp().tolist(), MODEL[row].exp().tolist()
        kept = sorted(range(VOCAB), key=lambda token: -p[token])[:2]
        pairs = [(p[token], q[token]) for token in kept]
        pairs.append((1 - sum(x for x, _ in pairs), 1 - sum(y for _, y in pairs)))
        assert kl == pytest.approx(sum(x * math.log(x / y) for x, y in pairs), abs=1e-6)


def test_the_file_tells_equal_rows_from_others(file: FileIO) -> None:
    stored = StoredDistributions(file, VOCAB, 5)
    stored.append(REFERENCE)
    assert stored.compare(0, REFERENCE).kl.tolist() == [0.0] * ROWS
    assert stored.compare(0, REFERENCE).is_same_token.all()
    assert (stored.compare(0, REFERENCE.roll(1, 0)).kl > 0.1).all()


def test_tokens_that_the_reference_excludes_do_not_count(file: FileIO) -> None:
    """The others may then have probability 0. A model that excludes a token of the reference is infinitely far."""
    only = torch.full((1, VOCAB), -torch.inf, dtype=torch.float64)
    only[0, :2] = math.log(0.5)
    stored = StoredDistributions(file, VOCAB, 3)
    stored.append(only)
    assert stored.compare(0, only).kl.tolist() == [0.0]
    assert stored.compare(0, only.roll(1, 1)).kl.tolist() == [math.inf]
    assert stored.compare(0, MODEL[:1]).kl.tolist() == pytest.approx(
        [sum(0.5 * (math.log(0.5) - MODEL[0, token].item()) for token in range(2))], rel=1e-6
    )


def test_probabilities_of_merged_tokens_add_up_to_one() -> None:
    ids = REFERENCE.topk(4, dim=-1).indices
    assert merge(REFERENCE, ids).exp().sum(dim=-1).tolist() == pytest.approx([1.0] * ROWS, rel=1e-6)
    assert merge(MODEL, ids).exp().sum(dim=-1).tolist() == pytest.approx([1.0] * ROWS, rel=1e-6)


def test_a_full_disk_is_an_error_with_the_space_per_token() -> None:
    with open("/dev/full", "w+b", buffering=0) as file:
        stored = StoredDistributions(file, 128_256)
        with pytest.raises(SpaceError, match=r"/dev/full cannot be written: No space left on device") as raised:
            stored.append(torch.zeros(1, 128_256, dtype=torch.float64).log_softmax(dim=-1))
    assert raised.value.hint == "set TMPDIR to a folder with 4.1 kB of space per token, or lower --tokens"
