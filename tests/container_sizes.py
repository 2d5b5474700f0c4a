"""Counts what the containers below an object hold, so that a test can see which of them grow with every request."""

import asyncio
import logging
import threading
import types
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

CONTAINERS = (dict, list, set, frozenset, deque, tuple)
FLAT = (str, bytes, bytearray, array, int, float, complex, bool, type(None), range)
NOT_ENTERED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, torch.Tensor),
    *(logging.Logger, threading.Thread, asyncio.AbstractEventLoop),
)


def container_sizes(root: object) -> dict[str, int]:
    """Return by path the number of entries of all containers there together, `[]` standing for any key or index.

    Strings, bytes and arrays count with their length in items. An object that is found twice counts where it was found first.
    """
    sizes: dict[str, int] = {}
    seen = {id(root)}
    todo = [("", root)]
    while todo:
        path, one = todo.pop()
        if isinstance(one, (*CONTAINERS, bytearray, array)):
            sizes[path] = sizes.get(path, 0) + len(one)
        for name, child in _children(one):
            if id(child) not in seen and not isinstance(child, (str, bytes, int, float, type(None))):
                seen.add(id(child))
                todo.append((path + name, child))
    return sizes


def growth(before: Mapping[str, int], after: Mapping[str, int], *, least: int) -> dict[str, int]:
    """Return the paths whose containers hold at least `least` entries more than before, and how many more."""
    more = {path: size - before.get(path, 0) for path, size in after.items()}
    return {path: count for path, count in more.items() if count >= least}


def _children(one: object) -> Iterator[tuple[str, Any]]:
    if isinstance(one, (*FLAT, *NOT_ENTERED)):
        return
    if isinstance(one, dict):
        yield from (("[]", child) for pair in list(one.items()) for child in pair)
    elif isinstance(one, CONTAINERS):
        yield from (("[]", child) for child in list(one))
    if isinstance(one, types.MethodType):
        yield ".self", one.__self__
        return
    yield from ((f".{name}", child) for name, child in list(getattr(one, "__dict__", {}).items()))
    for base in type(one).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(one, name):
                yield f".{name}", getattr(one, name)
