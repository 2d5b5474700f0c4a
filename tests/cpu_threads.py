"""How many threads torch has in tests: TRANSOM_TEST_THREADS, 1 by default, since several processes run tests side by side."""

from __future__ import annotations

import os

NUM_THREADS = int(os.environ.get("TRANSOM_TEST_THREADS", "1"))
