"""An answer as a script: each token has a text and the parts that a parser makes of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transom_cluster.openai.answer.answer_reader import NO_TOKEN_ID
from transom_core.contract import FinishReason, Logprob, OutputEvent, Request, SamplingParams, TokenLogprobs, Usage
from transom_core.text.markup.parts import AnswerPart, AnswerState


@dataclass(frozen=True)
class Step:
    """One token: its text in the answer, what it completes, and what the answer is in after it."""

    text: str
    parts: tuple[AnswerPart, ...] = ()
    state: AnswerState = "message"


class ScriptedTokenizer:
    """Token i has the text of the i-th step; none is special."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.whole_texts: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def token_bytes(self, token_id: int) -> bytes:
        return self._steps[token_id].text.encode()

    def is_special(self, token_id: int) -> bool:
        return False


@dataclass
class ScriptedParser:
    """Finds the parts that the script says; `at_end` are those that it has held back."""

    steps: Sequence[Step]
    at_end: tuple[AnswerPart, ...] = ()
    state: AnswerState = "message"
    texts: list[str] = field(default_factory=list)

    def push(self, token_id: int, text: str) -> list[AnswerPart]:
        self.texts.append(text)
        if token_id == NO_TOKEN_ID:
            return []
        self.state = self.steps[token_id].state
        return list(self.steps[token_id].parts)

    def flush(self) -> list[AnswerPart]:
        return list(self.at_end)


def request_of(choice: int = 0, *, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> Request:
    return Request(
        request_id=f"r-0-{choice}",
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        choice_index=choice,
    )


def events_of(
    steps: Sequence[Step], *, per_event: int = 1, reason: FinishReason = "stop", logprobs: bool = False
) -> Iterable[OutputEvent]:
    """The whole script as output events of `per_event` tokens."""
    for begin in range(0, len(steps), per_event):
        ids = range(begin, min(begin + per_event, len(steps)))
        is_last = ids.stop == len(steps)
        yield OutputEvent(
            request_id="r-0-0",
            position=begin,
            token_ids=tuple(ids),
            text="".join(steps[i].text for i in ids),
            logprobs=tuple(TokenLogprobs(one := Logprob(i, -0.5, 1), (one,)) for i in ids) if logprobs else None,
            finish_reason=reason if is_last else None,
            usage=Usage(num_prompt_tokens=3, num_output_tokens=ids.stop, num_cached_tokens=0) if is_last else None,
        )
