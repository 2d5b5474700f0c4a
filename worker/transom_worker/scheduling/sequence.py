"""`Sequence`: what the scheduler knows about one request: its tokens, how far they are computed, and its status.

`TRANSITIONS` has the statuses of a sequence, what may follow each, and what changes it.

A WAITING sequence holds no KV blocks on the device; its `wait` says where it waits and for what. A LOADING sequence holds blocks
and computes nothing. PREEMPTING and FINISHED sequences keep their blocks while a step in flight, or a load, still uses them.

How far a sequence is computed, as intervals over its token positions:

    0            processed          scheduled              known tokens
    |  computed,    |   in flight,     |   ready for a plan,  |
    |  answered     |   unanswered     |   not scheduled      |

`processed` is a field of `SequenceBlocks`. A token that a step in flight will sample is *pending*; it counts as known, since
the next plan may compute it before its id has arrived. Example: prompt of 100 tokens, all in flight in one step that samples
the 101st: processed 0, scheduled 100, known 101, of which 1 is pending.

*Resumed output* is output that a request arrives with, because its stream began on a worker that was lost. A step or load *has
answered* when its result has arrived.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from transom_core.contract import AdaptivePolicy, HeavyPolicy, LogprobTable, Request, TokenLogprobs
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.tiers.loads import Load
from transom_worker.scheduling.attention_history import AttentionHistory
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.step import NO_ADAPTER, PolicyQuality

OrderKey = tuple[float, int]  # (`queue.order_time_s`, counter): the smaller key is served first


class SequenceStatus(Enum):
    """The statuses of a sequence; `TRANSITIONS` says how they follow each other."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    PREEMPTING = auto()
    FINISHED = auto()


_ENDS = {SequenceStatus.FINISHED: "stopped, aborted or failed"}

TRANSITIONS: dict[SequenceStatus, dict[SequenceStatus, str]] = {
    SequenceStatus.WAITING: {
        SequenceStatus.LOADING: "admitted; its blocks come from the host tier first",
        SequenceStatus.RUNNING: "admitted",
        **_ENDS,
    },
    SequenceStatus.LOADING: {
        SequenceStatus.RUNNING: "the ranks have reported its load",
        SequenceStatus.PREEMPTING: "preempted while the ranks make its load",
        **_ENDS,
    },
    SequenceStatus.RUNNING: {
        SequenceStatus.WAITING: "preempted",
        SequenceStatus.PREEMPTING: "preempted while a step in flight computes it",
        **_ENDS,
    },
    SequenceStatus.PREEMPTING: {SequenceStatus.WAITING: "that step has answered, or that load was reported", **_ENDS},
    SequenceStatus.FINISHED: {},
}
"""What may follow each status, with the reason."""


@dataclass(slots=True, kw_only=True, eq=False)
class InQueue:
    """The sequence stands in the queue, and may be admitted when it is the first one."""

    swapped: SequenceBlocks | None = None  # its blocks in the host tier, after a preemption by swap
    reserved_tokens: int = 0  # tokens of a step that later sequences leave it, because it waited for a prefix before


@dataclass(slots=True, kw_only=True, eq=False)
class AwaitsPrefix:
    """The sequence waits until a producer has published the first `num_hash_blocks` of its prompt (`in_flight_prefixes`)."""

    producer: Sequence | Load
    num_hash_blocks: int
    reserved_tokens: int  # tokens that it will compute itself


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """The sequence is new, and must wait until its prefix has come from another worker or the disk, or its grammar is compiled,
    or its LoRA adapter is in a slot."""


Wait = InQueue | AwaitsPrefix | Held


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """What the first admission of a sequence found of its prompt in the prefix cache."""

    num_tokens: int = 0
    num_host_tokens: int = 0  # those of them that only the host tier had
    index_version: int = 0  # of the prefix index at that time


