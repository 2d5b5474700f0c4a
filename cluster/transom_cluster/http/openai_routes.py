"""The routes that run a model: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages (and its count_tokens), and
/v1/embeddings, /v1/rerank and /v1/score, whose prompts run as completions of one token that the client does not get.

A handler makes engine requests (`contract.Request`, one per prompt and choice) and a writer from a body, and returns the response
that runs them. Long work goes to `threads.run`, away from the event loop; clients take turns there. `num_chars` says how much work
it is, and up to `inline_chars` it runs on the event loop. Bodies of other APIs become a chat or a completion (`converted`), and
`named_errors` and `renamed_errors` give the fields in errors the names that the client has used.
"""

import functools
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from transom_cluster.http.client_limits import WorkLimits
from transom_cluster.http.client_threads import RequestThreads
from transom_cluster.http.generation_response import GenerationResponse
from transom_cluster.http.prompt_request import PromptRequest
from transom_cluster.openai.answer.answer_markup import PLAIN
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.completion_writer import CompletionWriter, EchoedPrompt
from transom_cluster.openai.answer.embedding_writer import EmbeddingWriter, RerankWriter, ScoreWriter
from transom_cluster.openai.answer.writers import ResponseWriter
from transom_cluster.openai.messages.chat_form import MessagesChat, messages_chat
from transom_cluster.openai.messages.messages_writer import MessagesWriter
from transom_cluster.openai.messages.object_types import MessageTokensCount
from transom_cluster.openai.messages.request_body import MESSAGES_RULES, CountTokensRequest, MessagesRequest
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS, encode_prompts
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.body_shape import SMALL_BODY_BYTES
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.completion_request import CompletionRequest
from transom_cluster.openai.request.converted_chat import renamed_errors
from transom_cluster.openai.request.embedding_request import EMBEDDING_RULES, EmbeddingRequest, PooledRequest
from transom_cluster.openai.request.field_rules import CHAT_RULES, COMPLETION_RULES
from transom_cluster.openai.request.request_limits import (
    ModelLimits,
    check_choices,
    check_tokenize_bytes,
    check_tokenize_tokens,
)
from transom_cluster.openai.request.score_request import RerankRequest, ScoreRequest
from transom_cluster.openai.responses.chat_form import chat_form
from transom_cluster.openai.responses.output_items import ItemOptions
from transom_cluster.openai.responses.request_body import RESPONSES_RULES, ResponsesRequest
from transom_cluster.openai.responses.request_echo import request_echo
from transom_cluster.openai.responses.responses_writer import ResponsesWriter
from transom_cluster.router.router import Router
from transom_cluster.telemetry.request_events import RequestEvents
from transom_cluster.telemetry.request_timeline import RequestTimeline
from transom_core import contract
from transom_core.contract import SamplingParams
from transom_core.errors import RequestError
from transom_core.text.chat_template import Prompt
from transom_core.text.markup.context import AnswerContext

_CHAT = BodyParser(ChatCompletionRequest, CHAT_RULES)
_COMPLETION = BodyParser(CompletionRequest, COMPLETION_RULES)
_RESPONSES = BodyParser(ResponsesRequest, RESPONSES_RULES)
_MESSAGES = BodyParser(MessagesRequest, MESSAGES_RULES)
_EMBEDDINGS = BodyParser(EmbeddingRequest, EMBEDDING_RULES)
_RERANK = BodyParser(RerankRequest, EMBEDDING_RULES)
_SCORE = BodyParser(ScoreRequest, EMBEDDING_RULES)
_COUNT_TOKENS = BodyParser(CountTokensRequest, MESSAGES_RULES)


