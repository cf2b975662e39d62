"""Runs of the command in little time: a process that has imported everything, and forks for each of them.

To import torch and transformers takes a command 5 s, and looking at a warm cache less than one. A child of a process
that has done no more than import is as fresh as a new one: nothing was compiled, no cache folder was read, no thread
was started. All of them share what Python draws at its start (the hashes of strings) and what libraries take from HOME
while they are imported. What a variable changes then they cannot show, so a run with variables of its own is a new
process (conftest.py); so are the run that fills the cache of test_cache.py, the one that proves it elsewhere, the
server that most tests share, and all runs that travel.
"""

from __future__ import annotations

import atexit
import contextlib
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
MOST_BYTES = 128 << 10  # of a request: arguments, environment and script
GONE = -signal.SIGKILL  # said of a run whose end nobody could tell


class Fork:
    """A run, with what subprocess.Popen would say of it; the leader of a process group."""

    def __init__(self, status: socket.socket, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> None:
        self._status, self.stdout, self.stderr = status, stdout, stderr
        self._lock = threading.Lock()  # one thread waits, another may poll
        self.returncode: int | None = None
        kind, _, number = status.recv(64).partition(b" ")
        if kind != b"pid":
            raise RuntimeError("the process that forks could not, or has ended; its stderr says why")
        self.pid = int(number)

    def poll(self) -> int | None:
        if self._lock.acquire(blocking=False):
            try:
                self._ask(0)
            finally:
                self._lock.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            self._ask(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("tcdeploy", timeout or 0.0)
        return self.returncode

    def _ask(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        self._status.settimeout(timeout)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            told = self._status.recv(64)
            if not told:  # nobody is left who could say
                self.kill_group()
            self.returncode = int(told.partition(b" ")[2]) if told else GONE
            self._status.close()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Forks:
    """The process that forks; it is started by the first run, and has this environment when it imports."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ
        self._server: subprocess.Popen[bytes] | None = None

    def can_have(self, environ: dict[str, str]) -> bool:
        """Whether a fork is like a new process with that environment: HOME alone is another. Where there is a GPU it
        was never tried."""
        return HAS_PIDFD and not HAS_GPU and self._has(environ)

    def _has(self, environ: dict[str, str]) -> bool:
        return {**environ, "HOME": ""} == {**self._environ, "HOME": ""}

    def run(
        self, *arguments: str, environ: dict[str, str], timeout: float = 600, script: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; with `script`, that before it, or alone where there are no arguments."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            fork = Fork(self._start(arguments, environ, script, stdout.fileno(), stderr.fileno()))
            try:
                code = fork.wait(timeout)
            finally:
                if fork.returncode is None:
                    fork.kill_group()
            stdout.seek(0), stderr.seek(0)
            return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())

    def open(self, *arguments: str, environ: dict[str, str], script: str = "") -> Fork:
        """Start the command, with its output in pipes."""
        ends = [os.pipe(), os.pipe()]
        status = self._start(arguments, environ, script, *(writer for _, writer in ends))
        for _, writer in ends:
            os.close(writer)
        return Fork(status, *(os.fdopen(reader) for reader, _ in ends))

    def end(self) -> None:
        if self._server is not None:
            self._control.close()
            self._server.wait()

    def _start(
        self, arguments: tuple[str, ...], environ: dict[str, str], script: str, stdout: int, stderr: int
    ) -> socket.socket:
        assert self._has(environ), "what a variable changes while torch is imported, a fork cannot show"
        if self._server is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self._environ, pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for who asked
            )  # fmt: skip
            theirs.close()
        ours, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = {"arguments": arguments, "environ": environ, "cwd": os.getcwd(), "script": script}
        socket.send_fds(self._control, [json.dumps(asked).encode()], [stdout, stderr, status.fileno()])
        status.close()
        return ours


def _serve(control: socket.socket) -> dict[str, Any]:
    """In each child, what it is asked to run; never in the process itself, which ends with its control."""
    from tcdeploy.gc_policy import relax_gc_for_startup

    relax_gc_for_startup()
    import tcdeploy.cli.app
    import tcdeploy.pipeline  # noqa: F401 - what takes the time

    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    watched = selectors.DefaultSelector()
    watched.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is not control:
                child, status = key.data
                _, code = os.waitpid(child, 0)
                watched.unregister(key.fileobj)
                os.close(key.fd)
                with contextlib.suppress(OSError):  # nobody waits for it
                    status.send(f"exit {os.waitstatus_to_exitcode(code)}".encode())
                status.close()
                continue
            message, descriptors, *_ = socket.recv_fds(control, MOST_BYTES, 3)
            children = [key.data for key in watched.get_map().values() if key.data]
            if not message:  # nobody asks any more, and nobody waits
                for child, _ in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                os._exit(0)
            status = socket.socket(fileno=descriptors[2])
            child = os.fork()
            if child == 0:
                os.setsid()
                with contextlib.suppress(OSError):
                    status.send(f"pid {os.getpid()}".encode())
                for descriptor, target in zip(descriptors, (1, 2), strict=False):
                    os.dup2(descriptor, target)
                for opened in (*descriptors[:2], *(key.fd for key in watched.get_map().values())):
                    os.close(opened)
                watched.close()
                for own in (status, *(other for _, other in children)):
                    own.close()
                asked: dict[str, Any] = json.loads(message)
                control.detach()
                return asked
            for descriptor in descriptors[:2]:
                os.close(descriptor)
            watched.register(os.pidfd_open(child), selectors.EVENT_READ, (child, status))


def _become(asked: dict[str, Any]) -> int:
    """As if this process had been started so; its exit code."""
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    tempfile.tempdir = None
    random.seed()
    sys.argv = ["tcdeploy", *asked["arguments"]]
    try:
        if asked["script"]:
            exec(asked["script"], {"__name__": "script"})
        if asked["arguments"]:
            from tcdeploy.cli.app import main

            main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """What an interpreter does at its end, but for finalization: it takes two million objects apart in 1.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(_become(_serve(socket.socket(fileno=int(sys.argv[1])))))
