"""Builds ahead-of-time packages in threads: the C++ compiler, the linker and the archive.

torch generates a package's C++ code, compiles it and writes the package in one call, of which g++ takes most. Here
torch generates the code only, and a thread runs the same commands of the compiler afterwards, so that the next program
is traced and lowered meanwhile.

torch includes its runtime (`interface.cpp`, and with it std::regex) in the C++ code of every package. Here it is
compiled once for all packages, and linked into each. Then g++ takes 2.5 to 3.2 s of CPU time for a package instead of
7.2 to 8.7 s (torch 2.13, CPU). The code of the program itself is the same.

Before it compiles the first package of a process, torch compiles and loads a test for each vector extension of the CPU,
40 s on an H100 machine with AVX-512. The C++ code of a package for a GPU only launches kernels, so it is compiled
without vector extensions.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tcdeploy.host.resources import count_cores
from tcdeploy.torch_compat.internal import find, has_parameters, internal, mentions

CODECACHE = "torch._inductor.codecache"
COMPILER = f"{CODECACHE}:AotCodeCompiler"
BUILDER = "torch._inductor.cpp_builder:CppBuilder"
RUN = "torch._inductor.cpp_builder:run_compile_cmd"
VECTORS = "torch._inductor.cpu_vec_isa"
VERSION = "torch._inductor.cpp_builder:get_compiler_version_info"
PACKAGE = "torch._inductor.package"
RUNTIME = Path("codegen", "aoti_runtime", "interface.cpp")  # in the folder of torch._inductor
MODEL = "AOTInductorModelBase<AOTInductorModel>"
EXTERN_MODEL = f"namespace torch::aot_inductor {{ extern template class {MODEL}; }}\n"
INSTANTIATED_MODEL = f"\nnamespace torch::aot_inductor {{ template class {MODEL}; }}\n"
WRAPPER, SOURCES = ".wrapper.cpp", (".wrapper.cpp", ".kernel.cpp")  # of a package
HEADER_SUFFIX = ".gch"
MAX_THREADS = 8


@internal(
    "package builds", "torch._inductor.codecache.AotCodeCompiler.compile",
    "ahead-of-time packages are compiled one after another, and torch's runtime with each, which takes much longer",
)  # fmt: skip
def supported() -> bool:
    compiler = find(COMPILER)
    return (
        has_parameters(getattr(compiler, "compile", None), "graph", "wrapper_code", "kernel_code")
        and mentions(compiler, "CppBuilder", "build", "remove", "aot_kernels_o", "_precompile_header", "pick_vec_isa")
        and find(f"{VECTORS}:invalid_vec_isa") is not None
        and find(f"{VECTORS}:pick_vec_isa") is find(f"{CODECACHE}:pick_vec_isa")
        and mentions(find(f"{CODECACHE}:_precompile_header"), "_worker_compile_cpp", "_HEADER_DIR")
        and mentions(getattr(find(BUILDER), "build", None), "get_command_line", "run_compile_cmd")
        and hasattr(find(BUILDER), "get_target_file_path")
        and has_parameters(find(f"{CODECACHE}:write"), "content", "extension", "extra", "specified_dir")
        and has_parameters(find(RUN), "cmd_line", "cwd")
        and has_parameters(find(VERSION), "compiler")
        and has_parameters(find(f"{PACKAGE}:package_aoti"), "archive_file", "aoti_files")
        and hasattr(find(f"{CODECACHE}:CUDACodeCache"), "aot_kernels_o")
    )


def start_build(compile_and_package: Callable[[], object]) -> Future[None]:
    """Call a function that compiles one package by torch. The future ends when the package is written.

    It raises what torch's compilation raises. The package is written before this returns if torch is not `supported`.
    """
    future: Future[None] = Future()
    if not supported():
        compile_and_package()
        future.set_result(None)
        return future
    build = _Build()
    with _deferring(build):
        compile_and_package()
    future = _threads().submit(build.finish)
    _builds.update(dict.fromkeys(build.objects, future))
    return future


class _Command(NamedTuple):
    line: str
    target: str

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            find(RUN)(self.line, folder)


@dataclass
class _Build:
    """What is left to do for a package whose code was generated."""

    runtime: Future[None] | None = None
    compilations: list[_Command] = field(default_factory=list)
    link: _Command | None = None
    archive: Callable[[], object] = lambda: None
    temporary: list[str] = field(default_factory=list)  # object files that torch compiled at once
    runtime_code: str = ""

    @property
    def objects(self) -> list[str]:
        return [command.target for command in self.compilations]

    def finish(self) -> None:
        for future in list(_headers):
            future.result()
        for command in self.compilations:
            command.run()
        if self.runtime is not None:
            self.runtime.result()
        if self.link is not None:
            self.link.run()
        for path in (*self.objects, *self.temporary):
            os.remove(path)
        self.archive()


_builds: dict[str, Future[None]] = {}  # by object file: equal programs of two names have one
_runtimes: dict[str, Future[None]] = {}  # by object file
_headers: list[Future[None]] = []  # precompiled


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, count_cores()), "packages")


@contextlib.contextmanager
def _deferring(build: _Build) -> Iterator[None]:
    """Within the block, this thread's compilations of packages are added to `build`, and not run."""
    codecache, builder, package = find(CODECACHE), find(BUILDER), find(PACKAGE)
    compiler, thread = find(COMPILER), threading.get_ident()
    compile_code, run, archive = vars(compiler)["compile"], builder.build, package.package_aoti
    vectors = find(VECTORS)
    compile_header, pick_vectors = codecache._worker_compile_cpp, vectors.pick_vec_isa

    def compile_without_runtime(graph: Any, wrapper_code: str, *arguments: Any, **keywords: Any) -> Any:
        wrapper_code, build.runtime_code = _split(wrapper_code)
        if keywords.get("device_type") == "cuda":
            codecache.pick_vec_isa = vectors.pick_vec_isa = lambda: vectors.invalid_vec_isa
        return compile_code.__func__(compiler, graph, wrapper_code, *arguments, **keywords)

    def defer(command: Any) -> None:
        line, target = command.get_command_line(), command.get_target_file_path()
        words = shlex.split(line)
        if threading.get_ident() != thread:
            run(command)
        elif sources := [word for word in words if word.endswith(SOURCES)]:
            _defer_compilation(build, _Command(line, target), sources[0])
        elif not set(build.objects).isdisjoint(words):
            _defer_link(build, _Command(line, target), words)
        else:
            run(command)

    def defer_archive(archive_file: Any, aoti_files: Any) -> Any:
        build.archive = lambda: archive(archive_file, aoti_files)
        return archive_file

    def compile_header_in_thread(lock: str, commands: Any) -> None:
        if all(command.get_target_file_path().endswith(HEADER_SUFFIX) for command in commands):
            _headers.append(_threads().submit(compile_header, lock, commands))
        else:
            compile_header(lock, commands)

    compiler.compile, builder.build = compile_without_runtime, defer
    package.package_aoti, codecache._worker_compile_cpp = defer_archive, compile_header_in_thread
    try:
        yield
    finally:
        compiler.compile, builder.build = compile_code, run
        package.package_aoti, codecache._worker_compile_cpp = archive, compile_header
        codecache.pick_vec_isa = vectors.pick_vec_isa = pick_vectors
        _without_runtimes(codecache.CUDACodeCache.aot_kernels_o)  # torch has not linked them if it failed


