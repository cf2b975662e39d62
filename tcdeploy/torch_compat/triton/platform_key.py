"""Keys of Triton's C libraries that do not depend on the `file` command.

Triton builds small libraries with a C compiler: one that talks to the driver and, in 3.6, one per launch signature.
Their key contains the output of the `file` command for Python's executable, which an image may lack. The patch uses
architecture and operating system instead. /sbin/ldconfig must still exist: Triton runs it to find the driver.
tests/torch_compat/test_triton_cache.py fails when Triton no longer needs the patch.
"""

from __future__ import annotations

import platform

from tcdeploy.planning.extras import is_installed
from tcdeploy.torch_compat.internal import find, internal, mentions

BUILD = "triton.runtime.build"


@internal("Triton library keys", "triton.runtime.build.platform_key",
          "an image without the `file` command needs a C compiler")  # fmt: skip
def supported() -> bool:
    builder = find(f"{BUILD}:compile_module_from_src")
    return callable(find(f"{BUILD}:platform_key")) and mentions(builder, "platform_key")


def patch_platform_key() -> None:
    """Apply to this process. Inductor's compile workers keep Triton's keys; they run where there is a compiler."""
    if is_installed("triton") and supported():
        find(BUILD).platform_key = platform_key


def platform_key() -> str:
    return f"{platform.machine()},{platform.system()}"
