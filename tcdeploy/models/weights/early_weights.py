"""Reads a checkpoint to the GPU while transformers and the compiler are imported and the plan is decided.

`from_pretrained` copies the weights from pageable memory at 8 GB/s (H100), after seconds in which the disk and the GPU
are idle. Here a thread allocates all tensors of the checkpoint as soon as torch is imported, and reads them.
`load_model` passes them to `from_pretrained` as a state dict. transformers renames, converts and ties them as usual,
and uses those that are not converted without a copy.

Nothing is read early if the load may need other files or dtypes, or if memory is short. After a failure here a warning
is logged, and transformers loads the model from its files, so users see that load's errors.

Rejected: one allocation for all tensors. `pack_linears` replaces most of them, and their memory could not be freed.
Rejected: a `device_map`. transformers would reserve the model's size a second time, and it requires accelerate.
Does not import transformers.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tcdeploy.errors import ModelError
from tcdeploy.models.location import read_config_file
from tcdeploy.models.weights.reader import Copy, ReadTotal, StoredTensor, copying_tensors, read_header, stored_tensors
from tcdeploy.planning.backends import HALF_DTYPES
from tcdeploy.planning.recipe import Recipe

METADATA = "__metadata__"
# With one of these keys, transformers loads other files or converts the stored tensors.
EXCLUDED_CONFIG_KEYS = {"quantization_config", "compression_config", "transformers_weights"}
ADAPTER_CONFIG = "adapter_config.json"  # if peft is installed, transformers loads the adapter too
# Share of the free GPU memory that a checkpoint may take. While its tensors exist, transformers merges those of experts
# and `pack_linears` copies layers, so up to twice its size may be in use. A load from files merges one layer at a time.
MAX_MEMORY_SHARE = 0.5
FIRST_GPU = torch.device("cuda", 0)  # starts use it unless the program has called torch.cuda.set_device
log = logging.getLogger("tcdeploy.models")


@dataclass(frozen=True)
class PreloadedSlice:
    """A tensor with the interface of a safetensors slice, so that `from_pretrained` leaves it on its device.

    transformers calls `slice[...]`, and then `to(device, dtype)`. Without a device map, `device` is the CPU.
    """

    tensor: Tensor

    def __getitem__(self, index: object) -> PreloadedSlice:
        return self

    def to(self, device: object, dtype: torch.dtype | None) -> Tensor:
        return self.tensor.to(dtype=dtype)


class EarlyWeights:
    """Reads the tensors of `paths`, which are in `folder`, to `device` in threads, from construction on.

    Nothing is read unless all floating-point tensors have one of `dtypes`. Leaving the `with` block stops the threads
    and frees tensors that were not taken. weights_read: None unless a model was loaded from the tensors.
    """

    def __init__(self, folder: Path, paths: list[Path], device: torch.device, dtypes: tuple[str, ...]) -> None:
        self.weights_read: ReadTotal | None = None
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._total = ReadTotal()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(paths, device, dtypes), name="early-weights")
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Device memory of the tensors that have not been taken. Waits until they are read."""
        self._thread.join()
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def take(self, folder: Path | None, device: str, dtype: torch.dtype) -> dict[str, PreloadedSlice]:
        """Wait until all tensors are read, and return them by stored name; {} in every later call.

        Also {} if they were not read, or do not fit this device and dtype, or if the model's folder is another one now:
        transformers may have found a new commit of a Hub repository since the reading began.
        """
        self._thread.join()
        tensors, self._tensors = self._tensors, {}
        if folder != self._folder:
            return {}
        values = tensors.values()
        if any(item.device.type != device or (item.is_floating_point() and item.dtype != dtype) for item in values):
            return {}
        self.weights_read = self._total if tensors else None
        return {name: PreloadedSlice(tensor) for name, tensor in tensors.items()}

    def __enter__(self) -> EarlyWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._tensors = {}

    def _read(self, paths: list[Path], device: torch.device, dtypes: tuple[str, ...]) -> None:
        try:
            stored = stored_tensors(paths)
            if reason := _why_not_read(paths, stored, device, dtypes):
                log.info("the weights are not read early: %s", reason)
                return
            tensors = {name: torch.empty(item.shape, dtype=item.dtype, device=device) for name, item in stored.items()}
            with copying_tensors((Copy(stored[name], tensor) for name, tensor in tensors.items()), self._stop) as total:
                pass
            self._tensors, self._total = tensors, total  # incomplete if `_stop` is set: `__exit__` then discards them
        except Exception as error:  # OSError, ModelError, CUDA errors, out of memory: the load from files reports it
            log.warning("transformers reads the weights, because they could not be read early: %s", str(error))
            # A cycle of frames and futures refers to the tensors. The start freezes its objects soon, and the garbage
            # collector would never free them.
            traceback.clear_frames(error.__traceback__)


def start_reading(recipe: Recipe, folder: Path, paths: list[Path]) -> EarlyWeights | None:
    """Start threads that read the weight files `paths` to the GPU. None if the model needs more than these tensors.

    Excludes `trust_remote_code`: transformers looks for the code in a folder, and a state dict has none.
    """
    if not paths or recipe.trust_remote_code or not torch.cuda.is_available():
        return None
    if torch.cuda.is_initialized() and torch.cuda.current_device() != FIRST_GPU.index:
        return None
    try:
        excluded_keys = EXCLUDED_CONFIG_KEYS & read_config_file(folder / "config.json").keys()
    except ModelError:
        return None
    if excluded_keys or (folder / ADAPTER_CONFIG).exists():
        return None
    # Without --dtype, a plan on a GPU keeps HALF_DTYPES and converts others.
    return EarlyWeights(folder, paths, FIRST_GPU, (recipe.dtype,) if recipe.dtype else HALF_DTYPES)


def _why_not_read(
    paths: list[Path], stored: Mapping[str, StoredTensor], device: torch.device, dtypes: tuple[str, ...]
) -> str:
    """Why the tensors cannot be read early; "" if they can. All floating-point tensors must have one of `dtypes`."""
    names = [name for path in paths for name in json.loads(read_header(path)) if name != METADATA]
    if len(names) != len(stored):
        return "a tensor has an unknown dtype, or is in two files"
    stored_dtypes = {str(item.dtype).removeprefix("torch.") for item in stored.values() if item.dtype.is_floating_point}
    if len(stored_dtypes) != 1 or not stored_dtypes <= {*dtypes}:
        return f"the stored dtypes are {sorted(stored_dtypes)}; exactly one of {list(dtypes)} is needed"
    num_bytes = sum(item.end - item.begin for item in stored.values())
    if device.type == "cuda" and num_bytes > MAX_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        return f"{num_bytes / 2**30:.1f} GiB are over {MAX_MEMORY_SHARE:.0%} of the free GPU memory"
    return ""
