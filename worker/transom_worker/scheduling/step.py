"""The contract between scheduler and ranks: integers out (`StepPlan`), integers in (`StepResult`). Frozen.

All arrays are flat lists of plain ints; nothing here knows torch. Legend:

    B  scheduled sequences (batch rows)     G  KV cache groups
    D  block-table deltas                   C  block copies
    S  rows that sample a token             T  tokens computed = sum(count)
    M  moved blocks

A rank keeps, per sequence: token ids, sampling state and one block table per group. A plan only says what changed. A plan's
effects apply in this order: finished, new sequences, deltas, moves, block copies, forward pass, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transom_worker.contract import KvPolicy, SamplingParams, TokenLogprobs

STEP_VERSION = 2

TIER_DEVICE = 0
TIER_HOST = 1

NO_ID = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that ranks have not seen, or not since its preemption.

    `token_ids` are the prompt followed by known output (after a preemption or resume); `num_prompt_tokens` splits them, which
    penalties and the noise counter need: the token that follows `n` tokens has output position `n - num_prompt_tokens`.
    """

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice_index: int = 0
    adapter: str | None = None
    kv_policy: KvPolicy | None = None


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step for every rank.

    Block tables. A sequence's table for a group is its pinned blocks (the group's `num_sink_blocks` first logical blocks,
    for sink tokens; usually none) followed by a run of consecutive logical blocks. Delta `d` on (`delta_seq`, `delta_group`)
    first drops `delta_dropped` blocks from the front of the run, then appends
    `delta_blocks[delta_offset[d] : delta_offset[d + 1]]` at the table's end; after it the run starts at logical block
    `delta_first_block`. A table starts empty; one delta at most per (sequence, group) and step.

    Moves (compaction). Logical block `moved_logical[m]` of (`moved_seq`, `moved_group`), pinned or in the run as it stands after
    the deltas, is from now on block `moved_block[m]`; a block copy of this or an earlier plan brings its contents.

    Scheduled sequence `b` computes positions `[start[b], start[b] + count[b])`. Its input tokens are those the rank knows;
    the last one may be new: `input_id[b]` gives it, or `input_row[b]` says that it is what row `input_row[b]` of the step
    before sampled (an index into that step's B); both NO_ID when the rank knows them all.

    Per group `g`: no key below `attend_from[g][b]`, pinned sink tokens apart, is read by this sequence's queries in this step,
    and no key or value below position `write_from[g][b]` is written (0 and `start` in the ordinary case; raised by window
    repair).

    Logits are wanted for positions `[logits_from[b], start[b] + count[b])`: none when equal to the end, the last row alone
    for a sampling sequence, more for prompt log-probabilities. `sample[b]` is 1 when the last row samples a token.

    Block copies run before the forward pass, in order, on (group, source block and tier, target block and tier).
    """

    step_id: int
    version: int = STEP_VERSION

    new_sequences: list[NewSequence] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    delta_seq: list[int] = field(default_factory=list)  # [D]
    delta_group: list[int] = field(default_factory=list)  # [D]
    delta_dropped: list[int] = field(default_factory=list)  # [D]
    delta_first_block: list[int] = field(default_factory=list)  # [D]
    delta_offset: list[int] = field(default_factory=lambda: [0])  # [D + 1]
    delta_blocks: list[int] = field(default_factory=list)  # [delta_offset[D]]

    moved_seq: list[int] = field(default_factory=list)  # [M]
    moved_group: list[int] = field(default_factory=list)  # [M]
    moved_logical: list[int] = field(default_factory=list)  # [M]
    moved_block: list[int] = field(default_factory=list)  # [M]

    seq_ids: list[int] = field(default_factory=list)  # [B]
    start: list[int] = field(default_factory=list)  # [B]
    count: list[int] = field(default_factory=list)  # [B]
    input_id: list[int] = field(default_factory=list)  # [B]
    input_row: list[int] = field(default_factory=list)  # [B]
    attend_from: list[list[int]] = field(default_factory=list)  # [G][B]
    write_from: list[list[int]] = field(default_factory=list)  # [G][B]
    logits_from: list[int] = field(default_factory=list)  # [B]
    sample: list[int] = field(default_factory=list)  # [B]

    copy_group: list[int] = field(default_factory=list)  # [C]
    copy_source: list[int] = field(default_factory=list)  # [C]
    copy_target: list[int] = field(default_factory=list)  # [C]
    copy_source_tier: list[int] = field(default_factory=list)  # [C]
    copy_target_tier: list[int] = field(default_factory=list)  # [C]

    grammar_mask: bytes | None = None  # [S, ceil(V / 8)] bits, lowest first, 1 = allowed; sampling rows in order

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes (T)."""
        return sum(self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Seconds that one step took on the first rank, by part, and when it began by that host's monotonic clock."""

    begin_s: float = 0.0
    prepare_s: float = 0.0
    copy_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What the first rank reports of one step. Results arrive in the order of their plans.

    `sampled_ids` and `logprobs` follow the plan's sampling rows (`sample[b] == 1`, in order of b). `prompt_logprobs[b]` are
    those of the tokens that follow positions `[logits_from[b], ...)` inside the prompt, for sequences that asked for them.
    """

    step_id: int
    version: int = STEP_VERSION
    sampled_ids: list[int] = field(default_factory=list)  # [S]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # [S], or empty when nobody asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by batch row
    attention_mass: dict[int, list[float]] = field(default_factory=dict)  # by batch row, per block; KV policies
    num_copies_done: int = 0
    timings: StepTimings = field(default_factory=StepTimings)
