"""`prepare`: from a recipe to a running deployment.

If an earlier start has left packages and a record of them, and `--programs` is not jit (start/auto_programs.py), a
deployment starts from the packages alone (start/packages.py). Every other start needs the model's code
(start/model_code.py). Both run start/sequence.py, and import torch first. Meanwhile threads create the CUDA context and
read the weights into the page cache. Does not import torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy.errors import UsageError
from tcdeploy.host.cuda_context import start_context
from tcdeploy.host.plain_progress import default_progress
from tcdeploy.host.progress import Progress
from tcdeploy.models.location import local_folder
from tcdeploy.models.weights.read_ahead import start_read_ahead
from tcdeploy.models.weights.weight_paths import weight_files
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.planned import StartRequest

if TYPE_CHECKING:
    from tcdeploy.start.deployment import Deployment

_begun: Recipe | None = None  # the last recipe of `begin_start`, until the next `prepare`


def prepare(
    recipe: Recipe,
    progress: Progress | None = None,
    measure: bool = False,
    trusted_keys: Path | None = None,
    needs_tokenizer: bool = False,
    eager: bool = False,
    needs_model: bool = False,
    serves: bool = False,
) -> Deployment:
    """Turn a recipe into a warmed deployment. Raises TcdeployError.

    progress: where the start reports its stages; None: lines on stderr if it is a terminal, otherwise nothing.
        `NullProgress()` is silent.
    measure: also time each bucket, uncompiled and compiled. Uncompiled steps need the model's code.
    trusted_keys: folder of the public keys whose signatures on bundles are trusted; None: the default folder.
    needs_tokenizer: load the tokenizer before the weights, so that a model without one fails before it is compiled.
    eager: return a deployment with eager steps, which `Deployment.swaps` replaces by programs (start/eager.py). Call
        it in the thread that then runs the engine.
    needs_model: do not start from packages, because the caller uses the model's modules.
    serves: the caller calls `Engine.capture_next_graph` while no request is open. It then times the steps after the
        first start of programs that were built without the GPU; otherwise the start does.

    What this changes in the process: it sets the variables TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR,
    TRITON_CACHE_MANAGER, TRITON_PTXAS_PATH and CUDA_MODULE_LOADING; raises torch._dynamo's recompile limits; registers
    an attention function with transformers and an audit hook with Python; and applies the patches of torch_compat/. A
    cold start may run compile workers as child processes, which have ended when this returns, except with `eager`. The
    garbage collector is changed only if the program has called `relax_gc_for_startup`: imported objects are then
    frozen. Signals and logging are not touched.
    """
    if eager:
        check_eager_start(recipe)
    with default_progress() if progress is None else nullcontext(progress) as shown:
        return _prepare(StartRequest(recipe, shown, measure, trusted_keys, needs_tokenizer, eager, needs_model, serves))


def begin_start(recipe: Recipe) -> None:
    """Start the threads of a `prepare` of this recipe that is called later. To be called before torch is imported."""
    global _begun
    _begun = recipe
    if recipe.device != "cpu":
        start_context()
    folder = local_folder(recipe.model, recipe.revision) if recipe.load_format == "auto" else None
    if folder is not None:
        start_read_ahead(weight_files(recipe.model, folder))


def _prepare(request: StartRequest) -> Deployment:
    global _begun
    recipe = request.recipe
    if recipe != _begun:
        begin_start(recipe)
    _begun = None
    from tcdeploy.start.auto_programs import may_use_packages  # after the threads have begun

    if may_use_packages(request) and not (request.measure or request.needs_model):
        from tcdeploy.start.packages import start_from_packages

        deployment = start_from_packages(request)
        if deployment is not None:
            return deployment
    request.progress.detail("import transformers")
    from tcdeploy.start import model_code

    return model_code.start_from_code(request)


def check_eager_start(recipe: Recipe) -> None:
    """Raise UsageError for a recipe that cannot start eagerly (start/eager.py)."""
    reasons = {
        "--programs aot": (recipe.programs == "aot", "a start from packages takes seconds, and runs no eager steps"),
        "--tune-seconds": (recipe.tune_seconds > 0, "timing variants would delay requests"),
        "--trust-remote-code": (
            recipe.trust_remote_code,
            "programs are compiled on a copy of the model's config alone",
        ),
        "--require-signed": (recipe.require_signed, "it compiles nothing, so a warm start takes seconds"),
        "--no-compile": (not recipe.compile, "it compiles in another process"),
    }
    for option, (is_given, reason) in reasons.items():
        if is_given:
            raise UsageError(f"--start eager excludes {option}: {reason}", f"omit --start, or {option}")
