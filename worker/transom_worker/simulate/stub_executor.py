"""`StubExecutor`: an executor without a model. If a step samples a token, it returns the next token of the request's known answer.

A *row* is one sequence's part of a step's plan (`scheduling.step.StepPlan`).
"""

from __future__ import annotations

from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.simulate.workload import Run


class StubExecutor:
    """Knows each request's answer, and follows the plans' new and finished sequences, as a rank does."""

    def __init__(self) -> None:
        self._answers: dict[str, Run] = {}
        # seq_id -> offset: an answer's ids are consecutive, so its token at a position of the sequence has id offset + position.
        self._id_offset: dict[int, int] = {}

    def expect(self, request_id: str, answer: Run) -> None:
        """Set a request's answer."""
        self._answers[request_id] = answer

    def forget(self, request_id: str) -> None:
        """Remove the answer of a request that has ended."""
        del self._answers[request_id]

    def answer(self, plan: StepPlan) -> StepResult:
        """Return a result with one token per sampling row, which reports the plan's loads from the host tier as complete."""
        id_offset = self._id_offset
        for seq_id in plan.finished:
            id_offset.pop(seq_id, None)
        for new in plan.new_sequences:
            id_offset[new.seq_id] = self._answers[new.request_id].first_token - new.num_prompt_tokens
        rows = zip(plan.seq_ids, plan.start, plan.count, plan.sample, strict=True)
        sampled = [id_offset[seq_id] + start + count for seq_id, start, count, samples in rows if samples]
        loaded = sorted({ticket for ticket in plan.copy_ticket if ticket > 0})
        return StepResult(step_id=plan.step_id, sampled_ids=sampled, loaded=loaded, load_s=[0.0] * len(loaded))
