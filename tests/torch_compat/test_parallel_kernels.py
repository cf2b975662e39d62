"""Compiles real kernels for an H100 on any machine. Triton's driver is a stub that records loads and launches."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

STUB = """
import threading
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

launched, loading_threads = [], []

class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 20, "multiprocessor_count": 132, "max_num_regs": 1 << 20, "warpSize": 32}

    def load_binary(self, *arguments):
        loading_threads.append(threading.current_thread().name)
        return 1, 1, 32, 0, 1024

class Driver:
    utils = Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append(arguments)

driver.set_active(Driver())

from tcdeploy.kernels.attention import prefill
from tcdeploy.torch_compat.inductor.parallel_kernels import compiling_kernels

def write(dim, heads=2):
    k = torch.zeros(16, heads, dim)
    prefill.write_kv(k, k, torch.zeros(4, 16, heads, dim), torch.zeros(4, 16, heads, dim), torch.arange(16))
"""


def run(code: str, tmp_path: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = STUB + textwrap.dedent(code)
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_kernels_are_compiled_and_loaded_in_threads_and_not_launched(tmp_path):
    output = run(
        """
        def launch_kernels():
            write(32), write(64), write(32)

        with compiling_kernels(launch_kernels):
            print(len(launched))
        print(len(launched), len(loading_threads), all(name.startswith("kernels") for name in loading_threads))
        write(32), write(64)
        print(len(launched), len(loading_threads))
        """,
        tmp_path,
    )
    assert output.split() == ["0", "0", "2", "True", "2", "2"]


def test_a_kernel_that_cannot_be_compiled_fails_at_its_launch(tmp_path):
    output = run(
        """
        import triton.compiler

        class Broken(Exception):
            pass

        def fail(*arguments, **options):
            raise Broken

        triton.compiler.compile = fail
        with compiling_kernels(lambda: write(32)):
            pass
        try:
            write(32)
        except Broken:
            print("raised", len(launched))
        """,
        tmp_path,
    )
    assert output.split() == ["raised", "0"]


def test_launches_of_other_threads_run(tmp_path):
    output = run(
        """
        def launch_kernels():
            write(32)
            thread = threading.Thread(target=write, args=(64,))
            thread.start()
            thread.join()

        with compiling_kernels(launch_kernels):
            print(len(launched))
        print(len(launched), len(loading_threads))
        """,
        tmp_path,
    )
    assert output.split() == ["1", "1", "2"]


def test_an_exception_while_kernels_are_launched_ends_the_mode(tmp_path):
    output = run(
        """
        try:
            with compiling_kernels(lambda: 1 / 0):
                pass
        except ZeroDivisionError:
            write(32)
            print(len(launched))
        """,
        tmp_path,
    )
    assert output.split() == ["1"]
