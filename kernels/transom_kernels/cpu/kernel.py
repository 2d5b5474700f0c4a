"""Compiled kernels: looks a kernel's machine code up in the cache, or compiles it, and loads it into this process.

A kernel is named by its module, the function there that builds it, and the parameters of that function:

    norm = cpu_kernel("transom_kernels.rms_norm.op", "make_rms_norm", dtype="bf16")
    norm.address                  # loads it; compiles it if it is not in the cache (files of object code)

Only compiling (`compiler.py`) imports numba and the kernel's module. The cache's key covers everything that the code may depend on:
its source files (`kernel_sources.py`), the parameters, the processor, and the versions of Python, numba and llvmlite.

The cache is a directory with one file for each key, written once. A file begins with a digest of its code, and it is written under
another name and then renamed, so that no process loads an incomplete file.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel_sources import sources_digest
from transom_kernels.cpu.target import CPU_VARIABLE, CpuTarget, cpu_target

Parameter = str | int | bool | float | None

_lock = threading.RLock()
_engines: list[llvm.ExecutionEngine] = []  # the owners of the loaded code, which stays as long as the process runs


@dataclass(frozen=True)
class CpuKernel:
    """Names a kernel: function `maker` of `module`, called with `parameters`, returns the Python function to compile."""

    module: str
    maker: str
    parameters: tuple[tuple[str, Parameter], ...]

    @cached_property
    def name(self) -> str:
        """The kernel's name in error messages."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters)
        return f"{self.module.removeprefix('transom_kernels.')}.{self.maker}({given})"

    @cached_property
    def address(self) -> int:
        """The address of its code. The first access loads the code, and compiles it if the cache does not have it."""
        if os.environ.get(CPU_VARIABLE) and not cpu_target().triple.startswith(platform.machine()):
            raise ValueError(
                f"Code for {cpu_target().name} does not run on {platform.machine()}; unset {CPU_VARIABLE}."
            )
        with _lock:
            begin_s = time.perf_counter()
            code, compiled = _cached_code(self)
            address = _load(code, _symbol(self))
            if compiled:
                statistics.num_compiled += 1
                statistics.compile_s += time.perf_counter() - begin_s
                if statistics.on_compiled is not None:
                    statistics.on_compiled()
            return address


@dataclass(slots=True)
class CompileStatistics:
    """The number of kernels that this process has compiled, the seconds it took, and a function to call after each of them."""

    num_compiled: int = 0
    compile_s: float = 0.0
    on_compiled: Callable[[], None] | None = None


statistics = CompileStatistics()


@cache
def cpu_kernel(module: str, maker: str, **parameters: Parameter) -> CpuKernel:
    """Return the kernel of these parameters: the same object in every call, so its code is loaded once."""
    return CpuKernel(module, maker, tuple(sorted(parameters.items())))


def object_code(kernel: CpuKernel, target: CpuTarget | None = None) -> bytes:
    """Compile a kernel for this processor, or for `target`.

    Raises:
        ValueError: the kernel, or a function that it calls, raises exceptions or allocates.
    """
    from transom_kernels.cpu.compiler import compile_kernel

    function = getattr(import_module(kernel.module), kernel.maker)(**dict(kernel.parameters))
    return compile_kernel(function, _symbol(kernel), target or cpu_target())


def cache_key(kernel: CpuKernel) -> str:
    """Return the kernel's key in the cache, for the processor and the versions of this process."""
    versions = (sys.version, version("numba"), version("llvmlite"))
    sources = [sources_digest(module) for module in (kernel.module, "transom_kernels.cpu.compiler")]
    parts = (repr(kernel), repr(CHECKED), *sources, repr(cpu_target()), repr(versions))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cached_code(kernel: CpuKernel) -> tuple[bytes, bool]:
    """Return the kernel's object code, and whether it was compiled now."""
    return kept_code(cache_key(kernel), lambda: object_code(kernel))


def _symbol(kernel: CpuKernel) -> str:
    digest = hashlib.sha256(repr((kernel.module, kernel.maker, kernel.parameters)).encode()).hexdigest()
    return f"transom_kernel_{digest[:24]}"


@cache
def _initialise() -> None:
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


CACHE_VARIABLE = "TRANSOM_CACHE_DIR"

logger = logging.getLogger("transom.worker")


def cache_directory() -> Path:
    """Return where compiled code is cached: TRANSOM_CACHE_DIR, or else the user's cache directory."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "transom"


def kept_code(key: str, compile_now: Callable[[], bytes]) -> tuple[bytes, bool]:
    """Return the code of this key, and whether it was compiled now because the cache did not have it."""
    path = cache_directory() / "kernels" / f"{key}.o"
    code = _read(path)
    if code is not None:
        return code, False
    with _alone(path.with_suffix(".lock")):
        code = _read(path)  # another process may have compiled it meanwhile
        if code is not None:
            return code, False
        _say_that_it_compiles()
        code = compile_now()
        with contextlib.suppress(OSError):  # with a read-only or full disk, only the next start takes longer
            _write(path, code)
    return code, True


def _read(path: Path) -> bytes | None:
    """Return the code in a file; None if the file does not exist or is damaged."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        digest, code = data[:32], data[32:]  # SHA-256 has 32 bytes
        if hashlib.sha256(code).digest() == digest:
            return code
    return None


def _write(path: Path, code: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(hashlib.sha256(code).digest() + code)
    os.replace(temporary, path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file lock within this context, so that tensor-parallel ranks which start together compile a kernel only once."""
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
