"""Tensor parallelism: a rank's place among the ranks of a worker, how ranks connect, and their collectives.

A *rank* is one process with one device. All ranks of a worker run the same collectives in the same order.
"""

from __future__ import annotations

from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator
from transom_worker.models.parallel.parallel import Parallel

__all__ = ["SINGLE_RANK", "Communicator", "Parallel"]
