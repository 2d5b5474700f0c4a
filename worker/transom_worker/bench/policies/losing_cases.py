"""Tasks whose answers follow from text far back: what a window has dropped, it cannot know."""

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
    """How well a policy knows an answer: the geometric mean of its tokens' probabilities, and the share of greedy tokens."""

    task: str
    policy: str
    distance: int
    probability: float
    greedy: float


RECALL_BUDGETS = (128, 256)
RECALL_DISTANCE = 288  # tokens: beyond the largest window; the list that is repeated is beyond the smaller one alone


def recall(
    engine: Engine, *, num_filler: int = RECALL_DISTANCE, budgets: tuple[int, ...] = RECALL_BUDGETS
) -> list[Recall]:
    """Return all tasks under full attention and under each policy of each budget."""
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
