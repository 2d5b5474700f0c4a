"""vLLM's field `prompt_logprobs`: the log-probabilities of a prompt's tokens, beside the answer."""

from __future__ import annotations

from typing import Any

from tests.cluster.conftest import Api

PROMPT = "user:hi;assistant:"


def entries(text: str, num_top: int) -> list[Any]:
    """As the stub worker makes them: each token at rank 1, and its successors after it."""
    found: list[Any] = [None]
    for character in text[1:]:
        ranks = range(max(num_top, 1))
        found.append(
            {
                str(ord(character) + k): {
                    "logprob": -0.5 - k,
                    "rank": k + 1,
                    "decoded_token": chr(ord(character) + k),
                }
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
