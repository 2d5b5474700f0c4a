"""Disaggregation of prefill and decode: which of the workers may take a request, by their roles. Pure.

- **role**: what a worker is for (`--role`): `prefill`, `decode`, or `both`.
- **handover**: a worker of the role `prefill` computes a prompt and its first token; then a worker that may decode continues, and
  fetches the prompt's KV from it (`prefix_fetches`).

A request without output goes to the workers that may prefill, unless some worker that may decode computes what it lacks of the
prompt faster than it could fetch that (*short* prompts, and those that it has cached). All others go to the workers that may
decode, and so do requests that read no prefix cache (`Request.reads_prefix_cache`), since these fetch nothing. Where none of those
that should take a request may, any worker takes it and does both: no request fails for want of a role.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transom_cluster.routing.index_code import Integers
from transom_cluster.routing.policy import Candidates
from transom_cluster.routing.prefix_fetches import FETCH_RATE, MARGIN, fetch_times_s, has_equal_blocks, window_of
from transom_cluster.routing.worker_table import Selection
from transom_core.contract import Request


@dataclass(frozen=True, slots=True)
class Takers:
    """The workers that may take a request, as positions in the selection; `is_prefill_only`: another one is to continue."""

    positions: Integers
    is_prefill_only: bool = False


def choose_takers(request: Request, selection: Selection, allowed: Integers, candidates: Candidates) -> Takers:
    """Choose by role among the workers at the positions `allowed`; `candidates` are all workers of the selection."""
    decoders = allowed[selection.may_decode[allowed]]
    prefillers = allowed[~selection.may_decode[allowed]]
    if not len(decoders):
        return Takers(allowed)
    if request.resumed_output_ids or not len(prefillers) or not request.reads_prefix_cache:
        return Takers(decoders)
    if not _is_worth_moving(request, selection, prefillers, decoders, candidates):
        return Takers(decoders)
    return Takers(prefillers, is_prefill_only=True)


def _is_worth_moving(
    request: Request, selection: Selection, prefillers: Integers, decoders: Integers, candidates: Candidates
) -> bool:
    """Whether every worker that may decode would fetch what it lacks of the prompt faster than it computes that."""
    source = selection.workers[int(prefillers[0])]
    if not source.can_fetch or not selection.can_fetch[decoders].all():
        return False
    if not all(has_equal_blocks(selection.workers[int(one)], source) for one in decoders):
        return False
    own = candidates.at(decoders)
    fetching_s = fetch_times_s(
        source, request.num_prompt_tokens, own.num_to_compute, own.facts[FETCH_RATE], window_of(request)
    )
    return bool(np.all(own.computing_s >= MARGIN * fetching_s))
