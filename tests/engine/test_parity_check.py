"""The error of a bucket that fails its parity check."""

from __future__ import annotations

import pytest
import torch

from tcdeploy.engine.parity import compare_logits
from tcdeploy.engine.parity_check import raise_if_failed
from tcdeploy.errors import CompileError
from tcdeploy.planning.plan import Bucket

BUCKET = Bucket("prefill", 512)


def test_the_error_names_the_bucket_the_figures_and_the_next_command() -> None:
    reference = torch.tensor([[4.0, 1.0, 0.0]])
    parity = compare_logits(reference + torch.tensor([[0.0, 0.0, 2.0]]), reference, "float32")
    with pytest.raises(CompileError) as raised:
        raise_if_failed(parity, BUCKET)
    assert raised.value.message.startswith(
        "prefill:512 failed its parity check: compiled logits differ from transformers' by 2, "
        "0.5 of the largest (tolerance 0.001), KL 0."
    )
    assert raised.value.message.endswith("nats (tolerance 1e-05)")
    assert raised.value.hint == "find the part with --region blocks --mode default, then --attention reference"


def test_a_passed_check_raises_nothing() -> None:
    reference = torch.tensor([[4.0, 1.0, 0.0]])
    raise_if_failed(compare_logits(reference, reference, "float32"), BUCKET)
