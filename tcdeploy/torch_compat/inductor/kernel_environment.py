"""Set the environment variable that Inductor's C++ kernels read, before threads start compilers.

Inductor sets it when it loads the first kernel, while its threads start C++ compilers. Adding a variable may move the
list of the process's environment variables, and a compiler that is being started at that moment can see an incomplete
list. Its error is then, for example, "cannot execute 'cc1plus'" or "Bad address: 'g++'". Setting the variable again
only replaces its value, which moves nothing.
"""

from __future__ import annotations

import os

from tcdeploy.torch_compat.internal import find, internal, mentions

VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
POINTER = "torch:_C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr"
LOADER = "torch._inductor.codecache:CppPythonBindingsCodeCache"


@internal("kernel environment", "torch._inductor.codecache.CppPythonBindingsCodeCache",
          "a C++ compiler may fail to start, because a variable is set while it is started")  # fmt: skip
def supported() -> bool:
    return isinstance(find(POINTER), int) and mentions(find(LOADER), VARIABLE)


def set_kernel_variable() -> None:
    """Set the variable to the value that Inductor sets. Must run before the first compilation."""
    pointer = find(POINTER)
    if isinstance(pointer, int):
        os.environ[VARIABLE] = str(pointer)
