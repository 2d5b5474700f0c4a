"""A worker without a model: continues a prompt with the letters a, b, c, ... one per step, when the test lets it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from transom_core.config import WorkerRole
from transom_core.contract import (
    Adapter,
    ErrorInfo,
    KvGroupInfo,
    Logprob,
    LogprobTable,
    OutputEvent,
    Request,
    TokenLogprobs,
    Usage,
    WorkerInfo,
    WorkerLoad,
    WorkerMessage,
)
from transom_core.contract.kv_events import CacheShape, KvUpdate
from transom_core.errors import LossCause, Overloaded, WorkerLost
from transom_core.fair_cache import FairCache
from transom_core.grammar.checker import Verdict
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.text.chat_template import Prompt

EOS = 256
EMBEDDING = (3.0, 4.0, 12.0)
VOCAB_SIZE = 260
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # a stub worker's whole answer
MAX_MODEL_LEN = 512
METRICS = '# HELP transom_requests_running R.\n# TYPE transom_requests_running gauge\ntransom_requests_running{worker="0"} 1.0\n'
CACHE_SHAPE = CacheShape(
    groups=(GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=4),),
    block_size=4,
    window_repair=True,
    enable_prefix_caching=True,
)


class ByteTokenizer:
    """One token a byte."""

    digest = ""
    has_chat_template = True
    chat_template = "{{ messages }}"
    template_knows_tools = False
    model_type = "stub"
    vocab_size = VOCAB_SIZE
    whole_texts: ClassVar[dict[bool, dict[int, str]]] = {False: {}, True: {}}
    eos_token_ids: tuple[int, ...] = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True, check_length: Any = None) -> list[int]:
        ids = list(text.encode())
        if check_length is not None:
            check_length(len(ids))
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def marker_id(self, text: str) -> int | None:
        return None

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: Any = None,
        extra: Any = None,
        check_length: Any = None,
    ) -> Prompt:
        turns = [f"{message['role']}:{message['content']};" for message in messages]
        ends = [len("".join(turns[: i + 1]).encode()) for i in range(len(turns))]
        text = "".join(turns) + ("assistant:" if add_generation_prompt else "")
        token_ids = self.encode(text, check_length=check_length)
        return Prompt(text=text, token_ids=tuple(token_ids), turn_boundaries=tuple(ends))


class AnyGrammar:
    """Knows that nothing is wrong with any grammar. It has no `check`, which may wait for a child process."""

    kept: FairCache[bytes, str] = FairCache(1 << 20)

    def known(self, grammar: str) -> Verdict:
        return Verdict("", 1 << 20)

    def close(self) -> None:
        pass


@dataclass
class StubWorker:
    """Plays the worker's side of `WorkerClient`.

    `die` breaks the stream, which can be opened again; `kill` ends the worker for good. A request whose prompt has the byte
    `poison` kills it, with the cause `poison_cause`, when it would bring its output `poison_at`.
    """

    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    admission_error: ErrorInfo | None = None
    step_error: ErrorInfo | None = None
    reply_failure: Exception | None = None  # after the requests were taken
    num_streams: int = 0
    can_open: bool = True
    metrics: str | Callable[[bool], str] | None = METRICS  # a page, or one by whether OpenMetrics is wanted
    max_events: int | None = None  # of each attempt; then silence
    num_cached: int = 3
    max_running: int | None = None  # more are refused as Overloaded
    num_turns: int = 1  # of the event loop, for each token
    poison: int | None = None
    poison_at: int = 0
    poison_cause: LossCause = "exception"
    worker: str = "w0"
    kv_policy_obstacle: str = ""
    kv_groups: tuple[KvGroupInfo, ...] = ()
    timeline: list[dict[str, Any]] = field(default_factory=list)  # what it tells of requests
    clock_ahead_s: float = 0.0  # of the router's
    num_resyncs: int = 0
    num_failed_submits: int = 0
    num_silent: int = 0  # attempts that have brought `max_events`
    is_dead: bool = False
    load: WorkerLoad = field(default_factory=lambda: WorkerLoad(max_num_seqs=1000))
    identity: str = ""
    tokenizer_digest: str = ""
    loaded_at_s: float = 0.0
    replaced: tuple[str, ...] = ()
    is_scaled: bool = True
    role: WorkerRole = "both"
    can_fetch: bool = False
    watch_failure: Exception | None = None
    watch_periods_s: list[float] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # checkpoints, by updates of the weights
    tried: list[Adapter] = field(default_factory=list)
    refusal: Exception | None = None  # of adapters
    # put frames, or an error, into these
    watchers: list[asyncio.Queue[bytes | Exception]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[WorkerMessage | Exception] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._go = asyncio.Event()
        self.changed = asyncio.Event()

    async def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        if not self.can_open:
            raise ConnectionError("no worker")
        self.num_streams += 1
        queue = self._queue = asyncio.Queue()
        yield WorkerMessage(kv=KvUpdate(after=0, version=0, runs=(), whole=True), load=self.load)
        try:
            while not isinstance(item := await queue.get(), Exception):
                yield item
            raise item
        finally:
            if queue is self._queue:
                self._cancel_all()

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        if self.is_dead:
            self.num_failed_submits += 1
            raise ConnectionError("no worker")
        self.submitted += requests
        if self.admission_error is not None:
            return [self.admission_error, *[None] * (len(requests) - 1)]
        if self.max_running is not None and (room := self.max_running - len(self._running)) < len(requests):
            full = ErrorInfo.of(Overloaded("full", retry_after_s=2.5))
            return [None if i < room else full for i in range(len(requests))]
        for request in requests:
            self._running[request.request_id] = asyncio.create_task(self._generate(request))
        self._notify()
        if self.reply_failure is not None:
            raise self.reply_failure
        return [None] * len(requests)

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self._running:
                self._running.pop(request_id).cancel()
        self._notify()

    async def resync(self, router_id: str) -> None:
        self.num_resyncs += 1
        self._notify()

    def _check_alive(self) -> None:
        if self.is_dead:
            raise ConnectionError("no worker")

    async def info(self) -> WorkerInfo:
        self._check_alive()
        return WorkerInfo(
            worker=self.worker,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            cache=replace(CACHE_SHAPE, identity=self.identity),
            tokenizer=self.tokenizer_digest,
            loaded_at_s=self.loaded_at_s,
            replaced=self.replaced,
            kv_groups=self.kv_groups,
            role=self.role,
            block_bytes=(64,),
            can_fetch=self.can_fetch,
            kv_policy_obstacle=self.kv_policy_obstacle,
        )

    async def request_timeline(self, request_id: str) -> list[dict[str, Any]]:
        self._check_alive()
        now_s = time.time() + self.clock_ahead_s
        own = [step for step in self.timeline if step["request_id"].startswith(request_id)]
        return [{**step, "at_s": (at_s := step["at_s"] + self.clock_ahead_s), "ago_s": now_s - at_s} for step in own]

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        if self.metrics is None:
            raise ConnectionError("no worker")
        return self.metrics if isinstance(self.metrics, str) else self.metrics(openmetrics)

    async def watch_blocks(self, router_id: str, period_s: float) -> AsyncGenerator[bytes, None]:
        self.watch_periods_s.append(period_s)
        self._notify()
        if self.watch_failure is not None:
            raise self.watch_failure
        queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.watchers.append(queue)
        self._notify()
        try:
            while not isinstance(item := await queue.get(), Exception):
                yield item
            raise item
        finally:
            self.watchers.remove(queue)
            self._notify()

    async def describe_block(self, group: int, block: int, tier: str = "device") -> dict[str, Any]:
        self._check_alive()
        described = {"group": group, "block": block, "state": "active", "tier": tier}
        return {"error": f"There is no group {group}."} if group else described

    async def pause(self, mode: str | None) -> None: ...

    async def update_weights(self, model: str) -> None:
        self.loaded.append(model)

    async def load_adapter(self, adapter: Adapter) -> ErrorInfo | None:
        self.tried.append(adapter)
        return None if self.refusal is None else ErrorInfo.of(self.refusal)

    async def measure_fetch(self, source: str, num_bytes: int, wire: str) -> dict[str, Any]:
        return {self.worker: [source, num_bytes, wire]}

    def push(self, *events: OutputEvent) -> None:
        """Send events of the test's own making."""
        self._send(WorkerMessage(events=events))

    def replace_weights(self, identity: str) -> None:
        """Go on with other weights."""
        self.replaced, self.identity = (*self.replaced, self.identity), identity
        self._send(WorkerMessage(identity=identity))

    def skip_index_updates(self) -> None:
        """Send an update of the prefix index whose predecessors the router never got."""
        self._send(WorkerMessage(kv=KvUpdate(after=7, version=8, runs=())))

    def die(self, cause: LossCause = "unknown") -> None:
        self._cancel_all()
        known = WorkerLost("the worker died", loss_cause=cause)
        self._send(ConnectionError("the worker died") if cause == "unknown" else known)

    def _send(self, message: WorkerMessage | Exception) -> None:
        assert self._queue is not None
        self._queue.put_nowait(message)

    def go(self) -> None:
        """No more silence."""
        self.max_events = None
        self._go.set()

    def end_all(self, error: ErrorInfo) -> None:
        """End every request with an error event."""
        ids = list(self._running)
        self._cancel_all()
        if ids:
            self.push(*(OutputEvent(request_id=one, position=0, finish_reason="error", error=error) for one in ids))

    def kill(self, cause: LossCause = "unknown") -> None:
        self.is_dead, self.can_open = True, False
        if self._queue is not None:
            self.die(cause)

    @property
    def is_read(self) -> bool:
        """Whether the router has all that was sent."""
        return self._queue is None or self._queue.empty()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _cancel_all(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._running.clear()

    async def until(self, condition: Any) -> None:
        """Wait until something that this worker was told makes `condition` true."""
        async with asyncio.timeout(120):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _notify(self) -> None:
        self.changed.set()

    async def _generate(self, request: Request) -> None:
        try:
            await self._run(request)
        finally:
            self._running.pop(request.request_id, None)

    async def _run(self, request: Request) -> None:
        begin = len(request.resumed_output_ids)
        count = min(request.params.max_tokens or 26, 26)
        for position in range(begin, count):
            if self.max_events is not None and position - begin == self.max_events:
                self.num_silent += 1
                await self._go.wait()
            if self.poison in request.prompt_token_ids and position == self.poison_at:
                self.kill(self.poison_cause)
                return
            event = self.event_of(request, position, is_last=position == count - 1)
            if request.prefill_only and event.finish_reason is None:
                self.push(event._replace(is_handover=True))
                return
            self.push(event)
            for _ in range(self.num_turns):
                await asyncio.sleep(0)

    def event_of(self, request: Request, position: int, *, is_last: bool) -> OutputEvent:
        """The event of the token at `position` of the output."""
        if self.step_error is not None and position == 1 and request.choice_index == 0:
            return OutputEvent(request_id=request.request_id, position=1, finish_reason="error", error=self.step_error)
        begin = len(request.resumed_output_ids)
        token_id, params = ord("a") + position, request.params
        usage = Usage(
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=position + 1,
            num_cached_tokens=self.num_cached,
        )
        prompt_logprobs = None
        if position == begin and params.prompt_logprobs is not None:
            ids = request.prompt_token_ids[1:]
            prompt_logprobs = LogprobTable.of(logprobs_of(i, params.prompt_logprobs) for i in ids)
        return OutputEvent(
            request_id=request.request_id,
            position=position,
            token_ids=(token_id,),
            text=chr(token_id),
            text_offset=position,
            logprobs=None if params.logprobs is None else (logprobs_of(token_id, params.logprobs),),
            prompt_logprobs=prompt_logprobs,
            finish_reason="length" if is_last else None,
            usage=usage if position == begin or is_last else None,
            embedding=None if params.pooling is None else EMBEDDING,
        )


def stub_workers(num: int, **fields: Any) -> list[StubWorker]:
    """Make workers w0, w1, ..."""
    return [StubWorker(worker=f"w{i}", **fields) for i in range(num)]


class StubDirectory:
    """Workers that come and go as the test says."""

    def __init__(self, *workers: StubWorker) -> None:
        self.workers = {worker.worker: worker for worker in workers}
        self.num_wakes = 0
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncGenerator[Mapping[str, StubWorker], None]:
        while True:
            self._changed.clear()
            yield dict(self.workers)
            await self._changed.wait()

    def wake(self) -> None:
        self.num_wakes += 1

    def add(self, worker: StubWorker) -> None:
        self.workers[worker.worker] = worker
        self._changed.set()

    def remove(self, worker: StubWorker) -> None:
        del self.workers[worker.worker]
        self._changed.set()


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token at rank 1, its successors after it."""
    top = tuple(Logprob(token_id=token_id + k, logprob=-0.5 - k, rank=k + 1) for k in range(num_top))
    return TokenLogprobs(chosen=Logprob(token_id=token_id, logprob=-0.5, rank=1), top=top)
