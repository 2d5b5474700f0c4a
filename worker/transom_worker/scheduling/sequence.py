"""`Sequence`: what the scheduler knows about one request: its tokens, how far they are computed, and its status.

The status of a sequence:

                     admitted
    add --> WAITING -----------> RUNNING
               ^                 |     |
               |    preempted    |     |  preempted while a step in flight computes it
               +-----------------+     v
               +-------------------- PREEMPTING
                  that step answered

    every status --> FINISHED, when the engine stops the request, the client aborts it, or a step fails

A WAITING sequence holds no KV blocks. It stands in the queue, it waits for a prefix that a running sequence computes
(`in_flight_prefixes`), or it is *held* while its prefix comes from another worker. PREEMPTING and FINISHED sequences
keep their blocks while a step in flight still reads or writes them.

How far a sequence is computed, as intervals over its token positions:

    0            processed          scheduled              known tokens
    |  computed,    |   in flight,     |   ready for a plan,  |
    |  answered     |   unanswered     |   not scheduled      |

`processed` is a field of `SequenceBlocks`. A token that a step in flight will sample is *pending*; it counts as known, since
the next plan may compute it before its id has arrived. Example: prompt of 100 tokens, all in flight in one step that samples
the 101st: processed 0, scheduled 100, known 101, of which 1 is pending.

*Resumed output* is output that a request arrives with, since its stream began on a worker that was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from transom_core.contract import AdaptivePolicy, HeavyPolicy, LogprobTable, Request, TokenLogprobs
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.scheduling.attention_history import AttentionHistory
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.step import PolicyQuality

OrderKey = tuple[float, int]  # (`queue.order_time_s`, counter): the smaller key is served first


class SequenceStatus(Enum):
    """The five statuses of a sequence; the module's docstring has the transitions."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    PREEMPTING = auto()
    FINISHED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request inside the scheduler; the module's docstring explains the intervals and the status."""

    request: Request
    order_key: OrderKey
    num_prompt_tokens: int  # without resumed output
    max_tokens_total: int  # prompt and output; at this length nothing more is computed
    root: bytes  # the value that the chain's first digest is computed from (`kvcache.hashing`)
    token_ids: list[int]  # prompt, then output as received
    retentions: RetentionSet  # what the sequence keeps, by its KV policy if it has one
    chain: list[bytes] = field(default_factory=list)  # digests of `token_ids`, one per `--block-size` tokens
    status: SequenceStatus = SequenceStatus.WAITING
    seq_id: int = -1  # the ranks' name of it; a fresh one at each admission
    blocks: SequenceBlocks | None = None
    scheduled: int = 0  # tokens that plans have scheduled
    num_in_flight: int = 0  # plans that compute the sequence and have not answered
    num_pending: int = 0  # tokens that those plans sample
    num_tokens_on_ranks: int = 0  # tokens whose ids, or the rows that sample them, the ranks have been told
    sampled_step: int = -1  # id of the plan that samples the newest token
    sampled_row: int = -1  # the row of that plan
    swapped: SequenceBlocks | None = None  # of a WAITING sequence whose KV is in the host tier
    is_held: bool = False  # its prefix is on its way from another worker
    was_admitted: bool = False  # at least once
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    num_host_tokens: int = 0  # of them, those that the host tier spared
    index_version: int = 0  # of the prefix index when `num_cached_tokens` were found
    prompt_logprobs: LogprobTable | None = None  # of the prompt tokens from the second one on, as far as computed
    has_output: bool = False
    num_found_at_admission: int = 0  # tokens that the last admission found in the prefix cache
    recompute_until: int = 0  # a preemption discarded what was computed below this position
    reserved_tokens: int = 0  # tokens of a step that later sequences leave it, because it waited for a prefix
    history: AttentionHistory | None = (
        None  # of a sequence with a KV policy that depends on its attention, while it runs
    )
    decode_from: int = 0  # from this position on only tokens that were sampled here are computed

    @property
    def num_tokens_at_arrival(self) -> int:
        """Tokens that the request arrived with: its prompt and resumed output."""
        return self.num_prompt_tokens + len(self.request.resumed_output_ids)

    @property
    def num_ready(self) -> int:
        """Tokens that the next plan could compute; 0 at the length limit, whose last token needs no successor.

        A sequence with a grammar waits for its pending token, which decides what may follow it.
        """
        if self.num_pending and self.request.grammar is not None:
            return 0
        known = len(self.token_ids) + self.num_pending
        return known - self.scheduled if known < self.max_tokens_total else 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the sequence may begin at a hit: not if all its tokens must be computed, or all their KV compared, or if its KV
        policy depends on its history.
        """
        policy, is_compared = self.request.kv_policy, self.request.kv_quality
        return not (self.wants_prompt_logprobs or is_compared or (policy is not None and policy.depends_on_history))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.request.params.prompt_logprobs is not None and not self.has_output

    def begin_history(self, *, block_size: int) -> None:
        """Begin the attention history of a sequence with a KV policy that depends on it; its first token is computed next."""
        policy = self.request.kv_policy
        if isinstance(policy, AdaptivePolicy | HeavyPolicy):
            self.history = AttentionHistory(policy, block_size=block_size, num_prompt_tokens=self.num_prompt_tokens)

    def reset_computed(self) -> None:
        """Return to WAITING with nothing computed. The caller has released the KV blocks."""
        self.status = SequenceStatus.WAITING
        self.blocks = self.history = None
        self.scheduled = self.num_tokens_on_ranks = 0
        self.num_pending = 0  # not 0 where the step that was to sample the token ran out of memory
        self.prompt_logprobs = None

    def keep_swapped(self, blocks: SequenceBlocks) -> None:
        """Return to WAITING with these blocks in the host tier; what was computed stays computed."""
        self.status = SequenceStatus.WAITING
        self.blocks, self.swapped = None, blocks
        self.scheduled = self.num_tokens_on_ranks = self.num_pending = 0

    def take_prompt_logprobs(self, logprobs: LogprobTable) -> None:
        """Append the log-probabilities of the next prompt tokens."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = logprobs
        else:
            self.prompt_logprobs.extend(logprobs)

    def take_token(
        self, token_id: int, logprobs: TokenLogprobs | None, quality: PolicyQuality | None = None
    ) -> SequenceOutput:
        """Append the token that a step sampled, and return it as an output for the engine."""
        self.num_pending -= 1
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        is_first = not self.has_output
        prompt_logprobs = None
        if is_first:
            self.has_output = True
            if self.request.params.prompt_logprobs is not None:
                prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs or LogprobTable(1), None
        return SequenceOutput(  # by position: names would cost a third of this function
            self.request.request_id,
            token_id,
            num_tokens - 1 - self.num_prompt_tokens,
            self.num_cached_tokens,
            self.index_version,
            is_first,
            num_tokens >= self.max_tokens_total,
            logprobs,
            prompt_logprobs,
            quality,
            self.num_host_tokens,
        )
