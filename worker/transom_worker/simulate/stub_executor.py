"""An executor without a model: every sampling row answers with the token that its request is to say."""

from __future__ import annotations

from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.simulate.workload import Run


class StubExecutor:
    """Knows each request's answer beforehand; tracks sequences as a rank would."""

    def __init__(self) -> None:
        self._answers: dict[str, Run] = {}
        self._origin: dict[int, int] = {}  # seq_id -> token id that position 0 would have, if the answer began there

    def expect(self, request_id: str, answer: Run) -> None:
        """What a request will be answered; until it is `forget`ten."""
        self._answers[request_id] = answer

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        del self._answers[request_id]

    def answer(self, plan: StepPlan) -> StepResult:
        """One token per sampling row."""
        origin = self._origin
        for seq_id in plan.finished:
            origin.pop(seq_id, None)
        for new in plan.new_sequences:
            origin[new.seq_id] = self._answers[new.request_id].first_token - new.num_prompt_tokens
        rows = zip(plan.seq_ids, plan.start, plan.count, plan.sample, strict=True)
        sampled = [origin[seq_id] + start + count for seq_id, start, count, samples in rows if samples]
        return StepResult(step_id=plan.step_id, sampled_ids=sampled)
