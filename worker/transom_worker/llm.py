"""Offers `LLM`: offline generation in one process, with vLLM's interface. This module never imports ray or fastapi."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Literal, cast

from tqdm import tqdm

from transom_core.config import TransferConfig
from transom_core.contract import (
    Adapter,
    FinishReason,
    KvPolicy,
    KvQuality,
    OutputEvent,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from transom_core.contract.kv_policy import kv_policy_from_json
from transom_core.errors import RequestError, TransomError, WorkerLost
from transom_core.logs import show_logs
from transom_core.machine.openmp import call_on_thread
from transom_core.model_files.adapter_files import resolve_adapter
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.engine.engine_thread import EngineThread
from transom_worker.engine.startup import build_engine
from transom_worker.scheduling.clients import MAX_TOKENS, num_arriving

Prompt = str | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

MAX_RESUMES = 2  # resumptions of one output after ranks were lost: that output may be what crashes the ranks


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter in PEFT's format, with vLLM's fields. Adapters are told apart by the content of their files, so the number is
    not used."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One output of a prompt. `logprobs[step][token_id]` holds the chosen token and the requested alternatives."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    kv_quality: KvQuality | None = None  # the KV policy compared with full attention, if that was measured


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """All outputs of one prompt. `num_cached_tokens` are prompt tokens that the first output found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class LLM:
    """A model that runs in this process.

    Args:
        model: folder of safetensors, .gguf file, Hugging Face id, or "smollm2".
        dtype: "auto", "float32", "bfloat16" or "float16".
        settings: any other name of `Settings`, such as `max_model_len` or `kv_cache_memory_bytes`.

    Raises:
        ConfigError, ModelError: a setting or the checkpoint is wrong.
    """

    def __init__(self, model: str, *, dtype: str = "auto", **settings: Any) -> None:
        parsed = Settings.parse(model=model, dtype=dtype, **settings)
        show_logs(parsed.log_format)
        config = replace(parsed.engine_config(), transfer=TransferConfig())  # there are no other workers
        self.engine: Engine = call_on_thread(lambda: build_engine(config))
        events: SimpleQueue[tuple[OutputEvent, ...]] = SimpleQueue()
        self._thread = EngineThread(self.engine, lambda message: events.put(message.events))
        self._events = events  # the thread holds the queue, not this object, so dropping this object ends the thread
        # A program that forgets `shutdown` must leave no rank processes behind.
        self._end = weakref.finalize(self, self._thread.shutdown)
        self._seed = parsed.seed
        self._kv_policy = None if parsed.kv_policy is None else kv_policy_from_json(parsed.kv_policy)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        kv_policy: KvPolicy | Literal["default", "full"] = "default",
        kv_quality: bool = False,
        grammar: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the outputs of one prompt or many, all in one batch; results are in the order of the prompts.

        A prompt is a string or {"prompt_token_ids": [...]}. `sampling_params` is one object for all prompts, or one per prompt.
        `kv_policy` says which tokens the model's full-attention layers keep: "full" keeps all, "default" does what the setting
        `kv_policy` says. `kv_quality` compares a sample of the tokens with full attention. `grammar` is a text in llguidance's
        dialect of Lark, such as `start: %json {"type": "object"}`, which every output follows; docs/structured_output.md says when
        such an output ends. `lora_request` is a LoRA adapter for all prompts, or one per prompt.

        Raises:
            RequestError: a prompt, a parameter, the grammar or an adapter is wrong; no prompt gets an output then.
            EngineDead: a step failed, or took longer than `step_timeout_s`; this object cannot be used any more.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = self._params_per_prompt(sampling_params, len(batch))
        outputs = [self._open(prompt, one) for prompt, one in zip(batch, params, strict=True)]
        policy = self._kv_policy if kv_policy == "default" else kv_policy
        if policy not in (None, "full") and not isinstance(policy, KvPolicy):
            raise RequestError(f"kv_policy is {kv_policy!r}; give 'default', 'full' or a policy.", param="kv_policy")
        adapters = self._adapter_per_prompt(lora_request, len(batch))
        requests = [
            self._request(out, one, index, policy, kv_quality, grammar, adapter)
            for out, one, adapter in zip(outputs, params, adapters, strict=True)
            for index in range(one.n)
        ]
        self._run(requests, outputs, use_tqdm=use_tqdm)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the outputs of one conversation (a list of {"role", "content"}) or many, through the model's chat template."""
        single = not messages or isinstance(messages[0], Mapping)
        many = cast("Sequence[Messages]", [messages] if single else messages)
        if any(isinstance(one, str) or not all(isinstance(message, Mapping) for message in one) for one in many):
            raise RequestError(f"messages is {messages!r}; give a list of {{'role', 'content'}}, or several.")
        rendered = [self.engine.tokenizer.apply_chat_template([dict(m) for m in one]) for one in many]
        prompts = [{"prompt_token_ids": prompt.token_ids, "prompt": prompt.text} for prompt in rendered]
        return self.generate(prompts, sampling_params, lora_request=lora_request, use_tqdm=use_tqdm)

    def shutdown(self) -> None:
        """Free the model and the KV pool. Idempotent; happens by itself when the object is dropped or the program ends."""
        self._end()

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        many = list(params)
        if not all(isinstance(one, SamplingParams) for one in many):
            raise RequestError(f"sampling_params is {params!r}; give a SamplingParams, or one for each prompt.")
        if len(many) != num_prompts:
            raise RequestError(
                f"There are {len(many)} sampling_params for {num_prompts} prompts; give one, or one each."
            )
        return many

    def _adapter_per_prompt(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
    ) -> list[Adapter | None]:
        many = [given] * num_prompts if given is None or isinstance(given, LoRARequest) else list(given)
        if wrong := [one for one in many if one is not None and not isinstance(one, LoRARequest)]:
            raise RequestError(f"lora_request has {wrong[0]!r}; give LoRARequest objects.", param="lora_request")
        if len(many) != num_prompts:
            raise RequestError(f"There are {len(many)} lora_requests for {num_prompts} prompts; give one, or one each.")
        config = self.engine.config.lora
        if config is None and any(many):
            raise RequestError("lora_request needs LLM(..., enable_lora=True).", param="lora_request")
        adapters: dict[LoRARequest, Adapter] = {}
        for one in many:
            if one is not None and one not in adapters and config is not None:
                files = resolve_adapter(one.lora_path, max_rank=config.max_lora_rank)
                adapters[one] = Adapter(name=one.lora_name, path=files.name, identity=files.identity())
        return [None if one is None else adapters[one] for one in many]

    def _open(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        if isinstance(prompt, str):
            text: str | None = prompt
            token_ids = self.engine.tokenizer.encode(prompt)
        else:
            if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
                raise RequestError(
                    f"A prompt is {prompt!r}; give a string, or token ids as {{'prompt_token_ids': [...]}}.",
                    param="prompt",
                )
            text = prompt.get("prompt")
            try:
                token_ids = [int(i) for i in prompt["prompt_token_ids"]]
            except (TypeError, ValueError):
                raise RequestError(
                    f"prompt_token_ids is {prompt['prompt_token_ids']!r}; give a list of numbers.", param="prompt"
                ) from None
        return RequestOutput(
            request_id=str(next(self._ids)),
            prompt=text,
            prompt_token_ids=token_ids,
            outputs=[
                CompletionOutput(index=i, logprobs=None if params.logprobs is None else []) for i in range(params.n)
            ],
        )

    def _request(
        self,
        output: RequestOutput,
        params: SamplingParams,
        index: int,
        kv_policy: KvPolicy | Literal["full"] | None,
        kv_quality: bool,
        grammar: str | None,
        adapter: Adapter | None,
    ) -> Request:
        seed = params.seed if params.seed is not None else self._next_seed(output)
        return Request(
            request_id=f"{output.request_id}-{index}",
            prompt_token_ids=tuple(output.prompt_token_ids),
            params=params.single(),
            seed=seed,
            choice_index=index,
            kv_policy=None if kv_policy == "full" else kv_policy,
            kv_quality=kv_quality,
            grammar=grammar,
            adapter=adapter,
        )

    def _next_seed(self, output: RequestOutput) -> int:
        return secrets.randbits(63) if self._seed is None else self._seed + int(output.request_id)

    def _run(self, requests: list[Request], outputs: list[RequestOutput], *, use_tqdm: bool) -> None:
        """Submit requests whenever the engine's queue has space, and collect their events. One invalid request ends the whole call.

        An interrupt (Ctrl-C) aborts all requests after the current step, so that the engine can be used again.
        """
        targets = {f"{out.request_id}-{choice.index}": (out, choice) for out in outputs for choice in out.outputs}
        waiting = deque(requests)
        running: dict[str, Request] = {}
        resumes: Counter[str] = Counter()
        try:
            with tqdm(total=len(requests), desc="Requests", disable=not use_tqdm) as bar:
                while waiting or running:
                    self._submit(waiting, running)
                    for event in self._events.get():
                        if event.request_id not in running:  # the event is of an earlier call that was interrupted
                            continue
                        out, choice = targets[event.request_id]
                        if event.finish_reason is not None:
                            request = running.pop(event.request_id)
                            if _can_resume(event) and resumes[event.request_id] < MAX_RESUMES:
                                resumes[event.request_id] += 1
                                waiting.append(replace(request, resumed_output_ids=tuple(choice.token_ids)))
                                continue
                            bar.update()
                        self._collect(event, out, choice)
        except BaseException:
            self._thread.call(lambda: [self.engine.abort(request_id) for request_id in running]).result()
            raise

    def _submit(self, waiting: deque[Request], running: dict[str, Request]) -> None:
        """Move as many requests from `waiting` to `running` as the engine's queue has space for.

        The engine takes none while it restarts its ranks; it sends a message when they run again.
        """
        scheduler = self.engine.config.scheduler
        # The engine takes as many requests as may run, and queues as many as may wait.
        num_free = scheduler.max_num_seqs + scheduler.max_waiting - len(running)
        num_tokens, batch = sum(map(num_arriving, running.values())), list[Request]()
        for request in itertools.islice(waiting, 0 if self.engine.is_restarting else num_free):
            num_tokens += num_arriving(request)
            if num_tokens > MAX_TOKENS and (batch or running):
                break
            batch.append(request)
        if not batch:
            return
        running |= {request.request_id: request for request in batch}
        errors = [error for error in self._thread.submit(batch).result() if error is not None]
        if not errors:
            for _ in batch:
                waiting.popleft()
        elif errors[0].kind == WorkerLost.__name__:  # a rank was lost just now
            for request in batch:
                del running[request.request_id]
        else:
            raise errors[0].error()

    def _collect(self, event: OutputEvent, out: RequestOutput, choice: CompletionOutput) -> None:
        if event.error is not None:
            raise event.error.error()
        choice.text += event.text
        choice.token_ids.extend(event.token_ids)
        if event.logprobs is not None and choice.logprobs is not None:
            choice.logprobs.extend(self._by_id(entry) for entry in event.logprobs)
        if event.prompt_logprobs is not None:
            out.prompt_logprobs = [None, *(self._by_id(entry) for entry in event.prompt_logprobs)]
        if event.usage is not None:
            choice.kv_quality = event.usage.kv_quality
            if choice.index == 0:
                out.num_cached_tokens = event.usage.num_cached_tokens
        choice.finish_reason = event.finish_reason
        choice.stop_reason = event.stop_reason

    def _by_id(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        token = self.engine.tokenizer.token
        return {e.token_id: Logprob(e.logprob, e.rank, token(e.token_id)) for e in (*entry.top, entry.chosen)}


def _can_resume(event: OutputEvent) -> bool:
    """Return whether the output can continue where it stopped, once all ranks run again."""
    return event.error is not None and event.error.kind == WorkerLost.__name__


__all__ = ["LLM", "CompletionOutput", "LoRARequest", "Logprob", "RequestOutput", "SamplingParams", "TransomError"]
