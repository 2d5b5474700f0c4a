"""How many threads torch and CPU kernels have in tests: TRANSOM_TEST_THREADS, 1 by default, since several processes run tests side
by side.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transom_kernels.cpu.threads import set_num_threads

NUM_THREADS = int(os.environ.get("TRANSOM_TEST_THREADS", "1"))


@contextmanager
def kernel_threads(number: int) -> Iterator[None]:
    """Within this context CPU kernels run on `number` threads."""
    set_num_threads(number)
    try:
        yield
    finally:
        set_num_threads(NUM_THREADS)
