"""Backend checks: every rejection and its reason, for any machine and any model."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.attention import why_unsupported
from tcdeploy.planning.decision import DTypes, PlanInputs
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.recipe import Attention
from tests.machines import (
    ALL_FLASH,
    DEEPSEEK_LITE,
    GEMMA_2_9B,
    GPT_OSS_20B,
    H100,
    LAPTOP,
    LLAMA_8B,
    attention_layers,
    changed_environment,
    make_recipe,
)

BACKENDS: tuple[Attention, ...] = typing.get_args(Attention)
FLASH = ("torch-flash", "flash-attn-2", "flash-attn-4")
FULL = replace(H100, flash_packages=ALL_FLASH)


def reason(
    backend: str, environment: Environment, architecture: Architecture, device: str = "cuda", dtype: str = "bfloat16"
) -> str:
    """The reason of the rejection, or "" if the backend is supported."""
    inputs = PlanInputs(make_recipe(), environment, architecture, device, DTypes(dtype, dtype, dtype))  # type: ignore[arg-type]
    return why_unsupported(backend, inputs)  # type: ignore[arg-type]


def with_heads(head_dim: int, v_head_dim: int | None = None) -> Architecture:
    """Llama 8B with other head dimensions in its last layer only: one unsupported layer is enough."""
    last = attention_layers(32, head_dim=head_dim, v_head_dim=v_head_dim or head_dim)[-1]
    return replace(LLAMA_8B, layer_states=(*LLAMA_8B.attention_layers[:-1], last))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_h100_runs_every_backend_on_llama(backend: str) -> None:
    assert reason(backend, FULL, LLAMA_8B) == ""
    assert reason(backend, FULL, LLAMA_8B, dtype="float16") == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_supports_sinks(backend: str) -> None:
    assert reason(backend, FULL, GPT_OSS_20B) == ""


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"reference"}))
def test_without_a_gpu_only_the_reference_runs(backend: str) -> None:
    assert reason(backend, LAPTOP, LLAMA_8B, "cpu", "float32") == "it requires a GPU"
    assert reason(backend, FULL, LLAMA_8B, "cpu", "bfloat16") == "it requires a GPU"
    assert reason("reference", LAPTOP, LLAMA_8B, "cpu", "float32") == ""


@pytest.mark.parametrize("architecture", [LLAMA_8B, GEMMA_2_9B, GPT_OSS_20B, DEEPSEEK_LITE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_reference_supports_every_model_and_triton_head_dims_up_to_256(
    architecture: Architecture, dtype: str
) -> None:
    bare = replace(H100, triton="")
    assert reason("reference", bare, architecture, dtype=dtype) == ""
    assert reason("triton", H100, architecture, dtype=dtype) == ""


def test_triton_must_be_installed() -> None:
    assert reason("triton", replace(FULL, triton=""), LLAMA_8B) == "triton is not installed"


def test_triton_rejects_head_dims_without_prefill_tiles() -> None:
    """`prefill.PREFILL_TILES` ends at a padded head_dim of 512; beyond it, bfloat16 prefill raises KeyError."""
    assert reason("triton", H100, with_heads(512)) == ""
    assert "1024" in reason("triton", H100, with_heads(1024))
    assert "520" in reason("triton", H100, with_heads(192, 520))


@pytest.mark.parametrize(
    ("backend", "distribution"),
    [("flash-attn-2", "flash-attn"), ("flash-attn-4", "flash-attn-4")],
)
def test_a_missing_package_is_named(backend: str, distribution: str) -> None:
    others = tuple(item for item in ALL_FLASH if item[0] != backend)
    missing = replace(H100, flash_packages=others)
    assert reason(backend, missing, LLAMA_8B) == f"{distribution} is not installed"


def test_the_flash_attention_of_torch_needs_no_package() -> None:
    assert reason("torch-flash", H100, LLAMA_8B) == ""


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((7, 5), set()),
        ((8, 0), {"torch-flash", "flash-attn-2"}),
        ((8, 9), {"torch-flash", "flash-attn-2"}),
        ((9, 0), set(FLASH)),
        ((10, 0), {"torch-flash", "flash-attn-2", "flash-attn-4"}),
        ((11, 0), {"torch-flash", "flash-attn-2", "flash-attn-4"}),
        ((12, 0), {"torch-flash", "flash-attn-2"}),
    ],
)
def test_kernels_run_on_the_compute_capabilities_they_are_built_for(
    capability: tuple[int, int], built: set[str]
) -> None:
    machine = changed_environment(FULL, gpu_capability=capability)
    for backend in FLASH:
        expected = (
            "" if backend in built else f"it has no kernels for compute capability {capability[0]}.{capability[1]}"
        )
        assert reason(backend, machine, LLAMA_8B) == expected
    assert reason("triton", machine, LLAMA_8B) == ""


@pytest.mark.parametrize("backend", FLASH)
def test_flash_attention_does_not_compute_in_float32(backend: str) -> None:
    assert reason(backend, FULL, LLAMA_8B, dtype="float32") == "it supports only bfloat16 and float16"


@pytest.mark.parametrize(("backend", "limit"), [("torch-flash", 256), ("flash-attn-2", 256), ("flash-attn-4", 128)])
def test_head_dims_are_limited_to_multiples_of_8(backend: str, limit: int) -> None:
    for supported in (8, 80, limit):
        assert reason(backend, FULL, with_heads(supported)) == ""
    for unsupported in (84, limit + 8):
        assert (
            reason(backend, FULL, with_heads(unsupported))
            == f"head_dim {unsupported} is not a multiple of 8 up to {limit}"
        )


@pytest.mark.parametrize("backend", FLASH)
def test_flash_attention_requires_equal_head_dims(backend: str) -> None:
    assert reason(backend, FULL, with_heads(96, 64)) == "keys have head_dim 96 and values 64; it requires them equal"


def test_soft_capping_rejects_only_the_flash_attention_of_torch() -> None:
    capped = replace(LLAMA_8B, layer_states=(*LLAMA_8B.attention_layers, *attention_layers(1, softcap=30.0)))
    assert reason("torch-flash", FULL, capped) == "it does not support logit soft-capping, which this model uses"
    for backend in set(BACKENDS) - {"torch-flash"}:
        assert reason(backend, FULL, capped) == ""


def test_only_the_first_reason_is_given() -> None:
    """Order: machine, dtype, model."""
    nothing_fits = replace(GEMMA_2_9B, layer_states=attention_layers(1, head_dim=300, v_head_dim=64, softcap=1.0))
    turing = changed_environment(H100, gpu_capability=(7, 5))
    assert reason("flash-attn-2", turing, nothing_fits, "cpu", "float32") == "it requires a GPU"
    assert reason("flash-attn-2", turing, nothing_fits, "cuda", "float32") == "flash-attn is not installed"
    installed = replace(turing, flash_packages=ALL_FLASH)
    assert "capability 7.5" in reason("flash-attn-2", installed, nothing_fits, "cuda", "float32")
    assert "bfloat16" in reason("flash-attn-2", FULL, nothing_fits, "cuda", "float32")
    assert "head_dim 300" in reason("flash-attn-2", FULL, nothing_fits)