class OpenAiRoutes:
    """Route handlers for one router. They parse bodies (of any content type) instead of FastAPI, so that errors can name fields."""

    def __init__(self, router: Router, threads: RequestThreads, work: WorkLimits) -> None:
        self._router = router
        self._work = work
        self._threads = threads

    def add_routes(self, api: FastAPI) -> None:
        """Add the routes to the app."""
        handlers = {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.completions,
            "/v1/responses": self.responses,
            "/v1/embeddings": self.embeddings,
            "/v1/rerank": self.rerank,
            "/v1/score": self.score,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
        }
        for path, handler in handlers.items():
            api.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="chatcmpl-")
        body = await asked.parse(_CHAT)
        chat = await asked.chat(body)
        writer = ChatWriter(
            asked.metadata,
            chat.requests,
            self._router.tokenizer,
            include_usage=body.include_usage,
            num_top_logprobs=chat.params.logprobs,
            answers=chat.answers if chat.is_parsed else (),  # a plain answer needs no parser
        )
        return self._response(asked, chat.requests, writer, stream=bool(body.stream))

    async def responses(self, request: Request) -> Response:
        """Answer a chat in the form of the Responses API."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="resp_")
        body = await asked.parse(_RESPONSES)
        body.check_stateless()
        run = functools.partial(asked.threads.run, num_chars=body.num_bytes, inline_chars=SMALL_BODY_BYTES)
        converted = await run(lambda: chat_form(body))
        with converted.named_errors():
            chat = await asked.chat(converted.chat)
        echo = await run(lambda: request_echo(body, chat.params))
        options = ItemOptions(
            response_id=asked.metadata.id,
            names=converted.tool_names,
            tokenizer=self._router.tokenizer,
            num_top_logprobs=chat.params.logprobs,
            includes_encrypted_reasoning=body.includes_encrypted_reasoning,
        )
        (answer,) = chat.answers
        writer = ResponsesWriter(asked.metadata, chat.requests, answer, options, echo)
        return self._response(asked, chat.requests, writer, stream=bool(body.stream), headers=converted.headers)

    async def messages(self, request: Request) -> Response:
        """Answer a chat in the form of Anthropic's Messages API."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="msg_")
        body = await asked.parse(_MESSAGES)
        converted = await self._messages_chat(asked, body)
        if converted.chat.messages[-1].role == "assistant":
            reason = "this server does not continue one (prefill); end with a user's message"
            raise RequestError(f"messages ends with a message of the assistant; {reason}.", param="messages")
        with converted.named_errors():
            # Clients may ask for more tokens than fit the model's length; the answer then ends at that length.
            chat = await asked.chat(converted.chat, cuts_max_tokens=True)
        (sent,), (answer,), limits = chat.requests, chat.answers, self._router.limits.current
        # The prefix cache keeps whole blocks of the prompt, if it keeps any.
        is_cached = limits.caches_prefixes and sent.reads_prefix_cache
        writer = MessagesWriter(
            asked.metadata,
            chat.requests,
            answer,
            num_cacheable_tokens=sent.num_prompt_tokens // limits.block_size * limits.block_size if is_cached else 0,
            omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
        )
        writer.prompt_only = body.max_tokens == 0  # the engine computes one token, which the client does not get
        return self._response(asked, chat.requests, writer, stream=bool(body.stream), headers=converted.headers)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that a request to /v1/messages with this body would have."""
        asked = PromptRequest(self._router, self._threads, request)
        converted = await self._messages_chat(asked, await asked.parse(_COUNT_TOKENS))
        limits = self._router.limits.current
        with converted.named_errors():
            check_tokenize_bytes(sum(one.num_chars for one in converted.chat.messages), limits, param="messages")
            check = functools.partial(check_tokenize_tokens, limits=limits, param="messages")
            _, prompt = await asked.rendered(converted.chat, check_length=check)
        return JSONResponse(MessageTokensCount(input_tokens=len(prompt.token_ids)), headers=converted.headers)

    async def _messages_chat(self, asked: PromptRequest, body: CountTokensRequest) -> MessagesChat:
        strips = self._router.config.strip_billing_header
        convert = functools.partial(messages_chat, body, strips_billing_header=strips)
        return await asked.threads.run(convert, num_chars=body.num_bytes, inline_chars=SMALL_BODY_BYTES)

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts, as plain text: without reasoning and tool calls."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="cmpl-")
        body = await asked.parse(_COMPLETION)
        tokenizer, params = self._router.tokenizer, body.params()
        given, prompts, limits = await self._prompts(asked, body, params)
        run = functools.partial(asked.threads.run, inline_chars=MAX_INLINE_CHARS)
        options = await run(lambda: body.answer_options(tokenizer.marker_id), num_chars=body.num_form_bytes)
        grammar = await asked.grammar(PLAIN, options, AnswerContext())
        requests = await asked.engine_requests(body, prompts, params, limits, grammar, prompt_param="prompt")
        echo = functools.partial(self._echoed_prompts, given, prompts, params.n)
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        writer = CompletionWriter(
            asked.metadata,
            requests,
            tokenizer,
            include_usage=body.include_usage,
            num_top_logprobs=params.logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echoed=await run(echo, num_chars=num_tokens) if body.echo else None,
            echo_only=body.echo_only,
        )
        return self._response(asked, requests, writer, stream=bool(body.stream))

    async def embeddings(self, request: Request) -> Response:
        """Compute the embeddings of one or several inputs."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="embd-")
        body = await asked.parse(_EMBEDDINGS)
        body.check_dimensions(self._router.limits.current.hidden_size)
        completion, params = body.completion(body.input), body.params(body.pooling)
        with renamed_errors({"prompt": "input"}.get):
            _, prompts, limits = await self._prompts(asked, completion, params)
            requests = await asked.engine_requests(completion, prompts, params, limits, None, prompt_param="prompt")
        return self._response(asked, requests, EmbeddingWriter(asked.metadata, requests, body), stream=False)

    async def rerank(self, request: Request) -> Response:
        """Order documents by how well they fit a query."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="rerank-")
        body = await asked.parse(_RERANK)
        requests = await self._scored(asked, body, body.pairs(), param="documents")
        return self._response(asked, requests, RerankWriter(asked.metadata, requests, body), stream=False)

    async def score(self, request: Request) -> Response:
        """Score how well the texts of pairs fit."""
        asked = PromptRequest(self._router, self._threads, request, id_prefix="score-")
        body = await asked.parse(_SCORE)
        requests = await self._scored(asked, body, body.pairs(), param="text_2")
        return self._response(asked, requests, ScoreWriter(asked.metadata, requests), stream=False)

    async def _scored(
        self, asked: PromptRequest, body: PooledRequest, pairs: Sequence[tuple[str, str]], *, param: str
    ) -> list[contract.Request]:
        """Return the engine requests that score pairs of texts. Errors about a pair name the client's field `param`."""
        completion, params = body.completion(), body.params("score")
        with renamed_errors({"prompt": param}.get):
            limits = asked.limits(completion, params)
            check_choices(len(pairs), 1, limits, param=param)
            num_chars = sum(len(first) + len(second) for first, second in pairs)
            prompts = await self._encoded(asked, completion, pairs, limits, num_chars=num_chars)
            return await asked.engine_requests(completion, prompts, params, limits, None, prompt_param="prompt")

    async def _prompts(
        self, asked: PromptRequest, body: CompletionRequest, params: SamplingParams
    ) -> tuple[Sequence[str] | Sequence[list[int]], list[Prompt], ModelLimits]:
        """Return a completion's prompts as the client sent them (texts or token ids), their tokens, and the request's limits."""
        limits = asked.limits(body, params)
        num_bytes = len(memoryview(body.prompt))  # the field `prompt` is JSON text, which `prompts` reads
        given = await asked.threads.run(
            lambda: body.prompts(limits), num_chars=num_bytes, inline_chars=SMALL_BODY_BYTES
        )
        num_chars = sum(len(prompt) for prompt in given)
        return given, await self._encoded(asked, body, given, limits, num_chars=num_chars), limits

    async def _encoded(
        self,
        asked: PromptRequest,
        body: CompletionRequest,
        given: Sequence[str] | Sequence[list[int]] | Sequence[tuple[str, str]],
        limits: ModelLimits,
        *,
        num_chars: int,
    ) -> list[Prompt]:
        """Tokenise texts or pairs of texts; token ids stay as they are."""
        encode = functools.partial(
            encode_prompts, self._router.tokenizer, given, limits=limits, add_special_tokens=body.add_special_tokens
        )
        return await asked.threads.run(encode, num_chars=num_chars, inline_chars=MAX_INLINE_CHARS)

    def _response(
        self,
        asked: PromptRequest,
        requests: Sequence[contract.Request],
        writer: ResponseWriter,
        *,
        stream: bool,
        headers: Mapping[str, str] | None = None,
    ) -> GenerationResponse:
        """Return the response that will run `requests`; create their timeline, and add their parameters to the trace's span."""
        state = asked.state
        if state.trace is not None:
            state.trace.describe(requests[0].params, num_choices=len(requests), stream=stream)
        timeline = RequestTimeline(
            requests,
            self._router.timelines.store,
            endpoint=asked.path,
            client=state.client,
            stream=stream,
            outer_id=state.x_request_id,
            age_s=state.age_s,
            answers=writer.readers,
        )
        state.engine_request_id, state.timeline = requests[0].request_id, timeline
        events = RequestEvents(timeline, self._router.metrics, spans=state.trace)
        return GenerationResponse(
            self._router, requests, writer, state=state, work=self._work, stream=stream, events=events, headers=headers
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
