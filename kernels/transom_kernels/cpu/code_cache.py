"""The directory that caches compiled code across processes: one file for each key, written once.

A file is written under another name and then renamed, and it begins with a digest of its code: no process loads half a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

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
        digest, code = data[:32], data[32:]
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
