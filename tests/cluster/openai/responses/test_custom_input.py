"""The text of a custom tool's call, from JSON that comes in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from transom_cluster.openai.responses.custom_input import CustomInput


@given(text=st.text(), is_ascii=st.booleans(), data=st.data())
@settings(max_examples=num_examples(80, 5000), deadline=None)
def test_any_split_gives_the_text(text, is_ascii, data):
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)))))
    reader = CustomInput()
    pieces = [reader.push(arguments[a:b]) for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    assert "".join(pieces) + reader.end() == reader.text == text


@pytest.mark.parametrize("arguments", ["", "{}", "ls -l", '{"cmd": "ls"}', '{"input": 1}'])
def test_other_arguments_are_given_as_they_are(arguments):
    reader = CustomInput()
    assert reader.push(arguments) + reader.end() == reader.text == arguments


def test_a_text_that_is_cut_keeps_what_came():
    reader = CustomInput()
    assert reader.push('{"input": "ls \\') + reader.end() == "ls \\"
