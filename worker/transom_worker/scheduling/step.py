"""The messages between scheduler and ranks: a `StepPlan` goes to every rank, a `StepResult` comes back from the first one.

A *rank* is one process of a tensor-parallel worker; a *KV cache group* is model layers that keep the same tokens for the same
time, such as a sliding window. All arrays are flat lists of plain ints; this module knows no tensors. Legend:

    B  scheduled sequences (batch rows)     G  KV cache groups
    D  block-table deltas                   C  block copies
    S  rows that sample a token             T  tokens computed = sum(count)
    M  moved blocks                         X  blocks removed from the middle of a table

A rank keeps, per sequence: token ids, sampling state and one block table per group. A plan only says what changed. A rank
applies a plan in this order: finished sequences, new sequences, deltas, removals, moves, block copies, forward pass, sampling.

A *logical block* is a block's index in its sequence: logical block 3 of a group with blocks of 16 tokens has tokens 48 to 63. A
*block id* says where it lies in the arena.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from transom_core.contract import KvPolicy, LogprobTable, SamplingParams, TokenLogprobs
from transom_core.kv_cache import tiers

STEP_VERSION = 7

TIER_DEVICE = tiers.DEVICE  # the arena in the device's memory
TIER_HOST = tiers.HOST  # the arena in the host's memory
TIER_DISK = tiers.DISK  # files; a copy names one by an index into the plan's `disk_digests`

LOAD_WAIT_S = 0.005  # the most time for which a rank waits for a load before it answers a plan without rows

NO_ADAPTER = -1  # in `adapter_slot`
NO_ID = -1  # in `input_id` and `input_row`: this array does not give the token; of a state: no block
WHOLE_TABLE = 2**31 - 1  # in `row_window`: the row's queries read every key of the table, up to their own position


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that the ranks do not know: a new one, or one that was preempted and admitted again.

    `token_ids` are the prompt followed by the known output (after a preemption or migration). The output begins at
    `num_prompt_tokens`; penalties and sampling noise depend on this: the token after `n` tokens has output position
    `n - num_prompt_tokens`.

    With a `kv_policy`, the sequence's tables have `ceil(kv_policy.sinks / block size)` sink blocks, not the group's own
    number. With `kv_quality`, blocks that deltas and removals take out of its tables keep their contents until the sequence is
    finished, so that rows with `measure` can read them. `adapter_slot` is the slot of the sequence's LoRA adapter
    (`Executor.load_adapter`).
    """

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice_index: int = 0
    kv_policy: KvPolicy | None = None
    kv_quality: bool = False
    adapter_slot: int = NO_ADAPTER


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step for every rank.

    **Block tables.** A sequence's table for a group is its sink blocks (the group's `num_sink_blocks` first logical blocks;
    none without attention sinks) followed by a run of consecutive logical blocks:

        | sink 0 | sink 1 |   (slid out)   | first_block | first_block + 1 | ... |

    Delta `d` on (`delta_seq`, `delta_group`) first drops `delta_dropped` blocks from the front of the run, then appends
    `delta_blocks[delta_offset[d] : delta_offset[d + 1]]` at the table's end; after it the run starts at logical block
    `delta_first_block`. A table starts empty. A step has at most one delta per (sequence, group).

    **Moves** (compaction). Logical block `moved_logical[m]` of (`moved_seq`, `moved_group`), a sink block or one of the run as
    it stands after the deltas, is from now on block id `moved_block[m]`; a block copy of this or an earlier plan brings its
    contents.

    **Removals** (of sequences with a KV policy). Logical block `removed_logical[x]` leaves the run of (`removed_seq`,
    `removed_group`), so a run may have gaps. Appended blocks get the logical indices after the table's last one, even if that was
    removed. The delta of a sequence that comes back from the host tier has all its logical blocks, and the same plan removes the
    gaps among them; for a gap whose contents are not kept, the delta has -1 instead of a block id.

    **Rows.** Sequence `b` computes positions `[start[b], start[b] + count[b])`. The rank knows its input tokens, except that
    the last one may be new: then `input_id[b]` gives its id, or `input_row[b]` is the row of the previous step that sampled it
    (an index into that step's B). The one that does not apply is NO_ID; if the rank knows all tokens, both are NO_ID.

    **Window repair.** In an ordinary row `attend_from` is 0 and `write_from` is `start`. A row that repairs windows computes
    again tokens whose KV the full groups still have in the cache. Example: a hit of 160 tokens, repaired from token 96 on, new
    tokens from 160 on:

        position             0 ........... 96 ........... 160 ........... 180
        the row computes                   |==== start, count = 84 =======|
        full group:   read   |==========================================|     attend_from = 0
                      write                               |=============|     write_from = 160: below it the cache is right
        window group: read                 |============================|     attend_from = 96: below it there are no blocks
                      write                |============================|     write_from = 96

    **States.** A block of a `state` group has the recurrent layers' state after some number of tokens. For such a group,
    `attend_from[g][b]` is the logical block with the state that row `b` begins with, NO_ID if it begins at zero, and
    `write_from[g][b]` the one in which it leaves its state (NO_ID: nowhere). They are the same block, updated in place, unless
    the block that the row begins with is kept as a snapshot: this is how a checkpoint copies the state. Logical blocks of these
    tables are not positions; they count the blocks that the sequence has had.

    Per other group `g`: queries of row `b` read no key below `attend_from[g][b]`, sink tokens apart, and write no key or value
    below position `write_from[g][b]`.

    **Logits** are computed for positions `[logits_from[b], start[b] + count[b])`: for no position if `logits_from[b]` is the end,
    for the last one if a token is sampled after it, for more if prompt log-probabilities are requested. `sample[b]` is 1 if a token
    is sampled after the last position, else 0. With `keeps_hidden` some of these rows' sequences have `pooling`, and the result has
    their `hidden_sums`.

    **KV policies.** The four arrays below are empty if no row has a KV policy. `row_window[b]` is 0 for a row that follows its
    layers' own rule. Else the row belongs to a sequence with a KV policy: its query at position `q` reads key `k` of the table
    if `k <= q` and (`k < row_sinks[b]` or `k > q - row_window[b]`), and keys below `row_sinks[b]` through a query that is
    rotated within the model's trained length. `wants_mass[b]` is 1 if the result must have the row's attention mass,
    `measure[b]` is 1 if the row's logits must be compared with those of attention to all keys that still have their contents;
    such a row has one token.

    **Block copies** (group, source block and tier, target block and tier) take effect in order, those of earlier plans first. A
    copy with ticket 0 is done before the forward pass; to the disk, its bytes are taken then, and the file is written later.
    Copies with a ticket above 0 are a *load*, from the host to the device or from the disk to the host: the ranks make them while
    steps run, after the plan's copies with ticket 0, and report the ticket when all of them are done. Until then no row and no
    other copy reads or writes the targets, or writes the sources.

    A plan may have no rows: it carries copies while no sequence can compute, or it has nothing at all and asks which loads are
    done. A rank waits up to `LOAD_WAIT_S` for a load before it answers such a plan. Ranks make the copies of every plan that they
    are given, once and in order, even of a plan that fails or is dropped, and some result reports every ticket, unless a rank is
    lost.
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

    removed_seq: list[int] = field(default_factory=list)  # [X]
    removed_group: list[int] = field(default_factory=list)  # [X]
    removed_logical: list[int] = field(default_factory=list)  # [X]

    seq_ids: list[int] = field(default_factory=list)  # [B]
    start: list[int] = field(default_factory=list)  # [B]
    count: list[int] = field(default_factory=list)  # [B]
    input_id: list[int] = field(default_factory=list)  # [B]
    input_row: list[int] = field(default_factory=list)  # [B]
    attend_from: list[list[int]] = field(default_factory=list)  # [G][B]
    write_from: list[list[int]] = field(default_factory=list)  # [G][B]
    logits_from: list[int] = field(default_factory=list)  # [B]
    sample: list[int] = field(default_factory=list)  # [B]
    row_window: list[int] = field(default_factory=list)  # [B] or empty
    row_sinks: list[int] = field(default_factory=list)  # [B] or empty
    wants_mass: list[int] = field(default_factory=list)  # [B] or empty
    measure: list[int] = field(default_factory=list)  # [B] or empty

    copy_group: list[int] = field(default_factory=list)  # [C]
    copy_source: list[int] = field(default_factory=list)  # [C]
    copy_target: list[int] = field(default_factory=list)  # [C]
    copy_source_tier: list[int] = field(default_factory=list)  # [C]
    copy_target_tier: list[int] = field(default_factory=list)  # [C]
    copy_ticket: list[int] = field(default_factory=list)  # [C]
    disk_digests: list[bytes] = field(default_factory=list)  # of the blocks that copies write to the disk or read there

    keeps_hidden: bool = False
    # Whether ranks answer only when copies to the disk have their files, or after a moment.
    waits_for_disk: bool = False
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

    @property
    def compute_s(self) -> float:
        """Seconds of the step without its block copies."""
        return self.prepare_s + self.forward_s + self.sample_s


class PolicyQuality(NamedTuple):
    """What a KV policy changes in one row: its next-token distribution P is compared with Q, that of attention to all keys.

    `kl` is KL(Q || P) in nats, `top_token_agrees` says whether both have the same most likely token, and `dropped_mass` is the
    share of Q's attention on keys that the policy does not read, averaged over layers and query heads.
    """

    kl: float
    top_token_agrees: bool
    dropped_mass: float


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What the first rank reports of one step. Results arrive in the order of their plans.

    `sampled_ids` and `logprobs` are in the order of the plan's sampling rows (`sample[b] == 1`, in order of b).
    `prompt_logprobs[b]` has the log-probabilities of the prompt tokens after positions `[logits_from[b], ...)`, for sequences
    that request them. `hidden_sums[b]` has the hidden states of these positions, added up, for sequences that ask for an embedding,
    and a classifier's logits for those that ask for a score.

    `attention_mass[b]` has one number per block of the row's table, sink blocks first, gaps left out: the attention of the
    row's queries on the block's keys, summed over the queries and averaged over layers and query heads. Each query's attention adds
    up to 1, so the numbers add up to `count[b]`.

    `loaded` has the tickets of loads that are done on every rank and were not reported before; `load_s` has the seconds that each
    took on the slowest rank, without waiting for other loads. `failed` has the tickets of loads from the disk for which a rank had
    no file or a broken one: the contents of their targets are unknown.
    """

    step_id: int
    version: int = STEP_VERSION
    sampled_ids: list[int] = field(default_factory=list)  # [S]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # [S], or empty if no sequence requests them
    prompt_logprobs: dict[int, LogprobTable] = field(default_factory=dict)  # by batch row
    hidden_sums: dict[int, list[float]] = field(default_factory=dict)  # by batch row with `pooling`
    attention_mass: dict[int, list[float]] = field(default_factory=dict)  # by batch row with `wants_mass`
    quality: dict[int, PolicyQuality] = field(default_factory=dict)  # by batch row with `measure`
    loaded: list[int] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)  # as many as `loaded`
    failed: list[int] = field(default_factory=list)
    timings: StepTimings = field(default_factory=StepTimings)
