"""The process that builds a plan for a GPU which this machine does not have (process.py starts it).

It must answer for the GPU (torch_compat/blind/device.py) before anything imports torch's compiler, so the build itself
is imported afterwards. Its messages go to stderr.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tcdeploy.errors import TcdeployError, UsageError
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.models.unused_packages import enable_fast_transformers_import
from tcdeploy.planning.environment import lists_to_tuples
from tcdeploy.planning.gpu_description import GPUDescription, read_gpu_description
from tcdeploy.planning.recipe import Recipe


def main() -> None:
    """Read a request from stdin: "recipe", "target", "winners" and "report", the file for the result or the error."""
    request = json.load(sys.stdin)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor")  # launches read its alignment
    enable_fast_transformers_import()
    try:
        recipe, target = Recipe(**lists_to_tuples(request["recipe"])), read_gpu_description(request["target"])
        result = _build(recipe, target, Path(request["winners"]) if request["winners"] else None)
    except TcdeployError as error:
        result = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    Path(request["report"]).write_text(json.dumps(result), encoding="utf-8")


def _build(recipe: Recipe, target: GPUDescription, winners: Path | None) -> dict[str, Any]:
    """The fields of `BlindResult`. Raises TcdeployError."""
    start = time.perf_counter()
    import torch

    if torch.version.cuda is None:
        raise UsageError(
            f"PyTorch {torch.__version__} is built for CPUs, and its programs cannot run on a GPU",
            "install the CUDA build of PyTorch that the GPU's machine has: https://pytorch.org",
        )
    from tcdeploy.torch_compat.blind import device, linker

    with temporary_folder("stub") as stub:
        linker.prepare_linking(stub, torch.version.cuda)
        device.pretend(target, stub)
        from tcdeploy.start.blind.build import build_plan  # imports torch's compiler

        plan_key, cache_dir = build_plan(recipe, target, winners)
    return {
        "plan_key": plan_key, "cache_dir": cache_dir, "seconds": time.perf_counter() - start,
        "choices": list(device.choices),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip


if __name__ == "__main__":
    main()
