"""What a worker says at start reaches people, unless they log in their own way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("", True),
        ("logging.basicConfig(level=logging.INFO)", True),
        ("logging.basicConfig()", True),
        ("logging.getLogger('transom').setLevel(logging.ERROR)", False),
    ],
    ids=["plain", "own handler", "own root level", "own level"],
)
def test_where_the_memory_went_is_shown_once(tiny_model: Path, setup: str, shown: bool) -> None:
    code = (
        f"import logging; {setup}\n"
        "from transom_worker import LLM\n"
        f"LLM({str(tiny_model)!r}, kv_cache_memory_bytes='4MiB', num_threads=1).shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    for part in ("activations", "bytes per block", "at once run"):
        assert done.stderr.count(part) == (1 if shown else 0), done.stderr