def _defer_compilation(build: _Build, command: _Command, source: str) -> None:
    if command.target in _builds:  # an equal program, which has the same files
        _builds[command.target].exception()
    if source.endswith(WRAPPER) and build.runtime_code:
        _add_runtime(build, command, source)
    build.compilations.append(command)
    Path(command.target).touch()  # torch removes the object files after linking


def _defer_link(build: _Build, command: _Command, words: list[str]) -> None:
    """Link later. torch removes the object files that exist by now, such as that of constants, so they are kept."""
    line = command.line
    for path in [word for word in words if word.endswith(".o") and Path(word).is_file() and Path(word).stat().st_size]:
        if path not in _runtimes:
            copy = f"{path}.kept"
            os.link(path, copy)
            build.temporary.append(copy)
            line = line.replace(path, copy)
    build.link = _Command(line, command.target)


def _split(wrapper_code: str) -> tuple[str, str]:
    """The code of a package without torch's runtime, and of the runtime; "" if the code does not contain it."""
    lines = (Path(find("torch._inductor").__file__).parent / RUNTIME).read_text().rstrip().split("\n")
    runtime = "\n".join(line if line.strip() else "" for line in lines)  # as torch copies it
    before, found, after = wrapper_code.partition(runtime)
    if not found:
        return wrapper_code, ""
    return before + EXTERN_MODEL + after, before + runtime + INSTANTIATED_MODEL


def _add_runtime(build: _Build, command: _Command, source: str) -> None:
    """Link the runtime into the package. It is compiled with the options of the package's code, unless it was before.

    It is beside the precompiled headers, whose names are hashes of torch's headers.
    """
    codecache = find(CODECACHE)
    folder = codecache._HEADER_DIR
    options = command.line.replace(source, "").replace(command.target, "").replace(folder, "")
    version = find(VERSION)(shlex.split(command.line)[0])
    _, path = codecache.write(build.runtime_code, "runtime.cpp", extra=options + version, specified_dir=folder)
    target = f"{path.removesuffix('.cpp')}.o"
    if target not in _runtimes or (_runtimes[target].done() and not Path(target).is_file()):
        partial = f"{target}.{os.getpid()}.o"  # other processes may use the folder
        line = command.line.replace(source, path).replace(command.target, partial)
        _runtimes[target] = _threads().submit(_compile_runtime, _Command(line, partial), target)
    build.runtime = _runtimes[target]
    codecache.CUDACodeCache.aot_kernels_o.append(target)  # torch links, and does not remove, the files of this list


def _without_runtimes(objects: list[str]) -> None:
    objects[:] = [path for path in objects if path not in _runtimes]


def _compile_runtime(command: _Command, target: str) -> None:
    if not Path(target).is_file():
        command.run()
        os.replace(command.target, target)
