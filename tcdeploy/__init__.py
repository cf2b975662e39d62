"""Compiles and serves Hugging Face causal LMs with torch.compile, in plain PyTorch.

As a library:

    from tcdeploy import Recipe, SamplingParams, prepare

    engine = prepare(Recipe(model="builtin:tiny")).engine
    request_id = engine.submit([40, 41, 42], SamplingParams(max_tokens=16))
    while engine.has_work:
        for token in engine.step():
            print(token.request_id, token.token_id)

The names below are imported lazily, so that `tcdeploy --help` does not wait for torch.
"""

import importlib

__version__ = "0.2.0"

LAZY_EXPORTS = {
    "Engine": "tcdeploy.engine.engine",
    "NewToken": "tcdeploy.engine.engine",
    "Recipe": "tcdeploy.planning.recipe",
    "SamplingParams": "tcdeploy.engine.schedule.sequence",
    "prepare": "tcdeploy.start.prepare",
}


def __getattr__(name: str) -> object:
    if name not in LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY_EXPORTS[name]), name)
