"""The directory that keeps compiled code between processes: one file for each key, written once.

A file is written under another name and renamed, and carries a digest of its code, so that a process never loads half of one.
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
    """Where compiled code is kept: TRANSOM_CACHE_DIR, else the user's cache directory."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "transom"


def kept_code(key: str, compile_now: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The code of this key, and whether it was compiled now because the cache did not have it."""
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
        with contextlib.suppress(OSError):  # a read-only or full disk costs the next start its time, and nothing else
            _write(path, code)
    return code, True


def _read(path: Path) -> bytes | None:
    """The code in a file; None if there is no file, or a damaged one."""
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
