"""The routes between text and token ids: /tokenize, /detokenize."""

from __future__ import annotations

import functools

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from transom_cluster.http.request_preparation import RequestPreparation
from transom_cluster.openai.answer.response_types import Text, Tokens
from transom_cluster.openai.fair_threads import ClientThreads
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS, chat_prompt
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.completion_request import DetokenizeRequest, TokenizeRequest
from transom_cluster.openai.request.field_rules import NO_RULES, TOKENIZE_RULES
from transom_cluster.openai.request.token_id_lists import check_vocabulary
from transom_cluster.router.router import Router
from transom_core.errors import RequestError
from transom_core.text.chat_template import Prompt

_TOKENIZE = BodyParser(TokenizeRequest, TOKENIZE_RULES)
_DETOKENIZE = BodyParser(DetokenizeRequest, NO_RULES)


class TokenizeRoutes:
    """Route handlers for one router; no worker takes part."""

    def __init__(self, router: Router, preparation: RequestPreparation) -> None:
        self._router = router
        self._preparation = preparation

    def add_routes(self, api: FastAPI) -> None:
        """Add the routes to the app."""
        for path, handler in (("/tokenize", self.tokenize), ("/detokenize", self.detokenize)):
            api.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        threads = self._preparation.client_threads(request)
        body = await self._preparation.parse(request, _TOKENIZE, threads)
        await self._router.prepare(body.model)
        tokenizer, limits = self._router.tokenizer, self._router.limits.current
        token_ids = (await self._tokenize_prompt(body, threads)).token_ids

        def answer() -> Response:
            texts = {i: tokenizer.token(i) for i in set(token_ids)} if body.return_token_strs else {}
            tokens: Tokens = {
                "count": len(token_ids),
                "max_model_len": limits.max_model_len,
                "tokens": list(token_ids),
                "token_strs": [texts[i] for i in token_ids] if body.return_token_strs else None,
            }
            return Response(msgspec.json.encode(tokens), media_type="application/json")

        return await threads.run(answer, num_chars=len(token_ids), inline_chars=MAX_INLINE_CHARS)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        threads = self._preparation.client_threads(request)
        body = await self._preparation.parse(request, _DETOKENIZE, threads)
        await self._router.prepare(body.model)
        limits, decode = self._router.limits.current, self._router.tokenizer.decode

        def answer() -> Response:
            token_ids = body.token_ids(limits)
            check_vocabulary(token_ids, limits.vocab_size, param="tokens")
            return JSONResponse(Text(prompt=decode(token_ids, skip_special_tokens=False)))

        return await threads.run(answer, num_chars=len(memoryview(body.tokens)), inline_chars=MAX_INLINE_CHARS)

    async def _tokenize_prompt(self, body: TokenizeRequest, threads: ClientThreads) -> Prompt:
        tokenizer = self._router.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        num_chars = body.num_variable_bytes  # with a prompt they have no effect, and are checked all the same
        variables = await threads.run(body.template_variables, num_chars=num_chars, inline_chars=MAX_INLINE_CHARS)
        if body.messages is not None:
            if body.add_special_tokens:
                raise RequestError(
                    "add_special_tokens is true; the chat template decides about special tokens of messages, leave it out.",
                    param="add_special_tokens",
                )
            return await chat_prompt(
                tokenizer,
                body.messages,
                threads=threads,
                add_generation_prompt=body.add_generation_prompt,
                variables=variables,
                num_variable_chars=num_chars,
                tool_parser=self._router.answer_markup.tool_parser,
            )
        text, add_special = body.prompt or "", body.add_special_tokens is not False
        encode = functools.partial(tokenizer.encode, text, add_special_tokens=add_special)
        ids = await threads.run(encode, num_chars=len(text), inline_chars=MAX_INLINE_CHARS)
        return Prompt(token_ids=tuple(ids))
