"""A body's strings, arrays and objects are counted exactly, and too many of them are refused before anything is parsed."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_cluster.openai.request import body_shape
from transom_cluster.openai.request.body_shape import MAX_CONTAINERS, MAX_STRINGS, SMALL_BODY_BYTES, check_shape
from transom_core.errors import RequestError

STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
values = st.recursive(
    st.text('a"\\[{,\n\u00e9', max_size=9) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[', max_size=3), inner, max_size=3),
)


@given(value=values, piece_bytes=st.integers(1, 9))
def test_strings_are_left_out_wherever_pieces_are_cut(value, piece_bytes):
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_shape, "PIECE_BYTES", piece_bytes)
        outside = b"".join(body_shape._outside_strings(body))
    assert outside == STRING.sub(b"", body)


def padded(body: str) -> bytes:
    """A body that is long enough to be looked at."""
    return body.encode() + b" " * SMALL_BODY_BYTES


@pytest.mark.parametrize(
    ("before", "unit", "most", "reason"),
    [
        ('"' + "[]," * MAX_CONTAINERS + '",', "[],", MAX_CONTAINERS - 1, "arrays and objects"),
        ('"' + "{}," * MAX_CONTAINERS + '",', "{},", MAX_CONTAINERS - 1, "arrays and objects"),
        ("", r'"\"",', MAX_STRINGS, "65,536 strings"),
    ],
    ids=["arrays", "objects", "strings"],
)
def test_the_limits_count_what_is_outside_of_strings(before, unit, most, reason):
    check_shape(padded("[" + before + unit * most))
    with pytest.raises(RequestError, match=reason):
        check_shape(padded("[" + before + unit * (most + 1)))
