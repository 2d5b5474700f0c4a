"""A rank's place among the ranks that share one model, its share of anything cut by whole units, and how ranks add up."""

from __future__ import annotations

from transom_worker.parallel.communicator import SINGLE_RANK, Communicator
from transom_worker.parallel.parallel import Parallel

__all__ = ["SINGLE_RANK", "Communicator", "Parallel"]
