"""The routes that generate text: /v1/chat/completions, /v1/completions and /v1/responses."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from transom_cluster.http.client_limits import WorkLimits
from transom_cluster.http.generation_response import GenerationResponse
from transom_cluster.http.request_middleware import set_response_id
from transom_cluster.http.request_preparation import RequestPreparation
from transom_cluster.http.request_state import RequestState, request_state, routed_path
from transom_cluster.openai.answer.answer_markup import PLAIN
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.completion_writer import CompletionWriter, EchoedPrompt
from transom_cluster.openai.answer.writers import ResponseMetadata, ResponseWriter
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS, completion_prompts
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.body_shape import SMALL_BODY_BYTES
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.completion_request import CompletionRequest
from transom_cluster.openai.request.field_rules import CHAT_RULES, COMPLETION_RULES
from transom_cluster.openai.responses.chat_form import chat_form
from transom_cluster.openai.responses.output_items import ItemOptions
from transom_cluster.openai.responses.request_body import RESPONSES_RULES, ResponsesRequest
from transom_cluster.openai.responses.request_echo import request_echo
from transom_cluster.openai.responses.responses_writer import ResponsesWriter
from transom_cluster.router.router import Router
from transom_cluster.telemetry.span_attributes import request_attributes
from transom_core import contract
from transom_core.contract import SamplingParams
from transom_core.errors import RequestError
from transom_core.text.chat_template import Prompt
from transom_core.text.markup.context import AnswerContext

_CHAT = BodyParser(ChatCompletionRequest, CHAT_RULES)
_COMPLETION = BodyParser(CompletionRequest, COMPLETION_RULES)
_RESPONSES = BodyParser(ResponsesRequest, RESPONSES_RULES)


class OpenAiRoutes:
    """Route handlers for one router. They parse bodies themselves, whatever the content type, so that errors can name fields."""

    def __init__(self, router: Router, preparation: RequestPreparation, work: WorkLimits) -> None:
        self._router = router
        self._work = work
        self._preparation = preparation

    def add_routes(self, api: FastAPI) -> None:
        """Add the routes to the app."""
        handlers = {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.completions,
            "/v1/responses": self.responses,
        }
        for path, handler in handlers.items():
            api.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        state, threads = request_state(request.scope), self._preparation.client_threads(request)
        metadata = self._begin_response(state, "chatcmpl-")
        body = await self._preparation.parse(request, _CHAT, threads)
        await self._router.prepare(body.model)
        chat = await self._preparation.prepare_chat(state, metadata, body, threads)
        writer = ChatWriter(
            metadata,
            chat.requests,
            self._router.tokenizer,
            include_usage=body.include_usage,
            num_top_logprobs=chat.params.logprobs,
            answers=chat.answers if chat.is_parsed else (),
        )
        return self._response(state, request, chat.requests, writer, chat.params, stream=bool(body.stream))

    async def responses(self, request: Request) -> Response:
        """Answer a chat in the form of the Responses API."""
        state, threads = request_state(request.scope), self._preparation.client_threads(request)
        metadata = self._begin_response(state, "resp_")
        body = await self._preparation.parse(request, _RESPONSES, threads)
        await self._router.prepare(body.model)
        body.check_stateless()
        form = await threads.run(lambda: chat_form(body), num_chars=body.num_bytes, inline_chars=SMALL_BODY_BYTES)
        try:
            chat = await self._preparation.prepare_chat(state, metadata, form.chat, threads)
        except RequestError as error:
            raise form.error(error) from None
        echo = await threads.run(
            lambda: request_echo(body, chat.params), num_chars=body.num_bytes, inline_chars=SMALL_BODY_BYTES
        )
        options = ItemOptions(
            response_id=metadata.id,
            names=form.names,
            tokenizer=self._router.tokenizer,
            num_top_logprobs=chat.params.logprobs,
            includes_encrypted_reasoning=body.includes_encrypted_reasoning,
        )
        (answer,) = chat.answers
        writer = ResponsesWriter(metadata, chat.requests, answer, options, echo)
        warnings = {"x-transom-warning": form.warning_header} if form.warnings else {}
        return self._response(
            state, request, chat.requests, writer, chat.params, stream=bool(body.stream), headers=warnings
        )

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        state, threads = request_state(request.scope), self._preparation.client_threads(request)
        metadata = self._begin_response(state, "cmpl-")
        body = await self._preparation.parse(request, _COMPLETION, threads)
        await self._router.prepare(body.model)
        params = body.params()
        kv_policy, limits = self._preparation.kv_policy(body, params)
        num_bytes = len(memoryview(body.prompt))
        given = await threads.run(lambda: body.prompts(limits), num_chars=num_bytes, inline_chars=SMALL_BODY_BYTES)
        prompts = await completion_prompts(
            self._router.tokenizer,
            given,
            threads=threads,
            limits=limits,
            add_special_tokens=body.add_special_tokens,
        )
        read_options = functools.partial(body.answer_options, self._router.tokenizer.marker_id)
        options = await threads.run(read_options, num_chars=body.num_form_bytes, inline_chars=MAX_INLINE_CHARS)
        grammar = await self._preparation.grammar(PLAIN, options, AnswerContext(), threads)
        requests = await self._preparation.engine_requests(
            state,
            metadata,
            body,
            prompts,
            params,
            limits,
            kv_policy,
            threads=threads,
            grammar=grammar,
            prompt_param="prompt",
        )
        echo = functools.partial(self._echoed_prompts, given, prompts, params.n)
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        echoed = await threads.run(echo, num_chars=num_tokens, inline_chars=MAX_INLINE_CHARS) if body.echo else None
        writer = CompletionWriter(
            metadata,
            requests,
            self._router.tokenizer,
            include_usage=body.include_usage,
            num_top_logprobs=params.logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echoed=echoed,
            echo_only=body.echo_only,
        )
        return self._response(state, request, requests, writer, params, stream=bool(body.stream))

    def _begin_response(self, state: RequestState, prefix: str) -> ResponseMetadata:
        """Choose the response's id before anything can fail, so that the response to an error has the id, too."""
        model = self._router.config.served_model_name
        metadata = ResponseMetadata(id=f"{prefix}{secrets.token_hex(12)}", model=model)
        set_response_id(state, metadata.id)
        return metadata

    def _response(
        self,
        state: RequestState,
        request: Request,
        requests: Sequence[contract.Request],
        writer: ResponseWriter,
        params: SamplingParams,
        *,
        stream: bool,
        headers: Mapping[str, str] | None = None,
    ) -> GenerationResponse:
        """Return the response that will run `requests`; create its timeline, and describe the request in its span."""
        if state.trace is not None:
            state.trace.describe(request_attributes(params, num_choices=len(requests), stream=stream))
        timeline = self._router.timelines.create(
            requests,
            endpoint=routed_path(request.scope),
            client=state.client,
            stream=stream,
            outer_id=state.x_request_id,
            age_s=state.age_s,
            answers=writer.readers,
        )
        state.engine_request_id, state.timeline = requests[0].request_id, timeline
        events = self._router.request_events(timeline, state.trace)
        raw_headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        return GenerationResponse(
            self._router,
            requests,
            writer,
            work=self._work,
            client=state.counted_as,
            stream=stream,
            events=events,
            headers=raw_headers,
        )

    def _echoed_prompts(
        self, given: Sequence[str] | Sequence[list[int]], prompts: Sequence[Prompt], num_choices: int
    ) -> list[EchoedPrompt]:
        """Return each prompt as the client sent it, once per choice, with token ids decoded to text."""
        decode = self._router.tokenizer.decode
        echoed = []
        for i, prompt in enumerate(prompts):
            sent = given[i]
            text = sent if isinstance(sent, str) else decode(sent, skip_special_tokens=False)
            echoed += [EchoedPrompt(text=text, token_ids=prompt.token_ids)] * num_choices
        return echoed
