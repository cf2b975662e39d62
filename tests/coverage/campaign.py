"""Starts a small random model of every type that transformers loads as a text generator, and compares its answers.

Each model is saved as safetensors and started by `prepare` in float32, as a user would. Then a batch of unequal
prompts, one longer than the largest bucket, is continued by 24 greedy and by 24 sampled tokens (comparison.py). A type
that passes is also started from ahead-of-time packages, whose exported programs are not compiled. scripts/coverage runs
all types, and writes the table of docs/models.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import lookup_backend
from torch.fx import GraphModule
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from tcdeploy.errors import ModelError, TcdeployError
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.weights.dummy_weights import draw_dummy_weights
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs.jit import JitLoader
from tcdeploy.programs.programs import Program, ProgramKey, run_region
from tcdeploy.start import packages
from tcdeploy.start.deployment import release_memory
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.prepare import prepare
from tests.coverage.comparison import Reference, answer
from tests.coverage.small_configs import small_config
from tests.exported_programs import exported_programs
from tests.parity.campaign import RECENT_OBJECTS

BUCKETS = {"buckets": (32,), "batch_sizes": (4,)}


@dataclasses.dataclass(frozen=True)
class Result:
    """verdict: "served", "served as text only", "refused", "wrong" (other answers), "error", or "no small config".

    reason: of the refusal, or the last lines of the traceback. programs: of the buckets; 0 if uncompiled. packages:
    "started" if the type was served from packages alone, with right answers; otherwise what happened, or "" if it was
    not tried. difference: the largest difference between a log-probability and that of transformers; 0 if none was
    compared.
    """

    model_type: str
    verdict: str
    reason: str = ""
    programs: int = 0
    seconds: float = 0.0
    packages: str = ""
    difference: float = 0.0


def model_types() -> list[str]:
    """All types of the installed transformers with a causal LM class or a multimodal one."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    classes = {config_class for mapping in mappings for config_class in mapping.keys()}  # noqa: SIM118 - lazy
    return sorted(name for name in CONFIG_MAPPING.keys() if CONFIG_MAPPING[name] in classes)  # noqa: SIM118


def check_type(
    model_type: str, cache_dir: str, compiles: bool = True, dtype: str = "float32", with_packages: bool = False
) -> Result:
    """Start a small model of the type. In float32 also compare its answers: other dtypes may round to other tokens."""
    start = time.perf_counter()
    result = _check_type(model_type, cache_dir, compiles, dtype, with_packages)
    return dataclasses.replace(result, seconds=round(time.perf_counter() - start, 1))


def _check_type(model_type: str, cache_dir: str, compiles: bool, dtype: str, with_packages: bool) -> Result:
    try:
        config = small_config(model_type)
    except Exception as error:
        return Result(model_type, "no small config", _last_line(error))
    mode = contextlib.nullcontext() if compiles else traced_only()
    _free_memory(compiles)
    with tempfile.TemporaryDirectory() as folder, mode:
        try:
            save_model(config, Path(folder))
            recipe = {"model": folder, "dtype": dtype, "cache_dir": cache_dir, **BUCKETS}
            deployment = prepare(build_recipe(recipe, environ={}))
            reference = Reference(config, folder) if dtype == "float32" else None
            answers = answer(deployment.engine)
            problem = reference.compare(answers) if reference else ""
        except ModelError as error:
            return Result(model_type, "refused", error.message.replace(folder, model_type))
        except TcdeployError as error:
            return Result(model_type, "error", error.message.replace(folder, model_type))
        except Exception:
            return Result(model_type, "error", "".join(traceback.format_exc().splitlines(keepends=True)[-3:]))
        programs = sum(record.programs for record in deployment.records)
        verdict = "served as text only" if _is_text_only(deployment) else "served"
        del deployment
        packaged = ""
        if with_packages and reference and not problem:
            packaged = start_from_packages({**recipe, "cache_dir": f"{folder}/cache"}, reference, compiles)
    difference = reference.difference if reference else 0.0
    return Result(model_type, "wrong" if problem else verdict, problem, programs, 0.0, packaged, difference)


def _free_memory(compiles: bool) -> None:
    """Free the memory of earlier models. Small traced ones need no full collection, which takes 0.5 s."""
    if compiles:
        release_memory()
    else:
        torch.compiler.reset()
        gc.collect(RECENT_OBJECTS)


