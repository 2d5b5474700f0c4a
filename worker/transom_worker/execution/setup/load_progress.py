"""Reports the progress of downloading and loading a model, and of compiling its kernels.

About once a second, the caller's `OnProgress` callback gets the share of the tensors that were read, and their bytes. A rank must
report, because the executor treats a rank that is silent for two minutes as hung.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from transom_kernels.launch import compile_news
from transom_kernels.quantised_linear import StoredRows
from transom_worker.models.weights.checkpoint import WHOLE, Mxfp4Tensors, Part, Weights, WeightsView

logger = logging.getLogger("transom.worker")

OnProgress = Callable[[float, int], None]

T = TypeVar("T")

PERIOD_S = 1.0
LOG_PERIOD_S = 10.0  # between two lines about kernels


def fetch_with_progress(fetch: Callable[[], T], on_progress: OnProgress, *, share: float = 0.0) -> T:
    """Call `fetch`, and return its result or raise its exception.

    A download may take long and reports nothing by itself, so `on_progress` is called with `share` every second until `fetch`
    returns.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="transom-fetch") as pool:
        future = pool.submit(fetch)
        while not wait([future], timeout=PERIOD_S).done:
            on_progress(share, 0)
        return future.result()


@contextmanager
def compile_progress(on_compiled: Callable[[int], None] | None = None) -> Iterator[None]:
    """Within this context, log how many kernels this process has compiled, and call `on_compiled` with that number, at most once a
    second.

    A first start on a GPU compiles some 20 to 40 kernels, 0.5 to 5 seconds each; a later one loads them from Triton's cache.
    """
    begin_s = logged_s = told_s = time.monotonic()
    num_kernels = 0

    def tell() -> None:
        nonlocal logged_s, told_s, num_kernels
        num_kernels += 1
        now_s = time.monotonic()
        if on_compiled is not None and now_s - told_s >= PERIOD_S:
            told_s = now_s
            on_compiled(num_kernels)
        if now_s - logged_s >= LOG_PERIOD_S:
            logged_s = now_s
            logger.info(
                "%d kernels compiled in %.0f s; the next start finds them in the cache.", num_kernels, now_s - begin_s
            )

    with compile_news(tell):
        yield


class ProgressWeights(WeightsView):
    """An open checkpoint that reports how much of it was read: the share of its tensors, and their bytes, at most once a
    second."""

    def __init__(self, weights: Weights, on_progress: OnProgress) -> None:
        super().__init__(weights)
        self._on_progress = on_progress
        self._num_tensors = max(1, len(weights.unread))  # stored ones: a quantised matrix has several
        self._num_bytes = 0
        self._reported_s = time.monotonic()

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor, or a part of it, from the checkpoint."""
        tensor = super().__call__(name, shape=shape, part=part)
        self._count(tensor)
        return tensor

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """See `Weights.mxfp4`."""
        found = super().mxfp4(name, shape=shape, part=part)
        self._count(*(found or ()))
        return found

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """See `Weights.groups`."""
        found = super().groups(name, shape=shape, part=part)
        if found is not None:
            self._count(*found.tensors().values())
        return found

    def _count(self, *tensors: torch.Tensor | None) -> None:
        self._num_bytes += sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if time.monotonic() - self._reported_s > PERIOD_S:
            self._reported_s = time.monotonic()
            self._on_progress(1 - len(self.unread) / self._num_tensors, self._num_bytes)
