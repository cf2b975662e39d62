"""Fast CLI runs for tests: one process imports everything, and each run is a fork of it.

Importing torch and transformers takes 5 s, and most commands on a warm cache take less than 1 s. A process that has
only imported, and hashed the installed packages, is as clean as a new one: nothing is compiled, no cache folder is
read, no thread is started. Forks share Python's hash seed, and whatever libraries read from HOME during import. A
variable that is read during import cannot be tested in a fork: a run whose environment differs from the server's in a
variable outside `READ_AFTER_IMPORT` is a new process (conftest.py), and so is a run with `new=True`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from typing import IO, Any, NoReturn

HAS_GPU = os.path.exists("/dev/nvidiactl")
HAS_PIDFD = hasattr(os, "pidfd_open")  # Linux
MAX_REQUEST_BYTES = 128 << 10  # arguments, environment and script
# Variables that may differ between the server's environment and a fork's, because no result of the tests depends on
# their value during import. (Some libraries read HOME then, and torch looks for nvcc on PATH.)
# `run_command` reads TORCHINDUCTOR_VEC_ISA_OK again.
READ_AFTER_IMPORT = frozenset(
    {"HOME", "PATH", "TMPDIR", "TEST_COMPILER_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_VEC_ISA_OK"}
)
# Modules that a start imports when it compiles or reads the cache, at 0.4 s of CPU time.
IMPORTED_BY_A_COMPILATION = (
    "pydantic.type_adapter", "sympy.combinatorics", "sympy.physics.units", "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo", "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.halide", "torch._inductor.codegen.mps", "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.wrapper_fxir", "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.fuse_attention", "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.pad_mm", "torch._inductor.runtime.caching", "torch.distributed.tensor.experimental",
    "torch.export._trace", "torch.fx.experimental.validator", "torch.utils.cpp_extension",
)  # fmt: skip
KILLED = -signal.SIGKILL  # return code of a run whose exit status was lost


class ForkedProcess:
    """One run, with the interface of subprocess.Popen. It leads a process group."""

    def __init__(self, status: socket.socket, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> None:
        self._status, self.stdout, self.stderr = status, stdout, stderr
        self._lock = threading.Lock()  # `wait` and `poll` may be called from two threads
        self.returncode: int | None = None
        kind, _, number = status.recv(64).partition(b" ")
        if kind != b"pid":
            raise RuntimeError("the fork server failed to fork or has ended; see its stderr")
        self.pid = int(number)

    def poll(self) -> int | None:
        if self._lock.acquire(blocking=False):
            try:
                self._read_returncode(0)
            finally:
                self._lock.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            self._read_returncode(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("tcdeploy", timeout or 0.0)
        return self.returncode

    def _read_returncode(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        self._status.settimeout(timeout)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            status_message = self._status.recv(64)
            if not status_message:  # the server has ended
                self.kill_group()
            self.returncode = int(status_message.partition(b" ")[2]) if status_message else KILLED
            self._status.close()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts the server process on the first run, with `environ` set while it imports."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ
        self._server: subprocess.Popen[bytes] | None = None
        self._start_lock = threading.Lock()

    def supports(self, environ: dict[str, str]) -> bool:
        """Whether a fork equals a new process with this environment. Untested with a GPU."""
        return HAS_PIDFD and not HAS_GPU and self._matches_environment(environ)

    def _matches_environment(self, environ: dict[str, str]) -> bool:
        names = (environ.keys() | self._environ.keys()) - READ_AFTER_IMPORT
        return all(environ.get(name) == self._environ.get(name) for name in names)

    def run(
        self, *arguments: str, environ: dict[str, str], timeout: float = 600, script: str = "", cwd: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the CLI to its end, after `script` if given; only `script` if there are no arguments."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            fork = ForkedProcess(self._spawn(arguments, environ, script, stdout.fileno(), stderr.fileno(), cwd))
            try:
                code = fork.wait(timeout)
            finally:
                if fork.returncode is None:
                    fork.kill_group()
            stdout.seek(0), stderr.seek(0)
            return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())

    def popen(self, *arguments: str, environ: dict[str, str], script: str = "") -> ForkedProcess:
        """Start the CLI with its output in pipes."""
        ends = [os.pipe(), os.pipe()]
        status = self._spawn(arguments, environ, script, *(writer for _, writer in ends))
        for _, writer in ends:
            os.close(writer)
        return ForkedProcess(status, *(os.fdopen(reader) for reader, _ in ends))

    def shutdown(self) -> None:
        if self._server is not None:
            self._control.close()
            self._server.wait()

    def _start(self) -> None:
        self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(far_end.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self._environ, pass_fds=[far_end.fileno()],
            start_new_session=True,  # Ctrl-C must not reach the server
        )  # fmt: skip
        far_end.close()

    def _spawn(
        self, arguments: tuple[str, ...], environ: dict[str, str], script: str, stdout: int, stderr: int,
        cwd: str | None = None,
    ) -> socket.socket:  # fmt: skip
        assert self._matches_environment(environ), (
            "a fork cannot have other variables than the server had during import"
        )
        with self._start_lock:
            if self._server is None:
                self._start()
        client_status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "environ": environ, "cwd": cwd or os.getcwd(), "script": script}
        socket.send_fds(self._control, [json.dumps(request).encode()], [stdout, stderr, status.fileno()])
        status.close()
        return client_status


def serve_forks(control: socket.socket) -> dict[str, Any]:
    """Fork per request and return the request in the child. The server exits when `control` is closed."""
    from tcdeploy.host.gc_policy import relax_gc_for_startup

    relax_gc_for_startup()
    import transformers.models.llama.modeling_llama  # noqa: F401 - imported with most models of the tests

    import tcdeploy.cli.app
    import tcdeploy.cli.display
    import tcdeploy.start.model_code  # noqa: F401 - the slow imports

    prepare_compiler()
    from tcdeploy.programs.passes.post_grad import op_source_digests

    op_source_digests()  # 0.15 s of each start; a run with another copy of the package is a new process
    gc.collect(), gc.freeze()  # collections in the forks skip the objects of the server, and copy none of their pages
    assert len(os.listdir("/proc/self/task")) == 1, "forks do not inherit threads"
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                _report_exit(selector, key)
                continue
            message, descriptors, *_ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
            children = [key.data for key in selector.get_map().values() if key.data]
            if not message:  # the client has closed the control socket
                _kill_children_and_exit(children)
            status = socket.socket(fileno=descriptors[2])
            child = os.fork()
            if child == 0:
                _set_up_child(selector, children, status, descriptors)
                control.detach()
                request: dict[str, Any] = json.loads(message)
                return request
            for descriptor in descriptors[:2]:
                os.close(descriptor)
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, status))


def prepare_compiler() -> None:
    """Import what a compilation imports, and hash the files of torch and Triton, which takes 0.5 s of CPU time.

    The hashes are part of each cache key. Both functions cache them for the life of the process, and no test changes
    the installed files.
    """
    for module in IMPORTED_BY_A_COMPILATION:
        importlib.import_module(module)
    from torch._inductor.codecache import torch_key

    torch_key()
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def _report_exit(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Reap a child that has ended, and send its exit code to the client."""
    child, status = key.data
    _, code = os.waitpid(child, 0)
    selector.unregister(key.fileobj)
    os.close(key.fd)
    with contextlib.suppress(OSError):  # the client has gone
        status.send(f"exit {os.waitstatus_to_exitcode(code)}".encode())
    status.close()


