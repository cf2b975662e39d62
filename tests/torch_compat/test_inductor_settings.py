"""The settings that programs depend on enter the plan's key, and those that only switch caches off do not."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch._inductor.config as inductor_config

from tcdeploy.torch_compat.inductor.settings import CPP_VARIABLES, settings_digest, torch_settings

OF_OTHER_SYSTEMS = {
    "CONDA_EXE", "CONDA_PREFIX", "CXX", "KMP_DUPLICATE_LIB_OK", "LEVEL_ZERO_V1_SDK_PATH", "OMP_PREFIX", "ProgramFiles",
    "ProgramFiles(x86)", "WINDOWS_CUDA_HOME",
}  # fmt: skip
OF_GPUS = {"CUDA_HOME", "CUDA_PATH"}
NO_FLAGS = {"TORCH_INDUCTOR_INSTALL_GXX"}  # installs a compiler, whose version is a factor


def test_each_variable_that_changes_flags_of_the_compiler_is_known() -> None:
    """Inductor reads these besides its settings. (CXX is a setting too on Linux.)"""
    from torch._inductor import cpp_builder

    pattern = r"(?:environ\.get|getenv)\(\s*[\"']([^\"']+)"
    read = set(re.findall(pattern, inspect.getsource(cpp_builder)))
    assert read - OF_OTHER_SYSTEMS - OF_GPUS - NO_FLAGS == set(CPP_VARIABLES)


def test_the_digest_changes_with_each_setting_that_programs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [settings_digest(torch_settings())]
    for name in CPP_VARIABLES:
        monkeypatch.setenv(name, "1")
        digests.append(settings_digest(torch_settings()))
    with inductor_config.patch(epilogue_fusion=False):
        digests.append(settings_digest(torch_settings()))
    with inductor_config.patch({"cpp.cxx": (None, "clang++")}):
        digests.append(settings_digest(torch_settings()))
    with torch.compiler.config.patch(cache_key_tag="x"):
        digests.append(settings_digest(torch_settings()))
    assert len(set(digests)) == len(digests)


def test_settings_that_change_no_program_are_not_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_digest(torch_settings())
    monkeypatch.setenv(CPP_VARIABLES[0], "0")
    with inductor_config.patch(fx_graph_cache=False, compile_threads=1):
        assert settings_digest(torch_settings()) == before
