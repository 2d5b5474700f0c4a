"""Writes responses of /v1/chat/completions: `chat.completion` as a whole, `chat.completion.chunk` in a stream.

    stream:  chunks(index, event) for each event, then stream_end()
    whole:   add(index, event) for each event, then body()

If an answer can only be text, the text goes from the engine's event to the client unchanged. If the answer may have reasoning or
tool calls, an `AnswerReader` parses it, and the parts of the answer become deltas (`chat_deltas`) or a message (`ChatMessage`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_message import ChatMessage, call_id, chat_deltas
from transom_cluster.openai.answer.json_pieces import LazyList, batches
from transom_cluster.openai.answer.response_types import AssistantMessage, ChatChoice, ChatLogprobs, ChosenToken
from transom_cluster.openai.answer.shown_logprobs import chat_logprobs, prompt_logprobs
from transom_cluster.openai.answer.writers import ChoiceOutput, ChunkWriter, ResponseMetadata, final_finish_reason
from transom_cluster.openai.request.sampling_fields import UsageChunks
from transom_core.contract import LogprobTable, OutputEvent, Request, TokenLogprobs
from transom_core.text.tokenizer import Tokenizer


class ChatWriter(ChunkWriter):
    """Writes chat completions. With `num_top_logprobs` None the response has no log-probabilities. `answers` has one reader per
    choice, or is empty if the choices need no parsing."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    text_field = ('"delta":{"content":', "}")

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        include_usage: UsageChunks = "none",
        num_top_logprobs: int | None = None,
        answers: Sequence[AnswerReader] = (),
    ) -> None:
        super().__init__(metadata, requests, include_usage=include_usage, readers=answers)
        self._answers = answers
        self._messages = [ChatMessage() for _ in answers]
        self._num_prompt_logprobs = requests[0].params.prompt_logprobs or 0
        self._prompt_logprobs: LogprobTable | None = None
        self._tokenizer = tokenizer
        self._num_top_logprobs = num_top_logprobs

    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield the role first, then text, then the finish reason in a chunk of its own, as OpenAI's streams do."""
        self._take_usage()
        if not self._has_started[index]:
            yield self._role_chunk(index)
        if self._answers:
            yield from self._answer_chunks(index, event)
            return
        if self._num_top_logprobs is not None and event.logprobs:
            yield from self._logprobs_chunks(index, event.text, event.logprobs)
        elif event.text:
            yield self._text_openings[index] + json.dumps(event.text) + self._text_closing
        if event.finish_reason is not None:
            yield self._finish_chunk(index, event.finish_reason)

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep one event of choice `index` for `body`; a parsed answer's text is kept as its parts."""
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if self._answers:
            self._messages[index].add(self._answers[index].read(event))
            event = event._replace(text="")
        super().add(index, event)

    def body(self) -> dict[str, Any]:
        """Return a `chat.completion` object."""
        body = super().body()
        if (table := self._prompt_logprobs) is not None:
            body["prompt_logprobs"] = LazyList(
                lambda: prompt_logprobs(table, self._num_prompt_logprobs, self._tokenizer)
            )
        return body

    def _role_chunk(self, index: int) -> str:
        """Return the first chunk. A parsed answer may have tool calls and no content, so its content begins as null."""
        self._has_started[index] = True
        content = "null" if self._answers else '""'
        return self._chunk(index, f'{{"role":"assistant","content":{content},"refusal":null}}')

    def _finish_chunk(self, index: int, reason: str) -> str:
        return self._chunk(index, "{}", reason=f'"{reason}"')

    def _chunk(self, index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        choice = f'{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}'
        return self._opening + choice + self._closing

    def _answer_chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield one chunk for each part of a parsed answer. The log-probabilities go with the first chunks, or in chunks of their
        own if there are no parts."""
        answer = self._answers[index]
        deltas = chat_deltas(answer.read(event), lambda call: self._call_id(index, call))
        logprobs: Iterator[str] = iter(())
        if self._num_top_logprobs is not None:
            logprobs = map(_chat_logprobs, batches(self._entries(answer.shown_logprobs(event))))
        for delta, entries in zip_longest(deltas, logprobs):
            yield self._chunk(index, delta or "{}", entries or "null")
        if event.finish_reason is not None:
            yield self._finish_chunk(index, answer.finish_reason(final_finish_reason(event.finish_reason)))

    def _call_id(self, index: int, call: int) -> str:
        return call_id(self.metadata.id, index, call)

    def _logprobs_chunks(self, index: int, text: str, positions: Sequence[TokenLogprobs]) -> Iterator[str]:
        """Yield one chunk for the event, or several if a slow client gets many tokens at once; the first chunk has the text."""
        for batch in batches(self._entries(positions)):
            yield self._chunk(index, f'{{"content":{json.dumps(text)}}}', _chat_logprobs(batch))
            text = ""

    def _choice(self, index: int, output: ChoiceOutput) -> ChatChoice:
        reason = final_finish_reason(output.finish_reason)
        if not self._answers:
            message: AssistantMessage = {"role": "assistant", "content": output.text, "refusal": None}
            return {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": reason,
            }
        answer = self._answers[index]
        return {
            "index": index,
            "message": self._messages[index].body(lambda call: self._call_id(index, call)),
            "logprobs": self._logprobs(output.logprobs, answer.all_shown),
            "finish_reason": answer.finish_reason(reason),
        }

    def _logprobs(
        self, positions: LogprobTable, shown: Callable[[Iterable[TokenLogprobs]], Iterable[TokenLogprobs]] = iter
    ) -> ChatLogprobs | None:
        """Return the log-probabilities of a whole choice; `shown` leaves out those that the client does not get."""
        if self._num_top_logprobs is None:
            return None
        return {"content": LazyList(lambda: self._entries(shown(positions))), "refusal": None}

    def _entries(self, positions: Iterable[TokenLogprobs]) -> Iterator[ChosenToken]:
        return chat_logprobs(positions, self._num_top_logprobs or 0, self._tokenizer)


def _chat_logprobs(entries: list[ChosenToken]) -> str:
    """Return the JSON of the field `logprobs` of one chunk."""
    logprobs: ChatLogprobs = {"content": entries, "refusal": None}
    return json.dumps(logprobs)
