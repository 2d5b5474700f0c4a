"""Measures tasks whose answers depend on text far back, which a model with a window can no longer read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transom_core.contract import KvPolicy
from transom_worker.bench.policies.policy_runs import make_request, run_together
from transom_worker.bench.policies.scenarios import policy_of_budget
from transom_worker.bench.policies.texts import recall_tasks
from transom_worker.engine.engine import Engine


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


RECALL_BUDGETS = (128, 256)
# Tokens between an answer and what it depends on: more than both budgets. The repeated list is 3/4 of that, 216, which exceeds only
# the smaller budget.
RECALL_DISTANCE = 288


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
            run = run_together(engine, [make_request(task.token_ids, policy, max_tokens=1, prompt_logprobs=1)])
            table = run.prompt_logprobs[0]
            assert table is not None
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
