"""Decides whether products with FP8 weights quantise their inputs (activations) to FP8 too.

This makes steps of many tokens faster, but an FP8 code has only 3 bits of mantissa. So it is the default only if the
checkpoint asks for it, or with `--quantize fp8`. The scales are computed for each token.

The decision is one number for all layers of a plan: the rows from which products quantise their inputs. Decode steps
with fewer rows are bound by reading the weights, and keep inputs of 16 bits. All prefill steps quantise: their programs
have a symbolic number of tokens, or at least that many. So values do not depend on how prompts are cut into chunks.
Does not import torch.
"""

from __future__ import annotations

from tcdeploy.planning.decision import FP8_CAPABILITY, Decisions, PlanInputs

# By scheme, the rows from which a product of quantised inputs is faster than one with inputs of 16 bits (H200).
MIN_ROWS = {"fp8_channel": 17, "fp8_block": 33}
BLOCK_CAPABILITY = (9, 0)  # the only compute capability for which cuBLAS multiplies with scales of blocks
BLOCK_CUDA = (12, 9)  # the first version of CUDA that does


def decide_fp8_min_rows(inputs: PlanInputs, prefill_lengths: tuple[int, ...], decisions: Decisions) -> int:
    """Rows from which products with FP8 weights quantise their inputs; 0: none do.

    At most the smallest prefill length, unless prefill programs have a symbolic one. Without such weights, or on a CPU,
    the result is 0, and no decision is added.
    """
    schemes = [scheme for scheme in inputs.architecture.schemes if scheme in MIN_ROWS]
    if not schemes or inputs.device == "cpu":
        return 0
    if reason := _reason_for_16_bits(inputs, schemes):
        decisions.add("activations", "16-bit", reason)
        return 0
    min_rows = max(MIN_ROWS[scheme] for scheme in schemes)
    if inputs.recipe.shapes != "dynamic":
        min_rows = min(min_rows, *prefill_lengths)
    reason = f"{inputs.architecture.quantisation} quantises them too; scales are computed for each token"
    if any(scheme in MIN_ROWS for scheme in inputs.architecture.expert_schemes):
        reason += "; inputs of experts keep 16 bits"
    value = f"fp8 (prefill steps, and decode steps of {min_rows} rows and more)"
    decisions.add("activations", value, reason)
    return min_rows


def _reason_for_16_bits(inputs: PlanInputs, schemes: list[str]) -> str:
    """Why no inputs are quantised; "" if they are."""
    environment, architecture, dtype = inputs.environment, inputs.architecture, inputs.dtypes.compute
    (major, minor), gpu = environment.gpu_capability, environment.gpu
    described = f"{gpu} has compute capability {major}.{minor}"
    has_blocks = "fp8_block" in schemes
    if inputs.recipe.fp8_activations == "off":
        return "requested"
    if not architecture.fp8_inputs:
        return f"{architecture.quantisation} quantises the weights only"
    if dtype != "bfloat16":
        return f"products of FP8 inputs are computed in bfloat16 only, and the dtype is {dtype}"
    if (major, minor) < FP8_CAPABILITY:
        return f"{described}; products of FP8 inputs require 8.9"
    if has_blocks and (major, minor) != BLOCK_CAPABILITY:
        return f"{described}; products with scales of blocks require 9.0"
    if has_blocks and _version(environment.cuda) < BLOCK_CUDA:
        return f"products with scales of blocks require CUDA 12.9, and torch was built with {environment.cuda}"
    if not environment.triton:
        return "Triton is not installed, and its kernel quantises them"
    return ""


def _version(text: str) -> tuple[int, ...]:
    """12.9 as (12, 9)."""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
