"""`ReasoningMarkup`: how a family of models marks the reasoning that comes before its message.

Some chat templates open the reasoning at the end of the prompt, so that an answer begins inside it. Some also close it there, to
switch reasoning off. The parser sees both in the last characters of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import SPACE


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """The markers around the reasoning.

    - `prompt_starts`: other texts with which a prompt opens the reasoning.
    - `is_assumed`: an answer begins inside the reasoning even if the prompt has not opened it, unless the prompt has closed it.
    - `is_paired`: a reasoning that `starts[i]` opens is closed only by `ends[i]`; otherwise by any of `ends`.
    - `inner_tokens`: parts of markers that may be special tokens.
    - `around_message`: markers before and after the message, which its text does not show.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    prompt_starts: tuple[str, ...] = ()
    is_assumed: bool = False
    is_paired: bool = False
    inner_tokens: tuple[str, ...] = ()
    around_message: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the texts that may be special tokens."""
        return self.starts + self.ends + self.inner_tokens + self.around_message

    def is_open(self, prompt_end: str) -> bool:
        """Return whether an answer to this prompt begins inside the reasoning."""
        prompt_end = prompt_end.rstrip(SPACE)
        return prompt_end.endswith(self.starts + self.prompt_starts) or (
            self.is_assumed and not prompt_end.endswith(self.ends)
        )

    def is_closed(self, prompt_end: str) -> bool:
        """Return whether the prompt has closed the reasoning already, so that an answer has none."""
        return prompt_end.rstrip(SPACE).endswith(self.ends)

    def start_in(self, prompt_end: str) -> str:
        """Return the marker with which the prompt has opened the reasoning; the first of `starts` if it has not."""
        prompt_end = prompt_end.rstrip(SPACE)
        return next((start for start in self.starts if prompt_end.endswith(start)), self.starts[0])

    def ends_of(self, start: str) -> tuple[str, ...]:
        """Return the markers that end a reasoning which `start` has opened."""
        return (self.ends[self.starts.index(start)],) if self.is_paired else self.ends

    def rule(self, lark: LarkText, prompt_end: str, *, without: Sequence[str]) -> str:
        """Return a grammar's expression for the reasoning at an answer's beginning: free text up to its end marker.

        The texts `without` do not occur in it. The expression is "" if the prompt has closed the reasoning.
        """
        if self.is_closed(prompt_end):
            return ""
        start = self.start_in(prompt_end) if self.is_open(prompt_end) else self._usual_start(lark)
        end, *others = self.ends_of(start)
        rest = f"{lark.text_until(end, without=(*without, *others))} {lark.terminal('space', _SPACE_AFTER)}"
        if self.is_open(prompt_end):
            return rest
        return lark.rule("reasoning", f"{lark.marker(start)} {rest}") + "?"

    def message_opening(self, lark: LarkText) -> str:
        """Return a grammar's expression for the marker that may come before a message; "" if the vocabulary has none."""
        return next((f"{lark.marker(text)}?" for text in self.around_message if lark.has_marker(text)), "")

    def _usual_start(self, lark: LarkText) -> str:
        """Return the start that the model writes: the first one, or, if starts and ends are paired, the one that is a token."""
        if not self.is_paired:
            return self.starts[0]
        return next((start for start in self.starts if lark.has_marker(start)), self.starts[-1])


_SPACE_AFTER = r"/[ \t\n]{0,4}/"  # bounded, so that a constrained model cannot write spaces for ever

THINK = ReasoningMarkup(starts=("<think>",), ends=("</think>",))
ASSUMED_THINK = ReasoningMarkup(starts=("<think>",), ends=("</think>",), is_assumed=True)
MISTRAL = ReasoningMarkup(starts=("[THINK]", "<think>"), ends=("[/THINK]", "</think>"), is_paired=True)
# With a thinking budget of 0 the template of Seed-OSS writes both.
SEED_OSS = ReasoningMarkup(
    starts=("<seed:think>",), ends=("</seed:think>",), prompt_starts=("<seed:cot_budget_reflect>",)
)
GEMMA4 = ReasoningMarkup(starts=("<|channel>thought",), ends=("<channel|>",), inner_tokens=("<|channel>",))
GRANITE = ReasoningMarkup(
    starts=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
)
COHERE = ReasoningMarkup(
    starts=("<|START_THINKING|>",), ends=("<|END_THINKING|>", "<|START_RESPONSE|>", "<|START_TEXT|>"),
    around_message=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)  # fmt: skip
