"""Environments and architectures for planning tests, written by hand: they need neither torch nor the hardware.

Tests derive others with `dataclasses.replace` or `changed_environment`, so each shows only what it depends on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tcdeploy.planning.architecture import Architecture, AttentionSpec
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.environment import GPU, Environment
from tcdeploy.planning.memory import DTYPE_BYTES
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

GIB = 1 << 30

H100 = Environment(
    python="3.11.7",
    torch="2.13.0",
    transformers="5.23.0",
    triton="3.7.1",
    cuda="13.0",
    driver="580.95.05",
    gpus=(GPU(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_bytes=80 * GIB, multiprocessors=132),),
    cpu="AVX512",
    cpu_threads=16,
    host_memory_bytes=128 * GIB,
    compiler="g++ 13.2.0",
    flash_packages=(),
    user_cache_dir="/home/someone/.cache",
)
ALL_FLASH = (("flash-attn-2", "2.8.3"), ("flash-attn-4", "4.0.0"))
LAPTOP = replace(
    H100,
    triton="",
    cuda="",
    driver="",
    gpus=(),
    cpu="AVX2",
    cpu_threads=8,
    host_memory_bytes=64 * GIB,
)


GPU_FIELDS = {
    "gpu": "name",
    "gpu_capability": "capability",
    "gpu_memory_bytes": "memory_bytes",
    "gpu_multiprocessors": "multiprocessors",
}
BLANK_GPU = GPU(name="", capability=(0, 0), memory_bytes=0, multiprocessors=0)


def changed_environment(environment: Environment, **changes: Any) -> Environment:
    """`environment` with other values; `gpu`, `gpu_capability` and so on change its first GPU."""
    gpu_changes = {GPU_FIELDS[name]: changes.pop(name) for name in list(changes) if name in GPU_FIELDS}
    if gpu_changes:
        first = environment.gpus[0] if environment.gpus else BLANK_GPU
        changes["gpus"] = (replace(first, **gpu_changes), *environment.gpus[1:])
    return replace(environment, **changes)


A10G = changed_environment(
    H100, gpu="NVIDIA A10G", gpu_capability=(8, 6), gpu_memory_bytes=24 * GIB, gpu_multiprocessors=80
)
RTX_4080 = changed_environment(
    H100, gpu="NVIDIA GeForce RTX 4080", gpu_capability=(8, 9), gpu_memory_bytes=16 * GIB, gpu_multiprocessors=76
)


def attention_layers(layers: int, **fields: Any) -> tuple[AttentionSpec, ...]:
    """`layers` equal attention blocks; by default those of Llama 8B: 32 heads of 128 over 8 KV heads."""
    llama = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "window": 0, "softcap": 0.0}
    return tuple(
        AttentionSpec(path=f"model.layers.{layer}.self_attn", **{**llama, "has_sinks": False, **fields})
        for layer in range(layers)
    )


def dense_bytes(parameters: int) -> dict[str, int]:
    """`Architecture.weight_bytes` of a model whose tensors all have its dtype."""
    return {dtype: parameters * size for dtype, size in DTYPE_BYTES.items()}


LLAMA_8B = Architecture(
    "llama", "LlamaForCausalLM", dense_bytes(8_030_261_248), 131072, 128256, "bfloat16", attention_layers(32)
)
LLAMA_1B = Architecture(
    "llama", "LlamaForCausalLM", dense_bytes(1_235_814_400), 131072, 128256, "bfloat16",
    attention_layers(16, head_dim=64, v_head_dim=64), peak_activation_elements=20480,
)  # fmt: skip
QWEN3_32B = Architecture(
    "qwen3", "Qwen3ForCausalLM", dense_bytes(32_762_123_264), 40960, 151936, "bfloat16",
    attention_layers(64, heads=64), peak_activation_elements=61440,
)  # fmt: skip
GEMMA_2_9B = Architecture(  # soft-capped scores
    "gemma2", "Gemma2ForCausalLM", dense_bytes(9_241_705_984), 8192, 256000, "bfloat16",
    attention_layers(42, heads=16, head_dim=256, v_head_dim=256, softcap=50.0),
)  # fmt: skip
GPT_OSS_20B = Architecture(  # attention sinks
    "gpt_oss", "GptOssForCausalLM", dense_bytes(20_914_757_184), 131072, 201088, "bfloat16",
    attention_layers(24, heads=64, head_dim=64, v_head_dim=64, has_sinks=True),
)  # fmt: skip
DEEPSEEK_LITE = Architecture(  # K and V of different head dimensions
    "deepseek_v2", "DeepseekV2ForCausalLM", dense_bytes(15_706_484_224), 163840, 102400, "bfloat16",
    attention_layers(27, heads=16, kv_heads=16, head_dim=192, v_head_dim=128),
)  # fmt: skip


def make_recipe(**fields: Any) -> Recipe:
    return Recipe(**{"model": "someone/model", **fields})


def decisions_named(plan: Plan, name: str) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.name == name]


def decision_named(plan: Plan, name: str) -> Decision:
    """The only decision of that name; fails the test if there is not exactly one."""
    [decision] = decisions_named(plan, name)
    return decision
