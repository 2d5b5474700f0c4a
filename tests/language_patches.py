"""Triton's interpreter, without looking for the same functions again at every call.

It swaps the language's functions for its own at each launch, and again whenever a kernel calls another function, for which it goes
through all members of the language: a third of the time of most kernels. Which members are functions of the language does not
change, so they are found once; those that have been swapped already are left alone, as before.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any


def look_up_once() -> None:
    """From now on, in this process, if it has Triton's interpreter and that works as described."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    patched = getattr(interpreter, "_patch_builtin", None)
    if interpreter is None or patched is None or not hasattr(interpreter, "_patch_attr") or hasattr(patched, "found"):
        return
    is_builtin, found = interpreter.tl.core.is_builtin, dict[Any, list[tuple[str, Any]]]()

    def patch_builtin(namespace: Any, builder: Any, *scope: Any) -> None:
        if not found.get(namespace):
            found[namespace] = [pair for pair in inspect.getmembers(namespace) if is_builtin(pair[1])]
        for name, member in found[namespace]:
            if is_builtin(getattr(namespace, name)):
                interpreter._patch_attr(namespace, name, member, builder, *scope)

    patch_builtin.found = found  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin  # type: ignore[attr-defined]
