"""Answers: when they end, what they hold back, and that a replay rebuilds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_worker.contract import Request, SamplingParams
from transom_worker.engine.output import Answer, StopStrings


class Letters:
    """A tokenizer whose token i is the i-th letter; 25 ("z") is the end of text."""

    vocab_size = 26

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 25

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == 25))


def ids(text: str) -> list[int]:
    return [ord(c) - 97 for c in text]


def answer(resumed: str = "", **params: object) -> Answer:
    request = Request(
        request_id="r",
        prompt_token_ids=(0,),
        params=SamplingParams(**{"max_tokens": 100, **params}),  # type: ignore[arg-type]
        seed=0,
        resumed_output_ids=tuple(ids(resumed)),
    )
    return Answer(request, Letters(), eos_token_ids=frozenset({25}), max_model_len=50)  # type: ignore[arg-type]


def run(text: str, **params: object) -> tuple[str, str | None, int | str | None]:
    """Text, finish and stop reason of an answer that gets `text` letter by letter."""
    one, out = answer(**params), ""
    for token in ids(text):
        progress = one.push(token)
        assert progress.text_offset == len(out)
        out += progress.text
        if progress.finish_reason:
            return out, progress.finish_reason, progress.stop_reason
    return out, None, None


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        ("abcz", {}, ("abc", "stop", None)),
        ("abczd", {"ignore_eos": True, "max_tokens": 5}, ("abcd", "length", None)),
        ("abcdef", {"stop": ("cd",)}, ("ab", "stop", "cd")),
        ("abcdef", {"stop": "cd"}, ("ab", "stop", "cd")),
        ("abcdef", {"stop": ("cd",), "include_stop_str_in_output": True}, ("abcd", "stop", "cd")),
        ("abcdef", {"stop": ("de", "cd")}, ("ab", "stop", "cd")),
        ("abcdef", {"stop_token_ids": (3,)}, ("abc", "stop", 3)),
        ("abcdef", {"stop_token_ids": (3,), "include_stop_str_in_output": True}, ("abcd", "stop", 3)),
        ("abcdef", {"max_tokens": 2}, ("ab", "length", None)),
        ("abcdef", {"max_tokens": 3, "stop": ("cx",)}, ("abc", "length", None)),
        ("abcz", {"stop": ("cx",)}, ("abc", "stop", None)),
        ("cdabcd", {"stop": ("cd",), "min_tokens": 3}, ("cdab", "stop", "cd")),
        ("zzabz", {"min_tokens": 3}, ("ab", "stop", None)),
        ("aabaac", {"stop": ("aac",)}, ("aab", "stop", "aac")),
    ],
)
def test_how_answers_end(text: str, params: dict[str, object], expected: tuple[object, ...]) -> None:
    assert run(text, **params) == expected


def test_length_is_cut_to_the_models() -> None:
    assert run("a" * 60, max_tokens=None) == ("a" * 49, "length", None)


def test_only_a_possible_stop_is_held_back() -> None:
    stops = StopStrings(("abc",), include=False)
    assert stops.push("xab", may_stop=True) == ("x", None)
    assert stops.push("d", may_stop=True) == ("abd", None)
    assert stops.push("ab", may_stop=True) == ("", None)
    assert stops.flush() == "ab"


@given(
    text=st.text(alphabet="abcz", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
    cut=st.integers(0, 20),
)
def test_a_replay_goes_on_where_the_first_stopped(
    text: str, stops: list[str], min_tokens: int, include: bool, cut: int
) -> None:
    params = {"stop": tuple(stops), "min_tokens": min_tokens, "include_stop_str_in_output": include, "max_tokens": 18}
    whole, progress = answer(**params), []
    for token in ids(text):
        progress.append(whole.push(token))
        if progress[-1].finish_reason:
            break
    cut = min(cut, len(progress))
    again = answer(resumed=text[:cut], **params)
    if cut == len(progress) and progress and progress[-1].finish_reason:
        assert again.finished == progress[-1]
        return
    assert again.finished is None
    assert [again.push(token) for token in ids(text[cut : len(progress)])] == progress[cut:]
