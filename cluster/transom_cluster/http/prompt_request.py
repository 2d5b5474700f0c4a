"""`PromptRequest`: prepares one HTTP request with a prompt, from its body to the engine requests that workers compute.

    request = PromptRequest(router, threads, http_request, id_prefix="chatcmpl-")
    body = await request.parse(parser)    # waits for the body, and for the model's limits
    chat = await request.chat(body)       # renders the chat, writes its grammar, and builds the engine requests

Engine request: a `contract.Request`; one HTTP request becomes one engine request per prompt and choice (`n`). Example: 2 prompts
with `n` 3 become 6 requests `cmpl-x-0-0`, `cmpl-x-0-1`, ... `cmpl-x-1-2`.

A request is validated in two places: here, before it leaves the router, and at the worker (`scheduling.request_validation`), which
does not rely on the router's checks.
"""

import asyncio
import functools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from transom_cluster.http.client_threads import ClientThreads, RequestThreads
from transom_cluster.http.request_middleware import set_response_id
from transom_cluster.http.request_state import request_state, routed_path
from transom_cluster.openai.answer.answer_markup import AnswerMarkup
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS, render_chat
from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_cluster.openai.request.body import BodyParser, Model
from transom_cluster.openai.request.body_shape import SMALL_BODY_BYTES
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.kv_policy_field import kv_policy_of
from transom_cluster.openai.request.request_limits import ModelLimits, check_length, check_prompts
from transom_cluster.openai.request.sampling_fields import SamplingFields
from transom_cluster.router.router import Router
from transom_core import contract
from transom_core.client_queue import Sharer
from transom_core.contract import SamplingParams
from transom_core.errors import RequestTimeout
from transom_core.grammar import CheckedGrammar
from transom_core.text.chat_template import Prompt
from transom_core.text.markup.context import AnswerContext
from transom_core.text.tokenizer import CheckLength

MAX_INLINE_TOKENS = 16_384  # engine requests with up to this many prompt tokens are built on the event loop
PROMPT_END_CHARS = 200  # enough to see whether the template has begun the answer, for example with `<think>`

