"""The fingerprint is equal for equal weights in another folder, and differs for fine-tunes and other plans."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.plan import make_plan
from tcdeploy.server.service import system_fingerprint
from tests.conftest import TINY
from tests.machines import H100, LLAMA_8B, make_recipe


def test_it_follows_the_plan_and_the_weights_but_not_the_folder(tmp_path: Path) -> None:
    plan = make_plan(make_recipe(), H100, LLAMA_8B)
    model = replace(plan, model=TINY)
    fingerprint = system_fingerprint(model)
    assert re.fullmatch("fp_[0-9a-f]{10}", fingerprint)
    folder = Path(shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "model"))
    copy = replace(plan, model=str(folder))
    assert system_fingerprint(copy) == fingerprint
    others = {system_fingerprint(replace(model, key="0" * 16)), system_fingerprint(replace(model, load_format="dummy"))}
    with (folder / "model.safetensors").open("r+b") as file:  # a fine-tune has other weights everywhere
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    others.add(system_fingerprint(copy))
    assert len(others | {fingerprint}) == 4
