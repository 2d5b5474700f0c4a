"""Requests: what a router sends to a worker, and their order by priority, for the queues of routers and of workers alike.

*Virtual arrival*: with the scheduling policy `priority`, a request of priority p counts as having arrived `p * PRIORITY_AGING_S`
seconds later than it did, and the request with the earliest virtual arrival runs first. A request of priority 2 that arrives at
second 100 is served like a request of priority 0 that arrives at second 160. So waiting improves a request's place against all that
come after it, and no request starves. Where clients may ask for priorities from -M to M, a request of priority p is overtaken only
by requests that arrive less than `(p + M) * PRIORITY_AGING_S` seconds after it. With the policy `fcfs` priorities are ignored.
"""

from dataclasses import dataclass

from transom_core.client_queue import Sharer
from transom_core.config import SchedulingPolicy
from transom_core.contract.adapter import Adapter
from transom_core.contract.kv_policy import KvPolicy
from transom_core.contract.sampling_params import SamplingParams

CONTRACT_VERSION = 18
PRIORITY_AGING_S = 30.0
MAX_CLIENT_CHARS = 64
MIN_CLIENT_WEIGHT, MAX_CLIENT_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """Where a request's cached prefix can be fetched from: `worker` has the KV of its first `num_tokens` tokens.

    `worker` is the id by which the routers know it (not `WorkerInfo.worker`, where the two differ). `place` names the node of that
    worker and the tier that has the blocks; empty: unknown. Fetches from one place are expected to be equally fast.
    """

    worker: str
    num_tokens: int
    place: str = ""

    @staticmethod
    def place_of(node: str, *, is_on_device: bool) -> str:
        """Return the `place` of blocks on the device or in the host tier of a worker of this node; empty: unknown."""
        return f"{node}/{'device' if is_on_device else 'host'}" if node else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence for a worker to compute, or to continue at any output position, with all that the worker needs for it.

    `resumed_output_ids` are output tokens that the client has already, from a worker that was lost. `turn_boundaries` are prompt
    positions where the turns of a chat end (ascending), and `cache_marks` those up to which the client says that later requests
    repeat the prompt: the prefix cache prefers to keep states at these. A lower `priority` runs first. Requests with different
    `cache_salt`, or with different adapters, share no cached prefix. With an `adapter` the worker adds it to the model for this
    request.

    `client` names who sent the request (a digest of its API key, or of its address), and tells nothing else about it. Where clients
    compete for a scarce resource, each gets a share in proportion to its `client_weight`. Requests whose client is unknown ("")
    count as those of one client.

    With a `prefix_source` the worker fetches the KV of the prefix from another worker before it admits the request. If the fetch
    fails for any reason, the request computes its prompt instead.

    With `prefill_only` the worker ends the attempt after the first token that it samples, so that another worker continues; that
    token's event has `is_handover` set, unless it is the last one of the output anyway. `decoder` is the worker that will probably
    continue; it fetches the prompt's KV while the prompt is computed.

    A `grammar` constrains every token of the output, resumed tokens included. The output ends with "stop" if the grammar allows no
    further token, and end of text is sampled only if the grammar accepts the output so far. A grammar that cannot be used, or that
    becomes too complex, ends the request with an error; the worker never samples without it. `grammar_bytes` is the memory that the
    compiled grammar takes, as the router has measured it.

    The clocks of two hosts may differ by any amount, so the times are durations that count from the moment at which the router gave
    the request to the worker: it had been at the router for `waited_s`, and may take `time_left_s` from then on.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # always set: the router draws one for a request without
    choice_index: int = 0
    client: str = ""  # opaque, at most `MAX_CLIENT_CHARS`; empty: unknown
    client_weight: float = 1.0  # the client's share beside others', above 0; the same in all of its requests
    resumed_output_ids: tuple[int, ...] = ()
    waited_s: float = 0.0  # earlier attempts at other workers included
    time_left_s: float | None = None  # None: no deadline
    priority: int = 0
    cache_salt: str | None = None
    adapter: Adapter | None = None  # None: the model as it is
    turn_boundaries: tuple[int, ...] = ()
    cache_marks: tuple[int, ...] = ()
    kv_policy: KvPolicy | None = None  # None: the model's layers keep what they read
    kv_quality: bool = False  # compare the policy with full attention in a sample of steps
    prefix_source: PrefixSource | None = None
    prefill_only: bool = False
    decoder: str | None = None
    grammar: str | None = None  # the grammar of the whole output, in llguidance's dialect of Lark; None: any output
    grammar_bytes: int = 0  # 0: unknown
    trace_parent: str | None = None  # the router's span, as a W3C traceparent header; None if the request is not traced
    version: int = CONTRACT_VERSION

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens, without the resumed output tokens."""
        return len(self.prompt_token_ids)

    @property
    def sharer(self) -> Sharer:
        """Return the client with its weight."""
        return Sharer(self.client, self.client_weight)

    @property
    def reads_prefix_cache(self) -> bool:
        """Return whether the request may begin after a cached prefix, wherever that comes from.

        Prompt log-probabilities, a mean of hidden states, and the comparison of a KV policy with full attention need every token to
        be computed, and what a policy keeps that depends on its history is in no cache.
        """
        has_history = self.kv_policy is not None and self.kv_policy.depends_on_history
        needs_all = self.params.prompt_logprobs is not None or self.params.pooling == "mean"
        return not (has_history or self.kv_quality or needs_all)


def virtual_arrival_s(arrival_s: float, priority: int, policy: SchedulingPolicy) -> float:
    """Return the time at which a request counts as having arrived, on the clock of `arrival_s`."""
    return arrival_s + priority * PRIORITY_AGING_S if policy == "priority" else arrival_s
