"""`RequestPreparation`: prepares HTTP requests with prompts: reads the body, renders the chat, and builds the engine requests.

Engine request: a `contract.Request`; one HTTP request becomes one engine request per prompt and choice (`n`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from transom_cluster.http.api_keys import client_cache_salt
from transom_cluster.http.client_disconnect import raise_on_disconnect
from transom_cluster.http.request_state import RequestState, request_state
from transom_cluster.openai.answer.answer_markup import AnswerMarkup
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_answer import ChatAnswer
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_cluster.openai.engine_requests import build_requests
from transom_cluster.openai.fair_threads import ClientThreads, RequestThreads
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS, chat_prompt
from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_cluster.openai.request.body import BodyParser, Model
from transom_cluster.openai.request.body_shape import SMALL_BODY_BYTES
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.kv_policy_field import kv_policy_of
from transom_cluster.openai.request.request_limits import ModelLimits
from transom_cluster.openai.request.sampling_fields import SamplingFields
from transom_cluster.router.router import Router
from transom_core import contract
from transom_core.contract import KvPolicy, SamplingParams
from transom_core.errors import RequestTimeout
from transom_core.grammar import CheckedGrammar
from transom_core.text.chat_template import Prompt
from transom_core.text.markup.context import AnswerContext

MAX_INLINE_TOKENS = 16_384
PROMPT_END_CHARS = 200  # enough to see whether the template has begun the answer, for example with `<think>`

logger = logging.getLogger("transom.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that is ready to run, with an engine request and an answer parser for each choice. `is_parsed` is true if an answer
    may have other parts than its message."""

    params: SamplingParams
    requests: Sequence[contract.Request]
    answers: Sequence[ChatAnswer]
    is_parsed: bool


