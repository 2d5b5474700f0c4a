"""Compiles kernels to object code, keeps it in the user's cache directory, and loads it.

A kernel is named by its module, the function there that makes it, and the parameters that this function takes:

    norm = cpu_kernel("transom_kernels.rms_norm.cpu_kernel", "make_rms_norm", dtype="bf16")
    norm.address                  # loads it; compiles it if it is not in the cache

Only compiling imports numba. The cache's key holds all that the code may depend on: the sources of this package (operators share
functions), the parameters, the processor, and the versions of Python, numba and llvmlite. A file is written under another
name and renamed, so that processes that compile at the same time do not disturb each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.target import CpuTarget, cpu_target

CACHE_VARIABLE = "TRANSOM_CACHE_DIR"

Parameter = str | int | bool | float | None

logger = logging.getLogger("transom.worker")

_lock = threading.RLock()
_engines: list[llvm.ExecutionEngine] = []  # own the loaded code, for as long as the process runs


@dataclass(frozen=True)
class CpuKernel:
    """A kernel: `maker` in `module` with `parameters` returns the Python function that is compiled."""

    module: str
    maker: str
    parameters: tuple[tuple[str, Parameter], ...]

    @cached_property
    def name(self) -> str:
        """The kernel's name in errors."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters)
        return f"{self.module.removeprefix('transom_kernels.')}.{self.maker}({given})"

    @cached_property
    def address(self) -> int:
        """The address of its code. The first call loads it, and compiles it if need be."""
        with _lock:
            begin_s = time.perf_counter()
            code, compiled = _cached_code(self)
            address = _load(code, _symbol(self))
            if compiled:
                statistics.num_compiled += 1
                statistics.compile_s += time.perf_counter() - begin_s
            return address


@dataclass(slots=True)
class CompileStatistics:
    """What compiling has cost this process."""

    num_compiled: int = 0
    compile_s: float = 0.0


statistics = CompileStatistics()


@cache
def cpu_kernel(module: str, maker: str, **parameters: Parameter) -> CpuKernel:
    """The kernel of these parameters; the same object each time."""
    return CpuKernel(module, maker, tuple(sorted(parameters.items())))


def cache_directory() -> Path:
    """Where compiled code is kept: TRANSOM_CACHE_DIR, else the user's cache directory."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "transom"


def object_code(kernel: CpuKernel, target: CpuTarget | None = None) -> bytes:
    """Compile a kernel with numba for this processor, or turn its code into `target`'s."""
    import numba
    from numba import types

    function = getattr(import_module(kernel.module), kernel.maker)(**dict(kernel.parameters))
    kind = types.void(types.int64, types.int64)
    with _without_machine_code() as is_only_text:
        compiled = numba.njit(
            kind, nogil=True, boundscheck=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
        )(function).overloads[kind.args]
    if is_only_text:
        compiled.library._optimize_final_module()
    name = compiled.fndesc.llvm_func_name
    # Numba's own wrapper refers to functions of numba, which is not in processes that only load code.
    wrapper = (
        f"define void @{_symbol(kernel)}(i64 %arguments, i64 %thread) {{\n"
        "  %result = alloca ptr\n  %error = alloca ptr\n"
        f"  call i32 @{name}(ptr %result, ptr %error, i64 %arguments, i64 %thread)\n  ret void\n}}\n"
    )
    return _emit(f"{compiled.library._final_module}\n{wrapper}", target or cpu_target())