def start_from_packages(recipe: dict[str, Any], reference: Reference, compiles: bool) -> str:
    """Make the packages of a model, and start from them alone. Returns "started", or what went wrong."""
    request = StartRequest(build_recipe({**recipe, "programs": "aot"}, environ={}))
    _free_memory(compiles)
    with exported_programs():
        try:
            prepare(request.recipe)
            _free_memory(compiles)
            deployment = packages.start_from_packages(request)
            if deployment is None or deployment.engine.runner.has_model:
                return "the model's code was needed"
            return reference.compare(answer(deployment.engine)) or "started"
        except Exception as error:
            return _last_line(error)


def _is_text_only(deployment: Any) -> bool:
    return any(decision.name == "inputs" for decision in deployment.plan.decisions)


_functionalized: set[tuple[Any, ...]] = set()  # operations of the graphs that AOTAutograd has traced
_is_in_block: list[bool] = []  # not empty within `traced_only`


@contextlib.contextmanager
def traced_only() -> Iterator[None]:
    """Trace the programs as usual, but run the traced operations one by one instead of compiling them.

    The block contains the parity check. Of several graphs with equal operations, the first one is also traced by
    AOTAutograd, as for Inductor, and runs in this form within the block. All other calls run the graph as Dynamo traced
    it, which takes two thirds of the time.
    """

    def load(_: JitLoader, __: ProgramKey) -> Program:
        return torch.compile(run_region, fullgraph=True, dynamic=False, backend=run_operations)

    _functionalized.clear()
    _is_in_block.append(True)
    try:
        with patch.object(JitLoader, "load", load):
            yield
    finally:
        _is_in_block.pop()


def run_operations(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend of `traced_only`. It is a module-level function because Dynamo shares code only of equal backends."""
    operations = tuple(node.target for node in graph.graph.nodes if node.op != "placeholder")
    traced = graph.forward
    if operations in _functionalized:
        return traced
    _functionalized.add(operations)
    functional = lookup_backend("aot_eager")(graph, inputs)
    return lambda *args: (functional if _is_in_block else traced)(*args)


def save_model(config: Any, folder: Path) -> None:
    """Save random weights, or only the config if the type is refused before weights are read."""
    try:
        model_class = auto_class(config, trust_remote_code=False)
        torch.manual_seed(0)
        model = model_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        draw_dummy_weights(model)
        model.save_pretrained(folder)
    except Exception:  # for `prepare` to report
        config.save_pretrained(folder)


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"


def table(results: list[Result]) -> str:
    """Markdown: the types by verdict, and refused ones by reason; of the served ones, how many start from packages."""
    lines = ["| | types | from packages | |", "|---|---|---|---|"]
    for verdict in ("served", "served as text only", "wrong", "error", "no small config"):
        names = sorted(result.model_type for result in results if result.verdict == verdict)
        if names:
            started = sum(result.packages == "started" for result in results if result.verdict == verdict)
            lines.append(f"| {verdict} | {len(names)} | {started or ''} | {', '.join(names)} |")
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "refused":
            by_reason.setdefault(_general_reason(result), []).append(result.model_type)
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        lines.append(f"| refused: {reason} | {len(names)} | | {', '.join(sorted(names))} |")
    return "\n".join(lines)


NOT_TEXT = "inputs other than text are required"
OUTSIDE_INTERFACE = "attention code outside of transformers' AttentionInterface"
# Part of a message: the reason in the table. The first part that occurs applies.
REASONS = {
    "never calls": OUTSIDE_INTERFACE,
    "does not look its attention up": OUTSIDE_INTERFACE,
    "never call the": "layers outside of transformers' AttentionInterface",
    "has no causal LM": "types without a class that generates text",
    "which a KV cache cannot serve": "kinds of layers without a KV cache of their own (recurrent, chunked, indexed)",
    "no keys and values of its own": "layers that attend to keys and values of another model",
    "combines several models": "several models without a common forward pass",
    "is not causal": "attention that is not causal",
    "token positions of its own": "token positions of their own",
    "not installed": "packages that are not installed",
    "on the host": "code that reads values of tensors on the host",
    "whose size depends": "code with data-dependent shapes",
    "requires inputs other than text": NOT_TEXT,
    **dict.fromkeys(
        ("pixel_values", "input_features", "image_embeds", "perceiver_embeddings", "flattened_patches", "Bbox"),
        NOT_TEXT,
    ),
    "quantised": "quantised weights",
    "max_position_embeddings": "no max_position_embeddings in the config",
    "encoder-decoder": "encoder-decoders",
    "its own attention mask": "attention masks of their own",
    "does not pass it to attention": "windows that attention does not receive",
    "times in one forward pass": "layers that attend more than once",
}


def _general_reason(result: Result) -> str:
    return next((text for part, text in REASONS.items() if part in result.reason), "other reasons")
