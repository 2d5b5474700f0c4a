"""Runs the measurements of `transom bench policies` on given engines.

`memory_and_throughput` runs the same requests with enough KV memory (scenario 1) and in a tight budget (scenario 2: preemptions,
scenario 4: how many requests run at once). `quality_by_window` measures quality by number of tokens kept (scenario 3). `recall` has
tasks whose answers depend on text so far before them that a window does not reach it. `stream` has a text several times as long as
the model's trained length.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, LogprobTable, WindowPolicy
from transom_worker.bench.policies.policy_runs import Run, make_request, run_together
from transom_worker.bench.policies.texts import long_text, recall_tasks
from transom_worker.engine.engine import Engine

# Tokens that policies keep in scenario 3: lengths of windows, and budgets of the other policies.
WINDOWS = (8, 16, 32, 64, 128, 256, 512)
BUDGETS = (64, 128, 256, 512)
NUM_LIKELY = 20  # likeliest tokens of each distribution that are compared
ADAPTIVE_THRESHOLD = 0.005  # the window grows if its far edge gets more than this share of the attention
RECALL_BUDGETS = (128, 256)
# Tokens between an answer and what it depends on: more than both budgets. The repeated list is 3/4 of that, 216, which exceeds only
# the smaller budget.
RECALL_DISTANCE = 288


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a scenario, which run together."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A policy compared with full attention over the same text.

    `agreement` is the share of positions with the same likeliest next token. `kl` is a lower bound of the mean KL divergence in
    nats, computed from the 20 likeliest tokens of both.
    """

    name: str
    kind: str  # full, window, window without sinks, adaptive, heavy
    kept_tokens: int
    agreement: float
    kl: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """How well the model knows an answer under a policy.

    `probability` is the geometric mean of the answer's token probabilities; `greedy` is the share of its tokens that are the
    likeliest ones.
    """

    task: str
    policy: str
    distance: int
    probability: float
    greedy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """A part of a stream: the perplexity of its tokens, and the CPU time of a decode step after it."""

    policy: str
    begin: int
    end: int
    perplexity: float
    decode_cpu_ms: float
    peak_kv_bytes: int


