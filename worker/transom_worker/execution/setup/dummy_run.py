"""Runs forward passes over made-up sequences, to warm a model up and to measure the peak memory of the largest step.

A dummy run reads and writes no block of a real sequence: its sequences read block 0, and write only to the dump block, the block of
each group that no sequence owns.
"""

from collections.abc import Sequence

import torch

from transom_core.contract import MAX_LOGPROBS, HeavyPolicy, KvPolicy, SamplingParams, WindowPolicy
from transom_core.kv_cache.groups import GroupSpec
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.device_queue import HostQueue
from transom_worker.execution.forward_pass import ForwardPass
from transom_worker.execution.step_sampling import sample_step
from transom_worker.models.model import Model
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import NO_ADAPTER, NO_ID, WHOLE_TABLE, NewSequence, StepPlan, StepResult

# Asks for everything that takes memory in proportion to a row's logits, its tokens or its log-probabilities.
WORST_CASE_SAMPLING = SamplingParams(
    temperature=1.0,
    top_k=2**30,
    top_p=0.999999,
    min_p=1e-9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
)
WARM_UP_TOKENS = 16
# Prompt lengths to compile for: the tiles of experts' kernels, and torch's choice of matrix products, depend on the number of rows.
COMPILED_TOKENS = (64, 256, 1024, 4096)
LONG_CONTEXT_TOKENS = 2100  # long enough that attention splits one token's keys into several work items
# The first only masks keys, the second also wants attention mass; kernels distinguish nothing else.
WARM_UP_POLICIES: tuple[KvPolicy, ...] = (WindowPolicy(sinks=4, window=2**20), HeavyPolicy(sinks=4, budget=2**20))


def warm_up(
    model: Model,
    builder: BatchBuilder,
    *,
    max_tokens: int,
    max_model_len: int,
    compiles: bool,
    compiles_by_rows: bool,
    takes_policies: bool,
) -> torch.Tensor:
    """Run a few steps, so that operators choose and cache their algorithms for prompts and for decoding; return logits [1, V].

    Where kernels are compiled on their first launch (`compiles`), every kind of step runs, so that no request waits for a
    compiler: with `compiles_by_rows` prompts of several lengths, with `takes_policies` rows with KV policies, and rows with LoRA
    adapters if the model takes any.
    """
    steps = prompt_steps(
        max_tokens=max_tokens, max_model_len=max_model_len, compiles=compiles, compiles_by_rows=compiles_by_rows
    )
    for adapter_slot in (NO_ADAPTER, 0) if builder.takes_adapters else (NO_ADAPTER,):
        for start, count in steps:
            dummy_run(model, builder, [count], start=start, adapter_slot=adapter_slot)
    if compiles and takes_policies:
        for policy in WARM_UP_POLICIES:
            for start, count in (steps[0], steps[-1]):
                _dummy_policy_run(model, builder, policy, count, start=start)
    return dummy_run(model, builder, [1])


def prompt_steps(
    *, max_tokens: int, max_model_len: int, compiles: bool, compiles_by_rows: bool
) -> list[tuple[int, int]]:
    """Return the steps of a warm-up, each as (tokens before the new ones, new tokens), except the last one, which decodes."""
    steps = [(0, min(WARM_UP_TOKENS, max_tokens, max_model_len))]
    if compiles_by_rows:
        steps += [(0, count) for count in COMPILED_TOKENS if count <= min(max_tokens, max_model_len)]
    if compiles:
        # Layers with latent rows compute the first absorbed, and prompts without a context expanded.
        counts = (WARM_UP_TOKENS, 3, 1)
        context = min(LONG_CONTEXT_TOKENS, max_model_len - max(counts))
        steps += [(context, count) for count in counts if context > 0 and count <= max_tokens]
    return steps


def dummy_run(
    model: Model, builder: BatchBuilder, counts: Sequence[int], *, start: int = 0, adapter_slot: int = NO_ADAPTER
) -> torch.Tensor:
    """Run one forward pass over sequences of `counts` new tokens each, all with one adapter slot; return their logits, [B, V].

    The first sequence has `start` tokens before its new ones, the others have none. All read block 0 and write to the dump
    block.
    """
    plan, store = _dummy_step(builder, counts, start, SamplingParams(temperature=0.0), adapter_slot=adapter_slot)
    with torch.inference_mode():
        logits_BV = model.forward(builder.build(plan, store))
        logits_BV.max(-1).indices.tolist()
    return logits_BV