@contextlib.contextmanager
def _without_machine_code() -> Iterator[bool]:
    """Within this context numba translates functions to LLVM's text, but neither optimises nor loads them.

    Else it does both for every function that the kernel calls, which takes as long as everything else, and for no use: the kernel's
    final text holds them all. Python's garbage collector rests, because a collection takes long in a process with torch.

    The context's value is False, and numba works as ever, where this numba lacks the private functions that are replaced.
    """
    from numba.core import codegen, cpu
    from numba.core.compiler_lock import global_compiler_lock

    def address_of_nothing(library: Any, name: str) -> int:
        library._ensure_finalized()
        return id(object)  # numba wants an address, and none of these functions is called

    def do_nothing(*arguments: Any, **options: Any) -> None:
        pass

    changes: list[tuple[type, str, Callable[..., Any]]] = [
        (codegen.JITCodeLibrary, "get_pointer_to_function", address_of_nothing),
        (codegen.JITCodeLibrary, "_finalize_specific", do_nothing),
        (codegen.JITCPUCodegen, "_add_module", do_nothing),
        (codegen.JITCPUCodegen, "set_env", do_nothing),
        (codegen.CPUCodeLibrary, "_optimize_final_module", do_nothing),
        (codegen.CPUCodeLibrary, "_optimize_functions", do_nothing),
        (cpu.CPUContext, "create_cpython_wrapper", do_nothing),
        (cpu.CPUContext, "create_cfunc_wrapper", do_nothing),
    ]
    if any(name not in vars(owner) for owner, name, _ in changes):
        yield False
        return
    with global_compiler_lock:
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
        collects = gc.isenabled()
        gc.disable()
        for owner, name, replacement in changes:
            setattr(owner, name, replacement)
        try:
            yield True
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)
            if collects:
                gc.enable()


def _emit(text: str, target: CpuTarget) -> bytes:
    """Object code of LLVM's text."""
    _initialise()
    module = llvm.parse_assembly(text)
    module.triple = target.triple
    module.verify()
    _check_calls(module)
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.name,
        features=target.features,
        opt=3,
        reloc="static",
        codemodel="jitdefault" if target.x86 else "small",
        jit=True,
    )
    return machine.emit_object(module)


def _check_calls(module: llvm.ModuleRef) -> None:
    """Refuse code that calls numba's own functions: in a process without numba all of its calls, to any function, would go to 0.

    Raises:
        ValueError: the kernel, or a function that it calls, raises exceptions or allocates.
    """
    process = ctypes.CDLL(None)  # the C library, the mathematical functions and Python's own
    declared = [function.name for function in module.functions if function.is_declaration]
    foreign = [name for name in declared if not name.startswith("llvm.") and not hasattr(process, name)]
    if foreign:
        raise ValueError(
            f"The kernel calls {', '.join(foreign)}, which no library of the process has: a kernel and the functions that "
            "it calls must neither raise exceptions nor allocate."
        )


def _symbol(kernel: CpuKernel) -> str:
    digest = hashlib.sha256(repr((kernel.module, kernel.maker, kernel.parameters)).encode()).hexdigest()
    return f"transom_kernel_{digest[:24]}"


def _cached_code(kernel: CpuKernel) -> tuple[bytes, bool]:
    """The kernel's object code, and whether it was compiled now."""
    path = cache_directory() / "kernels" / f"{_key(kernel)}.o"
    code = _read_code(path)
    if code is not None:
        return code, False
    with _alone(path.with_suffix(".lock")):
        code = _read_code(path)  # another process may have compiled it meanwhile
        if code is not None:
            return code, False
        _say_that_it_compiles()
        code = object_code(kernel)
        with contextlib.suppress(OSError):  # a read-only or full disk costs the next start its time, and nothing else
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
    return code, True


def _read_code(path: Path) -> bytes | None:
    """The code in a file; None if there is no file, or a damaged one."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        digest, code = data[:32], data[32:]
        if hashlib.sha256(code).digest() == digest:
            return code
    return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Within this context no other process is in the context of the same path, so that ranks which start together compile once."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        with contextlib.suppress(OSError):
            path.unlink()


@cache
def _say_that_it_compiles() -> None:
    logger.info("Compiling kernels for this CPU (once; later starts read them from %s).", cache_directory())


def _key(kernel: CpuKernel) -> str:
    target = cpu_target()
    versions = (sys.version, version("numba"), version("llvmlite"))
    packages = sorted(
        {"transom_kernels", kernel.module.partition(".")[0]}
    )  # a kernel of a test has a package of its own
    parts = (repr(kernel), repr(CHECKED), *map(_sources, packages), repr(target), repr(versions))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _sources(package: str) -> str:
    """A digest of the Python files of a package and of those below it."""
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _initialise() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _load(code: bytes, symbol: str) -> int:
    """Load object code into this process; return the address of a function in it."""
    _initialise()
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine()
    )
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address = int(engine.get_function_address(symbol))
    if not address:
        raise RuntimeError(f"{symbol} is not in the compiled code.")
    return address
