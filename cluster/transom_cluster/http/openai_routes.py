"""The routes that take prompts: chat completions, completions, /tokenize, /detokenize."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from transom_cluster.http.api_keys import client_cache_salt
from transom_cluster.http.generation_response import GenerationResponse
from transom_cluster.http.request_id_middleware import set_request_id
from transom_cluster.http.routed_path import routed_path
from transom_cluster.openai.body import Model, parse_body
from transom_cluster.openai.chat_types import ChatCompletionRequest
from transom_cluster.openai.chat_writer import ChatWriter
from transom_cluster.openai.completion_types import CompletionRequest, DetokenizeRequest, TokenizeRequest
from transom_cluster.openai.completion_writer import CompletionWriter, EchoedPrompt
from transom_cluster.openai.document import BODIES
from transom_cluster.openai.fields import CHAT_RULES, COMPLETION_RULES, NO_RULES, TOKENIZE_RULES, FieldRules
from transom_cluster.openai.prompts import (
    MAX_INLINE_CHARS,
    Prompt,
    chat_prompt,
    check_vocabulary,
    completion_prompts,
)
from transom_cluster.openai.sampling_fields import SamplingFields
from transom_cluster.openai.to_contract import build_requests
from transom_cluster.openai.writers import ResponseMetadata, Writer
from transom_cluster.router.router import Router
from transom_cluster.telemetry.request_timeline import RequestTimeline
from transom_cluster.telemetry.span_attributes import request_attributes
from transom_cluster.telemetry.tracing import RequestTrace
from transom_worker import contract
from transom_worker.contract import SamplingParams
from transom_worker.errors import RequestError, RequestTimeout

logger = logging.getLogger("transom.router")


class OpenAiRoutes:
    """Handlers bound to one router. Bodies are parsed here, whatever their content type, so that errors name fields."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def add_routes(self, api: FastAPI) -> None:
        """Register the routes."""
        handlers = (self.chat_completions, self.completions, self.tokenize, self.detokenize)
        for path, handler in zip(BODIES, handlers, strict=True):
            api.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        header = self._header(request, "chatcmpl")
        wanted = await self._parse(request, ChatCompletionRequest, CHAT_RULES)
        await self._router.prepare(wanted.model)
        params = wanted.params()
        prompt = await chat_prompt(
            self._router.tokenizer,
            wanted.messages,
            add_generation_prompt=wanted.add_generation_prompt,
            template_kwargs=wanted.chat_template_kwargs,
        )
        requests = self._requests(request, header, wanted, [prompt], params, prompt_param="messages")
        writer = ChatWriter(
            header,
            requests,
            self._router.tokenizer,
            include_usage=wanted.include_usage,
            num_top_logprobs=params.logprobs,
        )
        return self._answer(request, requests, writer, params, stream=bool(wanted.stream))

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        header = self._header(request, "cmpl")
        wanted = await self._parse(request, CompletionRequest, COMPLETION_RULES)
        await self._router.prepare(wanted.model)
        params = wanted.params()
        texts = wanted.prompts()
        prompts = await completion_prompts(self._router.tokenizer, texts, add_special_tokens=wanted.add_special_tokens)
        requests = self._requests(request, header, wanted, prompts, params, prompt_param="prompt")
        writer = CompletionWriter(
            header,
            requests,
            self._router.tokenizer,
            include_usage=wanted.include_usage,
            num_top_logprobs=params.logprobs,
            echoed=self._echoed(texts, prompts, params.n) if wanted.echo else None,
            echo_only=wanted.echo_only,
        )
        return self._answer(request, requests, writer, params, stream=bool(wanted.stream))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        wanted = await self._parse(request, TokenizeRequest, TOKENIZE_RULES)
        await self._router.prepare(wanted.model)
        tokenizer, limits = self._router.tokenizer, self._router.limits
        token_ids = (await self._tokenize_prompt(wanted)).token_ids
        body: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": list(token_ids),
            "token_strs": [tokenizer.token(i) for i in token_ids] if wanted.return_token_strs else None,
        }
        return JSONResponse(body)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        wanted = await self._parse(request, DetokenizeRequest, NO_RULES)
        await self._router.prepare(wanted.model)
        check_vocabulary(wanted.tokens, self._router.limits.vocab_size, param="tokens")
        text = await asyncio.to_thread(self._router.tokenizer.decode, wanted.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def _tokenize_prompt(self, wanted: TokenizeRequest) -> Prompt:
        tokenizer = self._router.tokenizer
        if (wanted.prompt is None) == (wanted.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        if wanted.messages is not None:
            if wanted.add_special_tokens:
                raise RequestError(
                    "add_special_tokens is true; special tokens of messages are the chat template's business, leave it out.",
                    param="add_special_tokens",
                )
            return await chat_prompt(
                tokenizer,
                wanted.messages,
                add_generation_prompt=wanted.add_generation_prompt,
                template_kwargs=wanted.chat_template_kwargs,
            )
        text, add_special = wanted.prompt or "", wanted.add_special_tokens is not False
        if len(text) > MAX_INLINE_CHARS:
            ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special)
        else:
            ids = tokenizer.encode(text, add_special_tokens=add_special)
        return Prompt(token_ids=tuple(ids))

    async def _parse(self, request: Request, model: type[Model], rules: FieldRules) -> Model:
        try:
            async with asyncio.timeout(self._router.config.limits.request_timeout_s):
                body = await request.body()
        except TimeoutError:
            raise RequestTimeout("The request's body did not arrive in time; send it faster, or send less.") from None
        return parse_body(body, model, rules)

    def _requests(
        self,
        request: Request,
        header: ResponseMetadata,
        wanted: SamplingFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        prompt_param: str,
    ) -> list[contract.Request]:
        """What the workers get, with what the server adds of its own: seed, deadline, and the client's salt."""
        router, config = self._router, self._router.config
        if config.log_prompts:
            for prompt in prompts:
                logger.info(
                    "%s asks: %r", header.id, router.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
                )
        arrival_s, timeout_s = request.state.arrival_s, config.limits.request_timeout_s
        return build_requests(
            header.id,
            prompts,
            params,
            router.limits,
            engine_seed=router.engine_seed,
            arrival_s=arrival_s,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
            priority=wanted.priority,
            cache_salt=client_cache_salt(wanted.cache_salt, request.state.client)
            if config.salt_by_key
            else wanted.cache_salt,
            prompt_param=prompt_param,
        )

    def _header(self, request: Request, prefix: str) -> ResponseMetadata:
        header = ResponseMetadata(id=f"{prefix}-{secrets.token_hex(12)}", model=self._router.config.served_model_name)
        set_request_id(request, header.id)
        return header

    def _answer(
        self,
        request: Request,
        requests: Sequence[contract.Request],
        writer: Writer,
        params: SamplingParams,
        *,
        stream: bool,
    ) -> GenerationResponse:
        """The response, and what is told of it to those who ask later."""
        trace: RequestTrace | None = getattr(request.state, "trace", None)
        if trace is not None:
            trace.describe(request_attributes(params, num_choices=len(requests), stream=stream))
        timeline = RequestTimeline(
            requests,
            endpoint=routed_path(request.scope),
            client=request.state.client,
            stream=stream,
            outer_id=request.state.outer_id,
            trace=trace,
        )
        request.state.timeline = timeline
        return GenerationResponse(self._router, requests, writer, stream=stream, timeline=timeline)

    def _echoed(
        self, texts: Sequence[str] | Sequence[list[int]], prompts: Sequence[Prompt], num_choices: int
    ) -> list[EchoedPrompt]:
        """Each prompt as it came, once per choice; token ids are decoded."""
        decode = self._router.tokenizer.decode
        echoed = []
        for i, prompt in enumerate(prompts):
            given = texts[i]
            text = given if isinstance(given, str) else decode(given, skip_special_tokens=False)
            echoed += [EchoedPrompt(text=text, token_ids=prompt.token_ids)] * num_choices
        return echoed