def _dummy_policy_run(model: Model, builder: BatchBuilder, policy: KvPolicy, count: int, *, start: int) -> None:
    """Run one forward pass over a sequence with a KV policy that has dropped nothing yet."""
    plan, store = _dummy_step(builder, [count], start, SamplingParams(temperature=0.0), policy)
    plan.row_window, plan.row_sinks, plan.measure = [WHOLE_TABLE], [policy.sinks], [0]
    plan.wants_mass = [int(policy.depends_on_history)]
    with torch.inference_mode():
        ForwardPass(model, builder).prepare(plan, store)()


def worst_case_step(
    model: Model, builder: BatchBuilder, counts: Sequence[int], sampler: ShardedSampler, *, start: int
) -> StepResult:
    """Run one whole step over sequences like those of `dummy_run`, each of which asks for everything that takes memory: filters,
    penalties, and log-probabilities of every position of prompt and output."""
    adapter_slot = 0 if builder.takes_adapters else NO_ADAPTER
    plan, store = _dummy_step(builder, counts, start, WORST_CASE_SAMPLING, adapter_slot=adapter_slot)
    plan.logits_from = list(plan.start)
    for seq_id, (first, count) in enumerate(zip(plan.start, counts, strict=True)):
        tokens = [position % model.architecture.vocab_size for position in range(first + count)]
        sampler.add(seq_id, token_ids=tokens, num_prompt_tokens=len(tokens), params=WORST_CASE_SAMPLING, seed=seq_id)
    result = StepResult(step_id=plan.step_id)
    with torch.inference_mode():
        logits = ForwardPass(model, builder).prepare(plan, store)()
        sample_step(plan, logits, result, sampler=sampler, store=store, queue=HostQueue())
    return result


def _dummy_step(
    builder: BatchBuilder,
    counts: Sequence[int],
    start: int,
    params: SamplingParams,
    policy: KvPolicy | None = None,
    *,
    adapter_slot: int = NO_ADAPTER,
) -> tuple[StepPlan, SequenceStore]:
    """Return the plan and the sequences of a dummy run in which every sequence samples a token."""
    groups = [group.spec for group in builder.layout.groups]
    store = SequenceStore(groups, max_num_seqs=len(counts))
    starts = [start] + [0] * (len(counts) - 1)
    ends = [first + count for first, count in zip(starts, counts, strict=True)]
    for seq_id, end in enumerate(ends):
        blank = NewSequence(
            seq_id=seq_id,
            request_id="",
            token_ids=(0,) * end,
            num_prompt_tokens=end,
            params=params,
            seed=0,
            kv_policy=policy,
            adapter_slot=adapter_slot,
        )
        store.add(blank)
        for group, tables in enumerate(store.tables):
            blocks, compact = [0] * -(-end // tables.block_size), store[seq_id].compact
            if compact is not None:
                compact[group].apply(dropped=0, first_block=0, blocks=blocks)
            else:
                tables.apply(store[seq_id].row, dropped=0, first_block=0, blocks=blocks)
    plan = StepPlan(
        step_id=0,
        seq_ids=list(range(len(counts))),
        start=starts,
        count=list(counts),
        attend_from=[[NO_ID if spec.is_state else 0] * len(counts) for spec in groups],
        # All tokens are below, so they are written to the dump block; states are not kept.
        write_from=[[NO_ID] * len(counts) if spec.is_state else list(ends) for spec in groups],
        logits_from=[end - 1 for end in ends],
        sample=[1] * len(counts),
    )
    return plan, store


def worst_case_counts(*, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Return the new tokens of each sequence in the step that needs the most memory: it has as many sequences as possible, and the
    first ones have long prompts.

    For example, 8 sequences and 100 batched tokens with a long context limit: [93, 1, 1, 1, 1, 1, 1, 1].
    """
    counts = [1] * min(max_num_seqs, max_num_batched_tokens)
    remaining = max_num_batched_tokens - len(counts)
    for index in range(len(counts)):
        more = min(remaining, max_model_len - 1)
        counts[index] += more
        remaining -= more
    return counts


def worst_case_start(groups: Sequence[GroupSpec], count: int, max_model_len: int) -> int:
    """Return how many tokens precede the `count` new tokens of the longest sequence in the step that needs the most memory.

    Compressed layers need memory that grows with the whole sequence (the indexer's scores, and the lists of entries that queries
    read), so with them the longest sequence fills the context. Other layers do not, so without them the prompt starts at 0.
    """
    return max(0, max_model_len - count) if any(group.ratio for group in groups) else 0
