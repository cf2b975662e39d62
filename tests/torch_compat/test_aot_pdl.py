"""Which kernels of a package are launched with programmatic dependent launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.torch_compat.inductor import aot_pdl
from tcdeploy.torch_compat.internal import find


def generate(source: str, launch_pdl: bool) -> str:
    """The C++ code that torch writes for the launch of a kernel, cut down to its last line."""
    code = find("torch._inductor.utils:IndentedBuffer")()
    call = SimpleNamespace(kernel_name="kernel", kernel_name_to_body={"kernel": source})
    params = {"triton_meta": {"launch_pdl": launch_pdl}}
    find(aot_pdl.KERNEL_CALL).generate_launch_kernel(call, code, None, "kernels_.kernel", params)
    return str(code.getvalue())


@pytest.fixture
def torch_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the arguments of a kernel, which need a graph that is being compiled."""

    def write(self: Any, prefix: Any, wrapper: Any, kernel_var_name: str, params: Any) -> None:
        prefix.writeline("void* kernel_args_[] = {&var_0};")
        prefix.writeline(f"launchKernel({kernel_var_name}, grid_0, stream_);")

    monkeypatch.setattr(find(aot_pdl.KERNEL_CALL), "generate_launch_kernel", write)


@pytest.mark.parametrize(
    ("source", "launch_pdl", "function"),
    [
        ("tl.extra.cuda.gdc_wait()", True, "launchDependentKernel"),
        ("tl.extra.cuda.gdc_wait()", False, "launchKernel"),
        ("tl.load(in_ptr0)", True, "launchKernel"),  # it would read what its predecessor has not written yet
    ],
)
def test_only_kernels_that_wait_are_launched_early(
    torch_code: None, source: str, launch_pdl: bool, function: str
) -> None:
    with aot_pdl.dependent_launches():
        lines = generate(source, launch_pdl).splitlines()
    assert lines == ["void* kernel_args_[] = {&var_0};", f"{function}(kernels_.kernel, grid_0, stream_);"]


def test_the_function_is_defined_in_packages_only(torch_code: None) -> None:
    cuda_code = find(aot_pdl.CUDA_CODE)()
    ordinary = cuda_code.kernel_driver()
    with pytest.raises(KeyError), aot_pdl.dependent_launches():
        assert cuda_code.kernel_driver() == ordinary + aot_pdl.DEPENDENT_LAUNCH
        raise KeyError("a failed compilation")
    assert cuda_code.kernel_driver() == ordinary
    assert "launchKernel(" in generate("gdc_wait", True)
