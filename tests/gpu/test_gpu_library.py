"""`LLM` and `AsyncLLM` on a GPU: the same answers, and memory that is free after `close`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.gpu
WORKSPACES_MB = 68  # of cuBLAS, for the two streams of a thread; torch keeps them until the process ends
PROGRAM = """
import asyncio, json, sys
import torch
from tcdeploy import LLM, AsyncLLM, SamplingParams

fields = {"buckets": (32,), "batch_sizes": (1, 4), "context": 512, "kv_blocks": 256, "cache_dir": sys.argv[1]}
prompts, params = ["This module provides", "Return the", [40, 41, 42]], SamplingParams(max_tokens=32)
megabytes = []

def generate(llm):
    answers = [answer.text for answer in llm.generate(prompts, params)]
    megabytes.append(torch.cuda.memory_allocated() / 1e6)
    return answers

async def stream():
    async with AsyncLLM("builtin:tiny", **fields) as llm:
        answers = await asyncio.gather(*(llm.generate(prompt, params) for prompt in prompts))
        return [answer.text for answer in answers]

with LLM("builtin:tiny", **fields) as first:
    texts = [generate(first)]
    with LLM("builtin:tiny", **fields) as second:
        texts.append(generate(second))
    texts.append(generate(first))
megabytes.append(torch.cuda.memory_allocated() / 1e6)
texts.append(asyncio.run(stream()))
megabytes.append(torch.cuda.memory_allocated() / 1e6)
print(json.dumps({"texts": texts, "megabytes": megabytes}))
"""


def test_answers_are_equal_and_close_frees_the_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["texts"] == [result["texts"][0]] * 4
    one, two, again, none, after_stream = result["megabytes"]
    assert two > one + 10, "a second model has weights and a KV cache of its own"
    assert again < one + 2 and none < one - 10, result["megabytes"]
    assert after_stream < none + WORKSPACES_MB, "the engine thread of AsyncLLM has its own workspaces"