def _kill_children_and_exit(children: list[Any]) -> NoReturn:
    for child, _ in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    os._exit(0)


def _set_up_child(
    selector: selectors.BaseSelector, children: list[Any], status: socket.socket, descriptors: list[int]
) -> None:
    """In a new child: report its pid, redirect stdout and stderr, close everything inherited from the server."""
    os.setsid()
    with contextlib.suppress(OSError):
        status.send(f"pid {os.getpid()}".encode())
    for descriptor, target in zip(descriptors, (1, 2), strict=False):
        os.dup2(descriptor, target)
    for opened in (*descriptors[:2], *(key.fd for key in selector.get_map().values())):
        os.close(opened)
    selector.close()
    for inherited in (status, *(child_status for _, child_status in children)):
        inherited.close()


def run_command(request: dict[str, Any]) -> int:
    """Run the CLI as if this process had been started with it; returns the exit code."""
    import torch._inductor.config

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    # Of this thread only: torch keeps settings per thread, and the others have the server's value.
    torch._inductor.config.cpp.vec_isa_ok = {"1": True, "0": False}.get(os.environ.get("TORCHINDUCTOR_VEC_ISA_OK", ""))
    tempfile.tempdir = None
    random.seed()
    sys.argv = ["tcdeploy", *request["arguments"]]
    try:
        if request["script"]:
            exec(request["script"], {"__name__": "script"})
        if request["arguments"]:
            from tcdeploy.cli.app import main

            main()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def exit_without_finalizing(code: int) -> NoReturn:
    """Exit like the interpreter, without finalization, which takes 1.3 s for two million objects."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_without_finalizing(run_command(serve_forks(socket.socket(fileno=int(sys.argv[1])))))
