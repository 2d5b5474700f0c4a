"""`compiled`: has numba compile a function of the router's hot paths at its first call, and keep the code on disk for later starts.

numba notices a change of the function's own file only, not of functions in other files that it calls. So compiled functions that
call each other share a file. Those that only compiled functions call are `inner`; they become a part of their callers' code.

Compiling takes seconds. Assigning whole arrays (`a[:] = b`) or viewing one as another type would double that, since numba then
compiles the texts of the errors that these may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return the function, compiled; kept in `NUMBA_CACHE_DIR`, beside the source, or in the user's cache directory.

    Where none of these can be written, every process compiles anew.
    """
    try:
        made: Function = njit(cache=True)(function)
    except RuntimeError:  # no place for the code
        made = njit(function)
    return made


def inner(function: Function) -> Function:
    """Return the function, compiled for compiled callers alone."""
    made: Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return made
