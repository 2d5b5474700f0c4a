"""vLLM's field `prompt_logprobs`, the log-probabilities of a prompt's tokens beside the answer; and responses with very many
log-probabilities: a stated bound, the prompt's computed once, JSON in pieces, memory in arrays."""

import contextlib
import json
import tracemalloc
from typing import Any

import pytest

from tests.cluster.conftest import Api, running_api, stream_events
from tests.cluster.stub_worker import ByteTokenizer, logprobs_of
from transom_cluster.openai.answer import json_pieces as pieces
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.completion_writer import CompletionWriter, EchoedPrompt
from transom_cluster.openai.answer.writers import ResponseMetadata, ResponseWriter
from transom_cluster.openai.request.request_limits import MAX_LOGPROB_ENTRIES, ModelLimits, check_logprob_budget
from transom_core.contract import LogprobTable, OutputEvent, Request, SamplingParams
from transom_core.errors import RequestError

METADATA = ResponseMetadata(id="cmpl-x", model="m", created_s=0)
LONG = {"prompt": "a" * 400, "echo": True, "logprobs": 20, "max_tokens": 2}
MESSAGE_BYTES = 4 * pieces.PIECE_CHARS  # one message holds a piece, and what made it large enough


def requests(num_prompt_tokens: int, n: int, **params: Any) -> list[Request]:
    return [
        Request(
            request_id=f"r-0-{i}",
            prompt_token_ids=(97,) * num_prompt_tokens,
            params=SamplingParams(**params),
            seed=0,
            choice_index=i,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("lengths", "params", "max_model_len", "is_refused"),
    [
        # 4,200,000 entries, and none of outputs
        ([1000] * 2, {"n": 100, "prompt_logprobs": 20, "max_tokens": 1}, 2000, True),
        ([1], {"n": 4, "logprobs": 20, "max_tokens": 50_000}, 60_000, True),  # a long answer in four choices
        ([1], {"n": 40, "logprobs": 0, "max_tokens": None}, 131_072, True),  # up to the model's length
        ([1000], {"n": 128, "logprobs": 20, "max_tokens": 16}, 2000, False),  # a prompt without echo does not count
        ([5], {"logprobs": 0, "max_tokens": None}, 10_000_000, False),  # one sequence of the model's length
    ],
)
def test_too_many_log_probabilities_are_refused_with_the_numbers(
    lengths: list[int], params: dict[str, Any], max_model_len: int, is_refused: bool
) -> None:
    limits = ModelLimits(max_model_len=max_model_len, vocab_size=1000)
    refusal = pytest.raises(RequestError, match=f"At most {MAX_LOGPROB_ENTRIES:,} are allowed")
    with refusal if is_refused else contextlib.nullcontext():
        check_logprob_budget(lengths, SamplingParams(**params), limits, param="logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_computes_the_prompt_for_all(stream: bool) -> None:
    """Every choice shows what a request for one choice shows; only the first asks the worker for it."""
    async with running_api() as api:
        alone = (await api.complete(**LONG)).json()["choices"][0]
        api.worker.submitted.clear()
        call = api.call("/v1/completions", {**LONG, "n": 8, "stream": stream})
        await call.ended()
        asked = {one.choice_index: one.params.prompt_logprobs for one in api.worker.submitted}
        assert asked == {0: 20, **dict.fromkeys(range(1, 8))}
    assert max(len(message.get("body", b"")) for message in call.sent) < MESSAGE_BYTES
    assert len(call.text) > 2 * MESSAGE_BYTES
    headers = dict(call.sent[0]["headers"])
    assert b"content-length" not in headers
    if not stream:
        assert headers[b"content-type"] == b"application/json"
        choices = json.loads(call.text)["choices"]
        assert choices == [{**alone, "index": index} for index in range(8)]
        return
    for index in range(8):
        parts = [one for chunk in stream_events(call.text) for one in chunk["choices"] if one["index"] == index]
        assert "".join(part["text"] for part in parts) == alone["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        shown = [part["logprobs"] for part in parts if part["logprobs"]]
        assert max(len(one["tokens"]) for one in shown) == pieces.VALUES_PER_PIECE
        assert {name: [v for one in shown for v in one[name]] for name in alone["logprobs"]} == alone["logprobs"]


def writers(num_tokens: int, n: int) -> list[ResponseWriter]:
    """Writers of plain responses that have all events: an echoed prompt with 20 alternatives, and a chat's long answers."""
    tokenizer: Any = ByteTokenizer()
    asked = requests(num_tokens, n, logprobs=20, prompt_logprobs=20)
    echoed = [EchoedPrompt(text="a" * num_tokens, token_ids=(97,) * num_tokens)] * n
    completion = CompletionWriter(METADATA, asked, tokenizer, num_top_logprobs=20, echoed=echoed)
    table = LogprobTable.of(logprobs_of(97, 20) for _ in range(num_tokens - 1))
    chat = ChatWriter(METADATA, asked, tokenizer, num_top_logprobs=20)
    for index in range(n):
        end = OutputEvent(request_id="r", position=0, finish_reason="length", prompt_logprobs=None if index else table)
        completion.add(index, end)
        for position in range(num_tokens):
            token = OutputEvent(request_id="r", position=position, text="a", logprobs=(logprobs_of(97, 20),))
            chat.add(index, token)
        chat.add(index, end)
    return [completion, chat]


def test_memory_while_a_response_is_kept_and_written() -> None:
    """An entry takes 12 bytes until it is sent; 42,000 of them take some 130 bytes each as objects, and more as JSON."""
    num_tokens, n = 250, 8
    num_entries = num_tokens * n * 21
    writers(num_tokens, 1)  # so that Python's lists of unused objects are full
    tracemalloc.start()
    try:
        made = writers(num_tokens, n)
        kept = tracemalloc.get_traced_memory()[0]
        assert kept < 1.5 * 12 * (num_entries + num_entries / n) + 200_000
        for writer, least_bytes in zip(made, (9, 40), strict=True):
            tracemalloc.reset_peak()
            sizes = [len(piece) for piece in pieces.joined_pieces(pieces.json_pieces(writer.body()))]
            written = tracemalloc.get_traced_memory()[1] - kept
            assert sum(sizes) > least_bytes * num_entries
            assert max(sizes) < MESSAGE_BYTES
            assert written < 8 * MESSAGE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_lazy_lists_are_written_as_lists(count: int) -> None:
    values = [{"é": [at, None], "x": f'"{at}"'} for at in range(count)]
    body = {"a": {"lazy": pieces.LazyList(lambda: values), "empty": {}}, "b": [{"c": [1.5, "ü"]}], "d": []}
    text = "".join(pieces.joined_pieces(pieces.json_pieces(body)))
    assert json.loads(text) == {"a": {"lazy": values, "empty": {}}, "b": [{"c": [1.5, "ü"]}], "d": []}
    assert " " not in text


PROMPT = "user:hi;assistant:"


def entries(text: str, num_top: int) -> list[Any]:
    """As the stub worker makes them: each token at rank 1, and its successors after it."""
    found: list[Any] = [None]
    for character in text[1:]:
        ranks = range(max(num_top, 1))
        found.append(
            {
                str(ord(character) + k): {"logprob": -0.5 - k, "rank": k + 1, "decoded_token": chr(ord(character) + k)}
                for k in ranks
            }
        )
    return found


async def test_a_chat_has_them_beside_its_choices(api: Api) -> None:
    for num_top in (0, 1, 2):
        answer = (await api.chat(prompt_logprobs=num_top, n=2)).json()
        assert answer["prompt_logprobs"] == entries(PROMPT, num_top)
        assert len(answer["choices"]) == 2
    assert "prompt_logprobs" not in (await api.chat()).json()


async def test_a_completion_has_them_in_each_choice(api: Api) -> None:
    answer = (await api.complete(prompt=["hi", "you"], prompt_logprobs=1, n=2)).json()
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [entries("hi", 1)] * 2 + [entries("you", 1)] * 2
    assert "prompt_logprobs" not in (await api.complete()).json()["choices"][0]


async def test_an_echo_with_fewer_alternatives_does_not_have_more(api: Api) -> None:
    (choice,) = (await api.complete(prompt="hi", prompt_logprobs=2, echo=True, logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"] == entries("hi", 2)
    assert choice["logprobs"]["top_logprobs"][1] == {"i": -0.5}


async def test_a_prompt_of_one_token(api: Api) -> None:
    (choice,) = (await api.complete(prompt="h", prompt_logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"] == [None]
