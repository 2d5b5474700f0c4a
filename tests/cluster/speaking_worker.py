"""Workers that speak given texts, with a real worker's text, stops and output events, and die where the test says."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.cluster.stub_worker import StubWorker, logprobs_of
from transom_cluster.router.output_stream import joined
from transom_core.contract import OutputEvent, Request, WorkerInfo
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.running_request import RunningRequest
from transom_worker.scheduling.outputs import SequenceOutput

MAX_MODEL_LEN = 4096


@dataclass
class Fate:
    """When workers die, one after the other: each of `deaths` is a number of tokens that all of them bring before it."""

    deaths: list[int] = field(default_factory=list)
    num_deaths: int = 0
    _num_tokens: int = 0

    def strikes(self) -> bool:
        """Whether the worker that is about to bring a token dies instead."""
        if self.deaths and self._num_tokens == self.deaths[0]:
            self.deaths.pop(0)
            self._num_tokens = 0
            self.num_deaths += 1
            return True
        self._num_tokens += 1
        return False


@dataclass
class SpeakingWorker(StubWorker):
    """Says `texts[choice]` to every request, with an end of text where it has none; `per_event` tokens come in one event.

    With `max_events` it falls silent after that number of tokens, until `go`.
    """

    tokenizer: Tokenizer | None = None
    texts: Sequence[str] = ()
    per_event: int = 1
    fate: Fate = field(default_factory=Fate)

    async def info(self) -> WorkerInfo:
        assert self.tokenizer is not None
        return replace(await super().info(), max_model_len=MAX_MODEL_LEN, vocab_size=self.tokenizer.vocab_size)

    async def _run(self, request: Request) -> None:
        assert self.tokenizer is not None
        running = RunningRequest(
            request,
            self.tokenizer,
            eos_token_ids=frozenset(self.tokenizer.eos_token_ids),
            max_model_len=MAX_MODEL_LEN,
            arrival_s=0.0,
        )
        waiting: list[OutputEvent] = []
        text = self.texts[request.choice_index]
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not token_ids or token_ids[-1] not in self.tokenizer.eos_token_ids:
            token_ids.append(self.tokenizer.eos_token_ids[0])
        begin = len(request.resumed_output_ids)
        for position in range(begin, len(token_ids)):
            if running.finish_reason is not None:
                break
            if self.max_events is not None and position - begin == self.max_events:
                self.num_silent += 1
                await self._go.wait()
            if self.fate.strikes():
                self.kill("killed")
                return
            waiting.append(running.token_event(_sampled(request, token_ids[position], position, begin)))
            if len(waiting) == self.per_event or running.finish_reason is not None:
                self.push(joined(waiting))
                waiting.clear()
                await asyncio.sleep(0)


def _sampled(request: Request, token_id: int, position: int, begin: int) -> SequenceOutput:
    return SequenceOutput(
        request.request_id,
        token_id,
        position,
        num_cached_tokens=0,
        index_version=0,
        logprobs=None if (num_top := request.params.logprobs) is None else logprobs_of(token_id, num_top),
        is_first=position == begin,
        at_limit=False,
    )
