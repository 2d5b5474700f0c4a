"""GBNF and structural tags become Lark that allows the same texts; what cannot be read is refused with its field's name."""

from typing import Any

import pytest

from tests.core.grammar.vocabularies import tiny, tiny_vocabulary
from transom_core.errors import RequestError
from transom_core.grammar import compile_grammar
from transom_core.grammar.dialects import MAX_STRUCTURES, lark_of_grammar, lark_of_structural_tag

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD = {"begin": "<function=add>", "schema": INTEGER, "end": "</function>"}
SAY = {"begin": "<function=say>", "schema": {"type": "object"}, "end": "</function>"}
GBNF = """
# a list
root  ::= "- " item ("\\n- " item)*
item  ::= [a-z]+ | num{2,3}
num   ::= [0-9]
"""


def accepts(lark: str, text: str) -> bool:
    """Whether the grammar allows the whole text, and the answer to end there."""
    matcher = compile_grammar(lark, tiny_vocabulary())
    for token in tiny().encode(text, add_special_tokens=False):
        try:
            matcher.consume(token)
        except Exception:
            return False
        if matcher.has_failed:
            return False
    return matcher.may_end


def structural(tag: dict[str, Any], marker_id: Any = lambda _: None) -> str:
    return lark_of_structural_tag(tag, marker_id=marker_id, param="tag")


def test_gbnf_allows_its_texts() -> None:
    lark = lark_of_grammar(GBNF, param="g")
    assert accepts(lark, "- abc\n- 12\n- 123")
    assert not accepts(lark, "- 1")
    assert not accepts(lark, "abc")


def test_lark_stays_as_it_is() -> None:
    lark = 'start: A "::= b"\nA: /x+/\n'
    assert lark_of_grammar(lark, param="g") == lark


@pytest.mark.parametrize(
    "text",
    [
        *('root ::= "a', "root ::= [a", "root ::= (a", "root ::= b", 'a ::= "x"', "root ::= a{", "root ::= \\"),
        *("root ::= " + "(" * 9000, "a ::= b\n" * 257, "root ::= " + "a " * 20_000),
    ],
    ids=lambda text: text[:16],
)
def test_wrong_gbnf_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        lark_of_grammar(text, param="guided_grammar")
    assert caught.value.param == "guided_grammar"


def test_a_structure_begins_at_its_trigger_and_nowhere_else() -> None:
    lark = structural({"structures": [ADD, SAY], "triggers": ["<function="]})
    assert accepts(lark, "Plain text.")
    assert accepts(lark, 'I add: <function=add>{"a": 1}</function> and <function=say>{}</function> done')
    assert not accepts(lark, "<function=other>{}</function>")
    assert not accepts(lark, '<function=add>{"a": "x"}</function>')
    assert not accepts(lark, '<function=add>{"a": 1}')


def test_xgrammars_form_means_the_same() -> None:
    tag = {"begin": ADD["begin"], "content": {"type": "json_schema", "json_schema": INTEGER}, "end": ADD["end"]}
    form = {"type": "triggered_tags", "triggers": ["<function="], "tags": [tag]}
    expected = structural({"structures": [ADD], "triggers": ["<function="]})
    assert structural({"type": "structural_tag", "format": form}) == expected


def test_a_trigger_that_is_a_marker_is_its_token() -> None:
    lark = structural({"structures": [{**ADD, "begin": "<|call|>add"}], "triggers": ["<|call|>"]}, {"<|call|>": 7}.get)
    assert 'tag_0: TAG_TEXT <[7]> "add" %json' in lark


@pytest.mark.parametrize(
    ("tag", "param"),
    [
        ({}, "tag"),
        ({"structures": [ADD]}, "tag"),
        ({"structures": [ADD], "triggers": ["<function="], "x": 1}, "tag"),
        ({"format": {"type": "sequence", "elements": []}}, "tag"),
        ({"structures": [], "triggers": ["<"]}, "tag.structures"),
        ({"structures": [ADD] * (MAX_STRUCTURES + 1), "triggers": ["<"]}, "tag.structures"),
        ({"structures": [ADD, {"begin": "<", "end": ""}], "triggers": ["<"]}, "tag.structures[1]"),
        ({"structures": [ADD], "triggers": ["<tool"]}, "tag.structures[0].begin"),
        ({"structures": [ADD], "triggers": [5, ""]}, "tag.structures[0].begin"),
        ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<"}]}}, "tag.format.tags[0]"),
    ],
)
def test_a_wrong_tag_is_named(tag: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        structural(tag)
    assert caught.value.param == param
