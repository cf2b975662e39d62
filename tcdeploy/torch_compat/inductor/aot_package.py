"""Compile an exported program to an AOTInductor package, and load a package without torch's compiler.

The public loader, `torch._inductor.aoti_load_package`, imports Inductor. Its class is in torch's C++ module.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from tcdeploy.planning.environment import AOT_PACKAGES
from tcdeploy.torch_compat.inductor.aot_pdl import dependent_launches
from tcdeploy.torch_compat.inductor.package_builds import start_build
from tcdeploy.torch_compat.internal import find, internal

LOADER = "torch:_C._aoti.AOTIModelPackageLoader"
COMPILER = "torch._inductor:aoti_compile_and_package"
CONFIG = "torch._inductor.config:aot_inductor"
MODEL_NAME = "model"  # of the only model in a package


@internal(AOT_PACKAGES, "torch._C._aoti.AOTIModelPackageLoader", "--programs aot is replaced by jit")
def supported() -> bool:
    return hasattr(find(LOADER), "boxed_run")


def start_package(exported: Any, path: str, inductor_config: dict[str, Any]) -> Future[None]:
    """Compile a torch.export.ExportedProgram to the file `path`, which ends in .pt2.

    Returns when its code was generated. The C++ compiler runs in a thread, and the result is available when it ends.
    Without tables of source lines, which torch adds by default, a package is a third as large.
    """
    settings = find(CONFIG)
    without_lines = {"aot_inductor.enable_line_tables": False} if hasattr(settings, "enable_line_tables") else {}
    metadata = getattr(settings, "metadata", {})
    metadata_before = dict(metadata)
    try:
        with warnings.catch_warnings(), dependent_launches():
            warnings.filterwarnings("ignore", category=FutureWarning)  # torch copies its deprecated LeafSpec
            configs = {**inductor_config, **without_lines}
            return start_build(lambda: find(COMPILER)(exported, package_path=path, inductor_configs=configs))
    finally:  # torch adds to this setting in place, and it is part of its cache keys
        metadata.clear()
        metadata.update(metadata_before)


def load_package(path: str, device_index: int, unpack_folder: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function from the program's inputs to its outputs, which empties the list of inputs.

    The function checks neither shapes nor dtypes: a wrong input can be read out of bounds. `device_index`: -1 for a
    CPU. torch unpacks the package into a folder below TMPDIR, and leaves it there unless the loader is destroyed before
    the process exits. So TMPDIR is `unpack_folder` during the call.
    """
    is_single_threaded, num_runners = True, 1
    previous = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = unpack_folder
    try:
        loader = find(LOADER)(path, MODEL_NAME, is_single_threaded, num_runners, device_index)
    finally:
        if previous is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = previous
    run: Callable[[list[Tensor]], list[Tensor]] = loader.boxed_run
    return run
