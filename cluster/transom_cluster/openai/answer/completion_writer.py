"""Writes responses of /v1/completions: `text_completion` objects, whole or as a stream of chunks; `echo` puts the prompt first."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from transom_cluster.openai.answer.json_pieces import LazyList, batches
from transom_cluster.openai.answer.response_types import TextChoice, TextLogprobs
from transom_cluster.openai.answer.shown_logprobs import CompletionLogprobs, Position, positions_of, prompt_logprobs
from transom_cluster.openai.answer.writers import ChoiceOutput, ChunkWriter, ResponseMetadata, final_finish_reason
from transom_cluster.openai.request.sampling_fields import UsageChunks
from transom_core import contract
from transom_core.contract import LogprobTable, OutputEvent, Request
from transom_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """The prompt that `echo` puts before a choice's text."""

    text: str
    token_ids: tuple[int, ...]


class CompletionWriter(ChunkWriter):
    """Writes text completions.

    `num_top_logprobs` and `num_prompt_logprobs` are the numbers of alternatives for each token in the fields `logprobs` and
    `prompt_logprobs`; with None the first is null, and the second is absent. `echoed` has one prompt per choice; None: no `echo`.
    With `echo_only` (`echo` and `max_tokens` 0) the engine computes one token, and the writer leaves it out.
    """

    kind = chunk_kind = "text_completion"
    text_field = ('"text":', "")  # the JSON before and after a chunk's text

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        include_usage: UsageChunks = "none",
        num_top_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        echoed: Sequence[EchoedPrompt] | None = None,
        echo_only: bool = False,
    ) -> None:
        super().__init__(metadata, requests, include_usage=include_usage)
        self.prompt_only = echo_only
        self._echoed = echoed
        self._tokenizer = tokenizer
        self._num_prompt_logprobs = num_prompt_logprobs
        self._logprobs = None
        if num_top_logprobs is not None:
            self._logprobs = [CompletionLogprobs(num_top_logprobs, tokenizer) for _ in requests]
        # Choice -> number of its prompt, from 1: a choice with index 0 is the first one of the next prompt.
        self._prompt_of = list(accumulate(int(request.choice_index == 0) for request in requests))
        self._prompt_logprobs: dict[int, LogprobTable] = {}  # prompt -> the log-probabilities of its tokens
        self._waiting: dict[int, list[tuple[int, OutputEvent]]] = {}  # prompt -> (choice, event) that wait for these

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep one event of choice `index` for the plain response (`body`)."""
        self._take_prompt_logprobs(index, event)
        super().add(index, event)

    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield chunks with text and finish reason. The first chunk of a choice begins with the echoed prompt.

        The prompt's log-probabilities come with an event of its first choice only. If the response echoes them, events of its other
        choices wait for that event.
        """
        self._take_usage()  # if every chunk shows the usage so far
        prompt = self._prompt_of[index]
        self._take_prompt_logprobs(index, event)
        echoes_logprobs = self._echoed is not None and self._logprobs is not None
        if echoes_logprobs and prompt not in self._prompt_logprobs:
            self._waiting.setdefault(prompt, []).append((index, event))
            return
        yield from self._chunks(index, event)
        for waiting_index, waiting_event in self._waiting.pop(prompt, ()):
            yield from self._chunks(waiting_index, waiting_event)

    def _choice(self, index: int, output: ChoiceOutput) -> TextChoice:
        logprobs: TextLogprobs | None = None  # also if the choice has no tokens
        if self._logprobs is not None and next(self._positions(index, output), None) is not None:
            logprobs = self._logprobs[index].all_tokens(lambda: self._positions(index, output))
        text = output.text if self._echoed is None else self._echoed[index].text + output.text
        choice: TextChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": final_finish_reason(output.finish_reason),
        }
        if (num_top := self._num_prompt_logprobs) is not None:
            table = self._prompt_logprobs.get(self._prompt_of[index], ())
            choice["prompt_logprobs"] = LazyList(lambda: prompt_logprobs(table, num_top, self._tokenizer))
        return choice

    def _chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield the chunks of one event: one per batch of log-probabilities, or one without them. The first chunk has the text, the
        last one the finish reason."""
        text, positions = event.text, positions_of(event.logprobs or ())
        if not self._has_started[index]:
            self._has_started[index] = True
            if self._echoed is not None:
                text = self._echoed[index].text + text
                positions = chain(self._prompt_positions(index), positions)
        batches_left = batches(positions) if self._logprobs is not None else iter(())
        batch = next(batches_left, None)
        if self._logprobs is None or batch is None:
            if text or event.finish_reason is not None:
                yield self._chunk(index, text, None, event.finish_reason)
            return
        while batch is not None:
            logprobs, batch = self._logprobs[index].next_tokens(batch), next(batches_left, None)
            yield self._chunk(index, text, logprobs, event.finish_reason if batch is None else None)
            text = ""

    def _chunk(self, index: int, text: str, logprobs: TextLogprobs | None, reason: contract.FinishReason | None) -> str:
        """Return one chunk: its text between the constant JSON that `ChunkWriter` has made for the choice."""
        if logprobs is None and reason is None:
            return self._text_openings[index] + json.dumps(text) + self._text_closing
        return (
            f'{self._text_openings[index]}{json.dumps(text)},"logprobs":{json.dumps(logprobs)},'
            f'"finish_reason":{json.dumps(reason)}{self._closing}'
        )

    def _take_prompt_logprobs(self, index: int, event: OutputEvent) -> None:
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[self._prompt_of[index]] = event.prompt_logprobs

    def _positions(self, index: int, output: ChoiceOutput) -> Iterator[Position]:
        """Return the tokens of a whole choice: those of the echoed prompt, then those of the output."""
        prompt = self._prompt_positions(index) if self._echoed is not None else ()
        return chain(prompt, positions_of(output.logprobs))

    def _prompt_positions(self, index: int) -> Iterator[Position]:
        """Yield the tokens of the choice's echoed prompt. The first has no log-probabilities, because no token comes before it."""
        assert self._echoed is not None
        table = self._prompt_logprobs.get(self._prompt_of[index])
        if table is not None:
            yield self._echoed[index].token_ids[0], None
            yield from positions_of(table)