class RequestPreparation:
    """Prepares the requests of one router. Long work runs on threads, where clients take turns."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._threads = RequestThreads()

    def client_threads(self, request: Request) -> ClientThreads:
        """Return the threads for this request's long work, where its client takes turns with others."""
        left = functools.partial(raise_on_disconnect, request.receive)
        return ClientThreads(self._threads, request_state(request.scope).sharer, left)

    async def body(self, request: Request) -> bytes:
        """Wait for a request's body. Raises RequestTimeout if it does not arrive in time."""
        try:
            async with asyncio.timeout(self._router.config.limits.request_timeout_s):
                return await request.body()
        except TimeoutError:
            raise RequestTimeout("The request's body did not arrive in time; send it faster, or send less.") from None

    async def parse(self, request: Request, parser: BodyParser[Model], threads: ClientThreads) -> Model:
        """Wait for a request's body, and parse and check it.

        Raises:
            RequestTimeout: the body did not arrive in time.
            RequestError: the body is not JSON, or a field is wrong; `param` names it.
        """
        raw = await self.body(request)
        return await threads.run(lambda: parser.parse(raw), num_chars=len(raw), inline_chars=SMALL_BODY_BYTES)

    async def prepare_chat(
        self,
        state: RequestState,
        metadata: ResponseMetadata,
        body: ChatCompletionRequest,
        threads: ClientThreads,
    ) -> PreparedChat:
        """Render a chat, and build the grammar of its answer, its engine requests, and the parsers of their output.

        Raises:
            RequestError: a field is wrong or out of range, or the model cannot do what it asks for; `param` names the field.
        """
        params = body.params()
        kv_policy, limits = self.kv_policy(body, params)
        tokenizer, markup = self._router.tokenizer, self._router.answer_markup
        read_options = functools.partial(body.answer_options, markup.reasoning_parser, tokenizer.marker_id)
        options = await threads.run(read_options, num_chars=body.num_option_bytes, inline_chars=MAX_INLINE_CHARS)
        markup.check_demand(options.tools_demand)
        prompt = await chat_prompt(
            tokenizer,
            body.messages,
            threads=threads,
            add_generation_prompt=body.add_generation_prompt,
            variables=options.prompt_variables,
            num_variable_chars=options.num_chars,
            tool_parser=markup.tool_parser,
            limits=limits,
        )
        context = markup.context(options, prompt_end=prompt.text[-PROMPT_END_CHARS:])
        grammar = await self.grammar(markup, options, context, threads)
        requests = await self.engine_requests(
            state,
            metadata,
            body,
            [prompt],
            params,
            limits,
            kv_policy,
            threads=threads,
            grammar=grammar,
            prompt_param="messages",
        )
        answers = [
            ChatAnswer(
                AnswerReader(tokenizer, one.params, markup.format.parser(tokenizer, context)),
                include_reasoning=options.include_reasoning,
                parallel_tool_calls=options.tools_demand is None or options.tools_demand.parallel,
            )
            for one in requests
        ]
        return PreparedChat(params=params, requests=requests, answers=answers, is_parsed=context.is_parsed)

    async def grammar(
        self, markup: AnswerMarkup, options: AnswerOptions, context: AnswerContext, threads: ClientThreads
    ) -> CheckedGrammar | None:
        """Write the grammar that constrains a request's answers, and check it before a worker gets it; None if the request has no
        constraint.

        Example: a chat with `tools` and `tool_choice` "required" gets a grammar that allows the model to think, and then to write
        only calls of these tools.

        Raises:
            RequestError: no grammar can express the constraint, or the check refuses it; `param` names the field.
        """
        demand, checker = options.form.demand, self._router.grammar_checker
        write = functools.partial(
            markup.format.grammar, self._router.tokenizer, context, message=demand, tools=options.tools_demand
        )
        grammar = await threads.run(write, num_chars=options.num_chars, inline_chars=MAX_INLINE_CHARS)
        if grammar is None:
            return None
        check = functools.partial(checker.check, grammar, param=options.form.param or "tools", client=threads.client)
        return check() if checker.is_known(grammar) else await threads.check(check)

    def kv_policy(self, body: SamplingFields, params: SamplingParams) -> tuple[KvPolicy | None, ModelLimits]:
        """Return a request's KV policy, which is its own or the server's default, and its limits: a policy may allow longer
        streams.

        Raises:
            RequestError: the model does not support the policy.
        """
        policy = kv_policy_of(body.kv_policy, self._router.kv_policy)
        limits = replace(self._router.limits.current, max_choices=self._router.config.limits.max_choices)
        return policy, limits.with_kv_policy(policy, kv_quality=bool(body.kv_quality), max_tokens=params.max_tokens)

    async def engine_requests(
        self,
        state: RequestState,
        metadata: ResponseMetadata,
        body: SamplingFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        limits: ModelLimits,
        kv_policy: KvPolicy | None,
        *,
        threads: ClientThreads,
        grammar: CheckedGrammar | None,
        prompt_param: str,
    ) -> list[contract.Request]:
        """Build the engine requests. To what the client sent, the server adds a seed, a deadline and, with `--salt-by-key`, a cache
        salt of the client."""
        router, config = self._router, self._router.config
        if config.log_prompts:
            for prompt in prompts:
                text = router.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
                logger.info("The prompt of %s: %r", metadata.id, text)
        timeout_s = config.limits.request_timeout_s
        build = functools.partial(
            build_requests,
            metadata.id,
            prompts,
            params,
            limits,
            client=state.sharer,
            client_weight=state.weight,
            engine_seed=router.engine_seed,
            time_left_s=None if timeout_s is None else max(0.0, timeout_s - state.age_s),
            priority=body.priority or 0,
            max_priority=config.priorities.max_priority,
            cache_salt=client_cache_salt(body.cache_salt, state.client) if config.salt_by_key else body.cache_salt,
            prompt_cache_key=body.prompt_cache_key,
            kv_policy=kv_policy,
            kv_quality=bool(body.kv_quality),
            grammar=grammar,
            prompt_param=prompt_param,
            logprobs_param="top_logprobs" if prompt_param == "messages" else "logprobs",
        )
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return await threads.run(build, num_chars=num_tokens, inline_chars=MAX_INLINE_TOKENS)
