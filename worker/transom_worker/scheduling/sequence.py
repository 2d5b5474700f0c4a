"""What the scheduler knows about one request: its tokens, how far they are computed, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from transom_worker.contract import Request, TokenLogprobs
from transom_worker.kvcache.sequence import SequenceBlocks
from transom_worker.scheduling.outputs import SequenceOutput

OrderKey = tuple[float, int]  # (virtual arrival, counter): smaller runs first


class SequenceStatus(Enum):
    """Where a sequence stands. PREEMPTING ones are preempted when their step in flight has answered."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTING = auto()
    FINISHED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request inside the scheduler.

    Intervals over positions: `[0, processed)` computed and answered (in `blocks`), `[processed, scheduled)` in flight,
    `[scheduled, known)` ready, where sampled tokens still in flight count as known.
    """

    request: Request
    key: OrderKey
    num_prompt_tokens: int  # without resumed output
    max_tokens_total: int  # prompt and output; at this length nothing more is computed
    root: bytes
    token_ids: list[int]  # prompt, then output as received
    chain: list[bytes] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    seq_id: int = -1  # a fresh one at each admission
    blocks: SequenceBlocks | None = None
    scheduled: int = 0
    num_in_flight: int = 0  # plans that compute it and have not answered
    num_pending: int = 0  # tokens sampled by those plans
    rank_known: int = 0  # tokens that ranks have been given
    sampled_step: int = -1  # the plan, and its row, that samples the newest token
    sampled_row: int = -1
    admitted: bool = False  # ever
    num_cached_tokens: int = 0
    index_version: int = 0  # of the prefix index when `num_cached_tokens` were found
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    has_output: bool = False
    began_at: int = 0  # tokens that the last admission found
    lost_until: int = 0  # below it everything was there before a preemption
    reserved_tokens: int = 0  # tokens that those behind it leave it, since it followed another: until it is tried again
    decode_from: int = 0  # from this position on nothing is computed but what was sampled here

    @property
    def num_known_at_first(self) -> int:
        """Tokens that the request came with."""
        return self.num_prompt_tokens + len(self.request.resumed_output_ids)

    @property
    def num_ready(self) -> int:
        """Tokens that the next plan could compute; none at the length limit, whose token needs no successor."""
        known = len(self.token_ids) + self.num_pending
        return known - self.scheduled if known < self.max_tokens_total else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt rows' log-probabilities are still reserved_tokens; such a sequence reads no cache."""
        return self.request.params.prompt_logprobs is not None and not self.has_output

    def leave(self) -> None:
        """Forget everything that was computed (its blocks are the caller's business)."""
        self.status = SequenceStatus.WAITING
        self.blocks = None
        self.scheduled = self.rank_known = 0
        self.prompt_logprobs = None

    def take_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Those of the next prompt tokens arrived."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None]
        self.prompt_logprobs += logprobs

    def take_token(self, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """The sampled token is known from here on."""
        self.num_pending -= 1
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        is_first = not self.has_output
        prompt_logprobs = None
        if is_first:
            self.has_output = True
            if self.request.params.prompt_logprobs is not None:
                prompt_logprobs = tuple(self.prompt_logprobs or (None,))
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
        )