NOTHING_CACHED = CachedPrompt()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request inside the scheduler; the module's docstring explains the intervals and the status."""

    request: Request
    order_key: OrderKey
    num_prompt_tokens: int  # without resumed output
    max_tokens_total: int  # prompt and output; at this length nothing more is computed
    root: bytes  # the value that the chain's first digest is computed from (`kv_cache.hashing`)
    token_ids: array[int]  # prompt, then output as received; garbage collections would visit each element of a list
    retentions: RetentionSet  # what the sequence keeps, by its KV policy if it has one
    adapter_slot: int = NO_ADAPTER  # at the ranks; also while it is not known yet
    chain: list[bytes] = field(default_factory=list)  # digests of `token_ids`, one per `--block-size` tokens
    status: SequenceStatus = SequenceStatus.WAITING
    wait: Wait | None = None  # where a WAITING sequence waits; None for any other
    seq_id: int = -1  # the ranks' name of it; a fresh one at each admission
    blocks: SequenceBlocks | None = None
    scheduled: int = 0  # tokens that plans have scheduled
    num_in_flight: int = 0  # plans and loads that use the sequence's blocks and have not answered
    num_pending: int = 0  # tokens that those plans sample
    num_tokens_on_ranks: int = 0  # tokens that the ranks know, by their ids or by the rows that sample them
    sampled_step: int = -1  # id of the plan that samples the newest token
    sampled_row: int = -1  # the row of that plan
    cached_prompt: CachedPrompt | None = None  # None before the first admission
    prompt_logprobs: LogprobTable | None = None  # of the prompt tokens from the second one on, as far as computed
    # of the prompt tokens that its embedding counts, as far as computed
    hidden_sum: list[float] = field(default_factory=list)
    has_output: bool = False
    admitted_step: int = 0  # steps that had been planned at the last admission
    num_found_at_admission: int = 0  # tokens that the last admission found in the prefix cache
    recompute_until: int = 0  # a preemption discarded what was computed below this position
    history: AttentionHistory | None = None  # while it runs under a KV policy that depends on its attention
    # The step until which it may await prefixes of other clients; None if it has never awaited one.
    awaits_others_until: int | None = None
    # The number of its last turn among those of all sequences, where rows take turns (`time_shares`).
    last_turn: int = 0
    decode_from: int = 0  # from this position on only tokens that were sampled here are computed
    # While it runs: rows that begin below this position compute its newest token, and need no blocks, grammar or KV policy.
    decodes_until: int = 0

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; `TRANSITIONS` must allow the new status after the present one."""
        assert status in TRANSITIONS[self.status], f"{self.request.request_id}: {self.status} -> {status}"
        self.status, self.decodes_until = status, 0

    @property
    def was_admitted(self) -> bool:
        """Whether the sequence was admitted at least once."""
        return self.cached_prompt is not None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first admission found in the prefix cache."""
        return 0 if self.cached_prompt is None else self.cached_prompt.num_tokens

    @property
    def swapped(self) -> SequenceBlocks | None:
        """The blocks in the host tier of a WAITING sequence that was preempted by swap; None for any other sequence."""
        return self.wait.swapped if isinstance(self.wait, InQueue) else None

    @property
    def is_held(self) -> bool:
        """Whether the sequence must not be admitted yet."""
        return isinstance(self.wait, Held)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of a step that later sequences leave this one, because it waits or waited for a prefix; else 0."""
        return self.wait.reserved_tokens if isinstance(self.wait, InQueue | AwaitsPrefix) else 0

    @property
    def num_tokens_at_arrival(self) -> int:
        """Tokens that the request arrived with: its prompt and resumed output."""
        return self.num_prompt_tokens + len(self.request.resumed_output_ids)

    @property
    def num_ready(self) -> int:
        """Tokens that the next plan could compute; 0 at the length limit, since nothing is sampled after the last token.

        0 also for a sequence with a grammar and a pending token, since that token decides which tokens may follow it.
        """
        if self.num_pending and self.request.grammar is not None:
            return 0
        known = len(self.token_ids) + self.num_pending
        return known - self.scheduled if known < self.max_tokens_total else 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the sequence may begin at a hit.

        It may not if all its prompt's logits or hidden states are needed, if its KV policy is compared with full attention, or if
        the policy depends on the attention of all tokens so far.
        """
        policy, is_compared = self.request.kv_policy, self.request.kv_quality
        needs_all = self.wants_prompt_logprobs or self.wants_hidden_mean
        return not (needs_all or is_compared or (policy is not None and policy.depends_on_history))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.request.params.prompt_logprobs is not None and not self.has_output

    @property
    def wants_hidden_mean(self) -> bool:
        """Whether the hidden states of all prompt tokens are still to be added up."""
        return self.request.params.pooling == "mean" and not self.has_output

    def begin_history(self, *, block_size: int) -> None:
        """Begin the attention history, if the KV policy depends on it, before the sequence's first token is computed."""
        policy = self.request.kv_policy
        if isinstance(policy, AdaptivePolicy | HeavyPolicy):
            self.history = AttentionHistory(policy, block_size=block_size, num_prompt_tokens=self.num_prompt_tokens)

    def leave_device(self, *, is_swapped: bool) -> None:
        """Note that the sequence has no blocks on the device any more, so that nothing of it counts as computed.

        What a swapped sequence has computed besides its KV stays, since its blocks come back.
        """
        self.blocks = None
        # `num_pending` may be above 0: the step that was to sample the token ran out of memory.
        self.scheduled = self.num_tokens_on_ranks = self.num_pending = 0
        if not is_swapped:
            self.history = self.prompt_logprobs = None
            self.hidden_sum = []

    def take_prompt_results(self, logprobs: LogprobTable | None, hidden_sum: list[float] | None) -> None:
        """Append the log-probabilities of the next prompt tokens, and add their hidden states, if the step has them."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = logprobs
        elif logprobs is not None:
            self.prompt_logprobs.extend(logprobs)
        if hidden_sum is not None:
            before = self.hidden_sum
            self.hidden_sum = [a + b for a, b in zip(before, hidden_sum, strict=True)] if before else hidden_sum

    def take_token(
        self, token_id: int, logprobs: TokenLogprobs | None, quality: PolicyQuality | None = None
    ) -> SequenceOutput:
        """Append the token that a step sampled, and return it as an output for the engine."""
        self.num_pending -= 1
        self.token_ids.append(token_id)
        num_tokens, request, is_first = len(self.token_ids), self.request, not self.has_output
        at_limit, position = num_tokens >= self.max_tokens_total, num_tokens - 1 - self.num_prompt_tokens
        cached, prompt_logprobs, embedding = NOTHING_CACHED, None, None
        if is_first:
            self.has_output, cached = True, self.cached_prompt or cached
            if request.params.prompt_logprobs is not None:
                prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs or LogprobTable(1), None
            if request.params.pooling is not None:
                num_summed = self.num_prompt_tokens if request.params.pooling == "mean" else 1
                embedding, self.hidden_sum = [one / num_summed for one in self.hidden_sum], []
        fields = (
            request.request_id, token_id, position, cached.num_tokens, cached.index_version, is_first, at_limit,
            logprobs, prompt_logprobs, quality, cached.num_host_tokens, embedding,
        )  # fmt: skip
        # A named tuple's own constructor is a Python function, which takes three times as long.
        return tuple.__new__(SequenceOutput, fields)