logger = logging.getLogger("transom.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that is ready to run, with an engine request and an answer parser for each choice. `is_parsed` is true if an answer
    may have other parts than its message."""

    params: SamplingParams
    requests: Sequence[contract.Request]
    answers: Sequence[AnswerReader]
    is_parsed: bool


class PromptRequest:
    """One HTTP request. Its long work runs on `threads`, where its client takes turns with others.

    With an `id_prefix` the response gets its id at once, before anything can fail, so that the response to an error has it, too.
    """

    def __init__(self, router: Router, threads: RequestThreads, request: Request, *, id_prefix: str = "") -> None:
        self._router = router
        self._request = request
        self.state, self.path = request_state(request.scope), routed_path(request.scope)
        self.threads = ClientThreads(threads, Sharer(self.state.sharer, self.state.weight), request.receive)
        model = router.config.served_model_name  # until the body names it otherwise
        self.metadata = ResponseMetadata(id=f"{id_prefix}{secrets.token_hex(12)}", model=model)
        self._adapter: contract.Adapter | None = None
        if id_prefix:
            set_response_id(self.state, self.metadata.id)

    async def body(self) -> bytes:
        """Wait for the body. Raises RequestTimeout if it does not arrive in time."""
        try:
            async with asyncio.timeout(self._router.config.limits.request_timeout_s):
                return await self._request.body()
        except TimeoutError:
            raise RequestTimeout("The request's body did not arrive in time; send it faster, or send less.") from None

    async def parse(self, parser: BodyParser[Model]) -> Model:
        """Wait for the body, parse and check it, and wait until the model's limits are known.

        Raises:
            RequestTimeout: the body did not arrive in time.
            RequestError: the body is not JSON, or a field is wrong; `param` names it.
            HttpError: the model is not served here (status 404).
            WorkerLost: there is no worker, or the router is being stopped.
        """
        raw = await self.body()
        body = await self.threads.run(lambda: parser.parse(raw), num_chars=len(raw), inline_chars=SMALL_BODY_BYTES)
        await self._router.prepare(body.model)
        self.metadata = replace(self.metadata, model=body.model or self.metadata.model)
        self._adapter = self._router.adapters.get(body.model)
        return body

    async def chat(self, body: ChatCompletionRequest, *, cuts_max_tokens: bool = False) -> PreparedChat:
        """Render a chat, and build the grammar of its answer, its engine requests, and the parsers of their output.

        With `cuts_max_tokens` the answer may ask for more tokens than fit the model's length, and ends there.

        Raises:
            RequestError: a field is wrong or out of range, or the model cannot do what it asks for; `param` names the field.
        """
        params = body.params()
        limits = self.limits(body, params)
        tokenizer, markup = self._router.tokenizer, self._router.answer_markup
        check = functools.partial(check_length, max_tokens=None, limits=limits, param="messages")
        options, prompt = await self.rendered(body, check_length=check)
        if cuts_max_tokens and len(prompt.token_ids) + (params.max_tokens or 0) > limits.longest:
            params = replace(params, max_tokens=None)
        context = markup.context(options, prompt_end=prompt.text[-PROMPT_END_CHARS:])
        grammar = await self.grammar(markup, options, context)
        requests = await self.engine_requests(body, [prompt], params, limits, grammar, prompt_param="messages")
        answers = [
            AnswerReader(
                tokenizer,
                one.params,
                markup.format.parser(tokenizer, context),
                include_reasoning=options.include_reasoning,
                parallel_tool_calls=options.tools_demand is None or options.tools_demand.parallel,
            )
            for one in requests
        ]
        return PreparedChat(params=params, requests=requests, answers=answers, is_parsed=context.is_parsed)

    async def rendered(self, body: ChatCompletionRequest, *, check_length: CheckLength) -> tuple[AnswerOptions, Prompt]:
        """Read a chat's options, and render the chat with them.

        Raises:
            RequestError: a field is wrong, or the model cannot do what it asks for; `param` names the field.
            PromptTooLong: `check_length` refuses the number of tokens.
        """
        tokenizer, markup = self._router.tokenizer, self._router.answer_markup
        read_options = functools.partial(body.answer_options, markup.reasoning_parser, tokenizer.marker_id)
        options = await self.threads.run(read_options, num_chars=body.num_option_bytes, inline_chars=MAX_INLINE_CHARS)
        markup.check_demand(options.tools_demand)
        render = functools.partial(
            render_chat,
            tokenizer,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            variables=options.prompt_variables,
            tool_parser=markup.tool_parser,
            check_length=check_length,
        )
        num_chars = sum(message.num_chars for message in body.messages) + options.num_chars
        return options, await self.threads.run(render, num_chars=num_chars)

    def limits(self, body: SamplingFields, params: SamplingParams) -> ModelLimits:
        """Return the request's limits with its KV policy, which is its own or the server's default: a policy may allow longer
        streams.

        Raises:
            RequestError: the model does not support the policy.
        """
        policy = kv_policy_of(body.kv_policy, self._router.kv_policy)
        limits = replace(self._router.limits.current, max_choices=self._router.config.limits.max_choices)
        return limits.with_kv_policy(policy, kv_quality=bool(body.kv_quality), max_tokens=params.max_tokens)

    async def grammar(
        self, markup: AnswerMarkup, options: AnswerOptions, context: AnswerContext
    ) -> CheckedGrammar | None:
        """Write the grammar that constrains a request's answers, and check it before a worker gets it; None if the request has no
        constraint.

        Example: a chat with `tools` and `tool_choice` "required" gets a grammar that allows the model to think, and then to write
        only calls of these tools.

        Raises:
            RequestError: no grammar can express the constraint, or the check refuses it; `param` names the field.
        """
        tokenizer, checker = self._router.tokenizer, self._router.grammar_checker
        write = functools.partial(
            markup.format.grammar, tokenizer, context, message=options.message, tools=options.tools_demand
        )
        grammar = await self.threads.run(write, num_chars=options.num_chars, inline_chars=MAX_INLINE_CHARS)
        if grammar is None:
            return None
        param = options.message_param or "tools"
        if (verdict := checker.known(grammar)) is not None:
            return verdict.apply(grammar, param=param)
        check = functools.partial(checker.check, grammar, param=param, client=self.state.sharer)
        return await self.threads.check(check, is_patient=functools.partial(checker.is_patient, self.state.sharer))

    async def engine_requests(
        self,
        body: SamplingFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        limits: ModelLimits,
        grammar: CheckedGrammar | None,
        *,
        prompt_param: str,
    ) -> list[contract.Request]:
        """Build one engine request per prompt and choice, in the order of OpenAI's choice indices: all choices of a prompt, then
        the next prompt. `prompt_param` is the field of the prompts.

        To what the client sent, the server adds a deadline and, with `--salt-by-key`, a cache salt of the client. A request without
        a seed gets the engine's configured seed, or else a random seed per prompt. Only the first choice of a prompt asks for the
        prompt's log-probabilities, which all choices share.

        Raises:
            RequestError: the priority is out of range, or see `check_prompts`.
            PromptTooLong: a prompt, or prompt and output together, exceeds the model's length.
        """
        state, config = self.state, self._router.config
        if config.log_prompts:
            for prompt in prompts:
                text = self._router.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
                logger.info("The prompt of %s: %r", self.metadata.id, text)

        def build() -> list[contract.Request]:
            body.check_priority(config.priorities.max_priority)
            check_prompts([prompt.token_ids for prompt in prompts], params, limits, param=prompt_param)
            first = params.single()
            further = first if first.prompt_logprobs is None else replace(first, prompt_logprobs=None)
            timeout_s = config.limits.request_timeout_s
            time_left_s = None if timeout_s is None else max(0.0, timeout_s - state.age_s)
            # With the client in the salt, requests of different clients never share cached prefixes.
            salt = f"{state.client}:{body.cache_salt or ''}" if config.salt_by_key else body.cache_salt
            configured = self._router.engine_seed if params.seed is None else params.seed
            requests = []
            for p, prompt in enumerate(prompts):
                seed = secrets.randbits(63) if configured is None else configured
                requests += [
                    contract.Request(
                        request_id=f"{self.metadata.id}-{p}-{choice}",
                        prompt_token_ids=prompt.token_ids,
                        params=further if choice else first,
                        seed=seed,
                        choice_index=choice,
                        client=state.sharer,
                        client_weight=state.weight,
                        time_left_s=time_left_s,
                        priority=body.priority or 0,
                        cache_salt=salt,
                        adapter=self._adapter,
                        turn_boundaries=prompt.turn_boundaries,
                        cache_marks=prompt.cache_marks,
                        kv_policy=limits.kv_policy,
                        kv_quality=bool(body.kv_quality),
                        grammar=None if grammar is None else grammar.text,
                        grammar_bytes=0 if grammar is None else grammar.num_bytes,
                    )
                    for choice in range(params.n)
                ]
            return requests

        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return await self.threads.run(build, num_chars=num_tokens, inline_chars=MAX_INLINE_TOKENS)
