"""The kernels of log-probabilities give the bits of the reference, which agree with torch's log-softmax."""

from __future__ import annotations

import pytest
import torch

from tcdeploy.engine.step.sampling import logprobs
from tests.kernels.sampling.test_sample import random_logits

pytest.importorskip("triton")
INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (3, 0), (2048, 3), (5000, 20)])
def test_the_kernels_give_the_bits_of_the_reference(device: str, vocab_size: int, k: int, dtype: torch.dtype) -> None:
    logits = random_logits(4, vocab_size, 3.0, dtype)
    logits[1] = logits[1].round()  # many equal logits
    tokens = torch.arange(4) * 7 % vocab_size
    expected = logprobs(logits, tokens, k)
    chosen, top_ids, top_logprobs = logprobs(logits.to(device), tokens.to(device), k, "triton")
    assert top_ids.tolist() == expected.top_ids.tolist()
    assert torch.equal(chosen.cpu(), expected.chosen)
    assert torch.equal(top_logprobs.cpu(), expected.top_logprobs)
    log_softmax = logits.double().log_softmax(dim=-1)
    assert torch.allclose(expected.chosen.double(), log_softmax.gather(1, tokens[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(expected.top_logprobs.double(), log_softmax.topk(k).values, atol=1e-6)


def test_rows_without_a_finite_maximum_have_no_log_probabilities(device: str) -> None:
    logits = random_logits(4, 100, dtype=torch.float32)
    logits[0], logits[1, 5], logits[2, 7], logits[3, 8:] = -INF, INF, float("nan"), -INF
    tokens = torch.tensor([0, 5, 7, 9])
    for backend, where in (("reference", "cpu"), ("triton", device)):
        chosen, top_ids, top_logprobs = logprobs(logits.to(where), tokens.to(where), 2, backend)  # type: ignore[arg-type]
        assert chosen[:3].isnan().all()
        assert top_logprobs[:3].isnan().all()
        assert chosen[3] == -INF
        assert top_ids[:, 0].tolist()[:3] == [0, 5, 7]
