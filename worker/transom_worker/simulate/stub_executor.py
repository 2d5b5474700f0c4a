"""`StubExecutor`: an executor without a model. Each sampling row yields the next token of its request's known answer."""

from __future__ import annotations

from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.simulate.workload import Run


class StubExecutor:
    """Knows each request's answer, and tracks sequences as a rank does."""

    def __init__(self) -> None:
        self._answers: dict[str, Run] = {}
        self._origin: dict[int, int] = {}  # by seq_id: `origin + position` is the id of an answer's token

    def expect(self, request_id: str, answer: Run) -> None:
        """Set a request's answer."""
        self._answers[request_id] = answer

    def forget(self, request_id: str) -> None:
        """Remove the answer of a request that has ended."""
        del self._answers[request_id]

    def answer(self, plan: StepPlan) -> StepResult:
        """Return a result with one token per sampling row."""
        origin = self._origin
        for seq_id in plan.finished:
            origin.pop(seq_id, None)
        for new in plan.new_sequences:
            origin[new.seq_id] = self._answers[new.request_id].first_token - new.num_prompt_tokens
        rows = zip(plan.seq_ids, plan.start, plan.count, plan.sample, strict=True)
        sampled = [origin[seq_id] + start + count for seq_id, start, count, samples in rows if samples]
        return StepResult(step_id=plan.step_id, sampled_ids=sampled)
