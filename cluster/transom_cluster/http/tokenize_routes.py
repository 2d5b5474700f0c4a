"""The routes that convert between text and token ids: /tokenize and /detokenize."""

import functools

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from transom_cluster.http.client_threads import RequestThreads
from transom_cluster.http.prompt_request import PromptRequest
from transom_cluster.openai.answer.response_types import Text, Tokens
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS, render_chat
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.completion_request import DetokenizeRequest, TokenizeRequest
from transom_cluster.openai.request.field_rules import NO_RULES, TOKENIZE_RULES
from transom_cluster.openai.request.request_limits import ModelLimits, check_tokenize_bytes, check_tokenize_tokens
from transom_cluster.openai.request.token_id_lists import check_vocabulary
from transom_cluster.router.router import Router
from transom_core.errors import RequestError

_TOKENIZE = BodyParser(TokenizeRequest, TOKENIZE_RULES)
_DETOKENIZE = BodyParser(DetokenizeRequest, NO_RULES)


class TokenizeRoutes:
    """Route handlers for one router. They use no worker, but the model's limits, which workers have reported."""

    def __init__(self, router: Router, threads: RequestThreads) -> None:
        self._router = router
        self._threads = threads

    def add_routes(self, api: FastAPI) -> None:
        """Add the routes to the app."""
        for path, handler in (("/tokenize", self.tokenize), ("/detokenize", self.detokenize)):
            api.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def tokenize(self, request: Request) -> Response:
        """Convert a text or a chat to token ids.

        One call on a thread does all the work from the body to the response. A client's parallel requests take turns on the
        threads, so few of them have their ids in memory at a time.
        """
        asked = PromptRequest(self._router, self._threads, request)
        raw = await asked.body()
        await self._router.prepare(None)
        waits = b"messages" in raw  # a chat waits for the process that renders the chat template
        respond = functools.partial(self._tokens_response, raw)
        return await asked.threads.run(respond, num_chars=len(raw), inline_chars=-1 if waits else MAX_INLINE_CHARS)

    def _tokens_response(self, raw: bytes) -> Response:
        body = _TOKENIZE.parse(raw)
        self._router.check_model(body.model)
        tokenizer, limits = self._router.tokenizer, self._router.limits.current
        token_ids = self._token_ids(body, limits)
        texts = {i: tokenizer.token(i) for i in set(token_ids)} if body.return_token_strs else {}
        tokens: Tokens = {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": token_ids,
            "token_strs": [texts[i] for i in token_ids] if body.return_token_strs else None,
        }
        return Response(msgspec.json.encode(tokens), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Convert token ids to text."""
        asked = PromptRequest(self._router, self._threads, request)
        body = await asked.parse(_DETOKENIZE)
        limits, decode = self._router.limits.current, self._router.tokenizer.decode

        def answer() -> Response:
            token_ids = body.token_ids(limits)
            check_vocabulary(token_ids, limits.vocab_size, param="tokens")
            return JSONResponse(Text(prompt=decode(token_ids, skip_special_tokens=False)))

        return await asked.threads.run(answer, num_chars=len(memoryview(body.tokens)), inline_chars=MAX_INLINE_CHARS)

    def _token_ids(self, body: TokenizeRequest, limits: ModelLimits) -> list[int]:
        tokenizer = self._router.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        variables = body.template_variables()  # checked even if the body has a prompt, which does not use them
        if body.messages is not None:
            if body.add_special_tokens:
                raise RequestError(
                    "add_special_tokens is true; the chat template decides about special tokens of messages, leave it out.",
                    param="add_special_tokens",
                )
            check_tokenize_bytes(sum(message.num_chars for message in body.messages), limits, param="messages")
            prompt = render_chat(
                tokenizer,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                variables=variables,
                tool_parser=self._router.answer_markup.tool_parser,
                check_length=functools.partial(check_tokenize_tokens, limits=limits, param="messages"),
            )
            return list(prompt.token_ids)
        text = body.prompt or ""
        check_tokenize_bytes(len(text.encode("utf-8", "surrogatepass")), limits, param="prompt")
        return tokenizer.encode(
            text,
            add_special_tokens=body.add_special_tokens is not False,
            check_length=functools.partial(check_tokenize_tokens, limits=limits, param="prompt"),
        )
