"""How far loading has come, told now and then: weights that count what is asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from transom_worker.weights import Weights
from transom_worker.weights.checkpoint import WHOLE, Mxfp4Tensors, Part, read_mxfp4

OnProgress = Callable[[float, int], None]

T = TypeVar("T")

PERIOD_S = 1.0


def fetched(fetch: Callable[[], T], on_progress: OnProgress) -> T:
    """What `fetch` gives or raises. It may download for long and tell nothing: `on_progress` says once a second that it does."""
    with ThreadPoolExecutor(1, thread_name_prefix="transom-fetch") as pool:
        future = pool.submit(fetch)
        while not wait([future], timeout=PERIOD_S).done:
            on_progress(0.0, 0)
        return future.result()


class ProgressWeights:
    """A checkpoint that calls `on_progress` at most once a second: the share of its tensors that were read, and their bytes."""

    def __init__(self, weights: Weights, on_progress: OnProgress) -> None:
        self._weights, self._on_progress = weights, on_progress
        self._num_tensors = max(1, len(weights.names))
        self._num_bytes = 0
        self._told_s = time.monotonic()

    @property
    def names(self) -> tuple[str, ...]:
        """As the checkpoint has them."""
        return self._weights.names

    @property
    def unread(self) -> tuple[str, ...]:
        """As the checkpoint has them."""
        return self._weights.unread

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """One tensor, or a part of it, as the checkpoint reads it."""
        tensor = self._weights(name, shape=shape, part=part)
        self._count(tensor.nbytes)
        return tensor

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """As the checkpoint stores it, where that is MXFP4."""
        found = read_mxfp4(self._weights, name, shape=shape, part=part)
        if found is not None:
            self._count(sum(half.nbytes for half in found))
        return found

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if time.monotonic() - self._told_s > PERIOD_S:
            self._told_s = time.monotonic()
            self._on_progress(1 - len(self._weights.unread) / self._num_tensors, self._num_bytes)

    def close(self) -> None:
        """Close the files."""
        self._weights.close()