def policy_of_budget(kind: str, budget: int) -> KvPolicy:
    """Return a policy that keeps about `budget` tokens."""
    if kind == "adaptive":
        return AdaptivePolicy(sinks=4, min_window=max(32, budget // 4), max_window=budget, threshold=ADAPTIVE_THRESHOLD)
    if kind == "heavy":
        return HeavyPolicy(sinks=4, budget=budget)
    return WindowPolicy(sinks=4 if kind == "window" else 0, window=budget)


def memory_and_throughput(engine: Engine, load: Load, window: int) -> dict[str, Run]:
    """Run scenarios 1, 2 and 4: the same requests with full attention and with a window of `window` tokens."""
    texts = [
        long_text(engine.tokenizer, load.prompt_tokens, skip_topics=3 + 2 * number)
        for number in range(load.num_requests)
    ]
    found = {}
    for name, policy in (("full", None), (f"window {window}", WindowPolicy(sinks=4, window=window))):
        requests = [make_request(text, policy, max_tokens=load.output_tokens) for text in texts]
        found[name] = run_together(engine, requests)
    return found


def quality_by_window(engine: Engine, *, num_tokens: int, judged_from: int) -> list[Quality]:
    """Run scenario 3: every policy reads the same text, and positions from `judged_from` on are compared with full attention."""
    text = long_text(engine.tokenizer, num_tokens, skip_topics=1)
    full = _prompt_logprobs(engine, text, None)
    rows = [_quality("full", "full", num_tokens, full, full, judged_from)]
    for kind in ("window", "window without sinks", "adaptive", "heavy"):
        for budget in WINDOWS if kind.startswith("window") else BUDGETS:
            table = _prompt_logprobs(engine, text, policy_of_budget(kind, budget))
            rows.append(_quality(f"{kind} {budget}", kind, budget, full, table, judged_from))
    return rows


def recall(
    engine: Engine, *, num_filler: int = RECALL_DISTANCE, budgets: tuple[int, ...] = RECALL_BUDGETS
) -> list[Recall]:
    """Return the results of all tasks under full attention and under each policy with each budget."""
    policies: dict[str, KvPolicy | None] = {"full": None}
    for budget in budgets:
        policies |= {f"{kind} {budget}": policy_of_budget(kind, budget) for kind in ("window", "adaptive", "heavy")}
    rows = []
    for task in recall_tasks(engine.tokenizer, num_filler=num_filler):
        for name, policy in policies.items():
            table = _prompt_logprobs(engine, task.token_ids, policy, num_likely=1)
            answer = [table[position] for position in range(len(table) - task.num_answer, len(table))]
            rows.append(
                Recall(
                    task=task.name,
                    policy=name,
                    distance=task.distance,
                    probability=math.exp(sum(entry.chosen.logprob for entry in answer) / len(answer)),
                    greedy=sum(entry.chosen.rank == 1 for entry in answer) / len(answer),
                )
            )
    return rows


def stream(engine: Engine, *, trained_len: int, times: int, window: int, num_parts: int) -> list[StreamPart]:
    """Read `times * trained_len` tokens of text with a window, with sinks and without, and decode a few tokens after each part."""
    length = times * trained_len - 32
    text = long_text(engine.tokenizer, length)
    ends = [length * (number + 1) // num_parts for number in range(num_parts)]
    rows = []
    for sinks in (4, 0):
        policy = WindowPolicy(sinks=sinks, window=window)
        name = f"window {window}, {sinks} sinks" if sinks else f"window {window} without sinks"
        table = _prompt_logprobs(engine, text, policy, num_likely=0)
        for begin, end in pairwise([0, *ends]):
            losses = [-table[position].chosen.logprob for position in range(begin, min(end, len(table)))]
            part = run_together(engine, [make_request(text[:end], policy, max_tokens=24)])
            rows.append(
                StreamPart(
                    policy=name,
                    begin=begin,
                    end=end,
                    perplexity=math.exp(sum(losses) / len(losses)),
                    decode_cpu_ms=1e3 * median(part.step_cpu_s[-16:]),
                    peak_kv_bytes=part.peak_kv_bytes,
                )
            )
    return rows


def _prompt_logprobs(
    engine: Engine, text: list[int], policy: KvPolicy | None, *, num_likely: int = NUM_LIKELY
) -> LogprobTable:
    run = run_together(engine, [make_request(text, policy, max_tokens=1, prompt_logprobs=num_likely)])
    table = run.prompt_logprobs[0]
    assert table is not None
    return table


def _quality(
    name: str, kind: str, kept_tokens: int, full: LogprobTable, table: LogprobTable, judged_from: int
) -> Quality:
    agreeing, kl, loss = 0, 0.0, 0.0
    positions = range(judged_from, len(full))
    for position in positions:
        mine, theirs = table[position], full[position]
        agreeing += mine.top[0].token_id == theirs.top[0].token_id
        kl += _bounded_kl(
            {entry.token_id: entry.logprob for entry in theirs.top},
            {entry.token_id: entry.logprob for entry in mine.top},
        )
        loss -= mine.chosen.logprob
    count = len(positions)
    return Quality(
        name=name,
        kind=kind,
        kept_tokens=kept_tokens,
        agreement=agreeing / count,
        kl=kl / count,
        perplexity=math.exp(loss / count),
    )


def _bounded_kl(q: dict[int, float], p: dict[int, float]) -> float:
    """Return a lower bound of KL(q || p) from the log-probabilities of the likeliest tokens of each.

    The result is the larger of two bounds. `merged` treats all tokens that are not listed in both as one token, which never
    increases the divergence. `capped` gives each token that only `q` lists the probability of the least likely token that `p`
    lists, because it cannot be likelier under `p`; the rest is merged.
    """
    both = q.keys() & p.keys()
    known = sum(math.exp(q[token]) * (q[token] - p[token]) for token in both)
    rest_q, rest_p = (max(1e-9, 1.0 - sum(math.exp(side[token]) for token in both)) for side in (q, p))
    merged = known + rest_q * math.log(rest_q / rest_p)
    least, missing = min(p.values()), q.keys() - p.keys()
    others = max(1e-9, rest_q - sum(math.exp(q[token]) for token in missing))
    capped = (
        known + sum(math.exp(q[token]) * (q[token] - least) for token in missing) + others * math.log(others / rest_p)
    )
    return max(0.0, merged, capped)
