"""Metrics of parsed answers: their tool calls, their reasoning, and those in which markup became text."""

from __future__ import annotations

from collections.abc import Iterable

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.telemetry.metric_families import RouterFamilies

NO_PARSER = "none"


class AnswerMetrics:
    """Counts what the readers of one router's answers found."""

    def __init__(self, families: RouterFamilies, tool_parser: str | None) -> None:
        """`tool_parser` is the name of the parser of the model's tool calls; None: its answers have none."""
        self._parser = tool_parser or NO_PARSER
        self._calls = families.counter(
            "transom_router_tool_calls",
            "Tool calls in answers, by the parser that read them and by outcome: parsed, malformed (the model wrote what its "
            "markup does not allow) or incomplete (the answer ended inside the call).",
            "parser",
            "outcome",
        )
        self._degraded = families.counter(
            "transom_router_degraded_answers",
            "Answers with markup that could not be read, so that clients got it as text, by parser.",
            "parser",
        )
        for outcome in ("parsed", "malformed", "incomplete"):
            self._calls.of(self._parser, outcome)
        self._degraded.of(self._parser)
        self._reasoning_tokens = families.counter(
            "transom_router_reasoning_tokens",
            "Output tokens that were reasoning, as in `usage`; counted when an answer ends.",
        ).of()

    def answered(self, readers: Iterable[AnswerReader]) -> None:
        """A response has ended, or its client has left; these read its choices."""
        for reader in readers:
            tally = reader.tally
            for outcome, count in (
                ("parsed", tally.num_parsed),
                ("malformed", tally.num_malformed),
                ("incomplete", tally.num_incomplete),
            ):
                if count:
                    self._calls.of(self._parser, outcome).inc(count)
            if tally.has_degraded:
                self._degraded.of(self._parser).inc()
            self._reasoning_tokens.inc(reader.num_reasoning_tokens)
