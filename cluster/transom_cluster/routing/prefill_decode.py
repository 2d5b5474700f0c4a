"""Disaggregation of prefill and decode: chooses by role which workers may take a request. Pure functions.

- **role**: what a worker is for (`--role`): `prefill`, `decode`, or `both`.
- **handover**: a worker with the role `prefill` computes a prompt and its first token; then a worker that may decode continues. It
  fetches the prompt's KV from the first one, most of it while the prompt is computed (`Request.decoder`).

A request goes to the `prefill` workers if it has no output yet and computing its prompt at a worker that may decode would delay
requests for longer than its waits on the other way: for the queue of a prefill worker, and for the fetch of what that computed. At
a decode worker it delays itself and each stream there. All other requests go to workers that may decode: requests with output,
*short* prompts, prompts that such a worker has cached, and requests that do not read the prefix cache
(`Request.reads_prefix_cache`), which cannot fetch anything. If there is no worker of the right role, any worker takes the request
and does both, so no request fails because of roles.
"""

from dataclasses import dataclass

import numpy as np

from transom_cluster.routing.index_code import Integers
from transom_cluster.routing.policy import Candidates
from transom_cluster.routing.prefix_fetches import MARGIN, fetch_times_s, has_equal_blocks, window_of
from transom_cluster.routing.worker_table import Selection
from transom_core.contract import Request


@dataclass(frozen=True, slots=True)
class Takers:
    """The positions of workers that may take a request. With `is_prefill_only` another worker continues after the first token."""

    positions: Integers
    is_prefill_only: bool = False


def choose_takers(request: Request, selection: Selection, allowed: Integers, candidates: Candidates) -> Takers:
    """Choose by role among the workers at the positions `allowed`. `candidates` has all workers of the selection."""
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
    """Return whether computing the prompt would delay requests of each worker that may decode for longer than the request would
    wait at a prefill worker and for its fetch (MARGIN times). The time to compute it counts at decode workers alone, since prefill
    workers are there for that."""
    source = selection.workers[int(prefillers[0])]
    if not source.can_fetch or not selection.can_fetch[decoders].all():
        return False
    if not all(has_equal_blocks(selection.workers[int(one)], source) for one in decoders):
        return False
    place = source.place(is_on_device=True)  # a prompt that was just computed
    speeds = [selection.workers[int(one)].fetch_speed(place) for one in decoders]
    num_missing = candidates.num_to_compute[decoders]
    fetching_s = fetch_times_s(source, request.num_prompt_tokens, num_missing, speeds, window_of(request))
    # What computes at a decode worker now, and soon: its share of the requests that will be handed over.
    num_streams = candidates.num_requests[decoders] + candidates.num_requests[prefillers].sum() / len(decoders)
    delay_s = candidates.queue_s[decoders] + (1 + num_streams) * candidates.computing_s[decoders]
    return bool(np.all(delay_s >= candidates.queue_s[prefillers].min() + MARGIN * fetching_s))
