"""The parsers `deepseek_v32`, `deepseek_v4` and `deepseek_v41`: DSML, an XML-like markup whose tag names begin with `｜DSML｜`.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

`｜DSML｜` is one token. A parameter with `string="true"` is a raw string, and one with `string="false"` is JSON. A parameter goes
up to its end tag; other tags inside it are text. V3.2 calls the block `function_calls`, and V4.1 `calls` with a space after
`｜DSML｜`. Each of the parsers reads all forms.

`minimax_m2`: the same tags without `｜DSML｜`, in a block `minimax:tool_call`. The tool's schema tells which parameters are JSON.
"""

import re
from collections.abc import Sequence
from functools import partial

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.parameter_grammar import ParameterMarkup, parameter_rules
from transom_core.text.markup.parameters import ParameterWriter
from transom_core.text.markup.reader import MalformedMarkupError, Markers, Reading
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_TOKEN = "｜DSML｜"
_BLOCKS = ("tool_calls", " calls", "function_calls")
_INVOKE = re.compile(r'\s+name="(?P<name>[^"]+)"\s*(?P<is_empty>/?)')
_PARAMETER = re.compile(r'\s+name="(?P<name>[^"]*)"(?:\s+string="(?P<string>true|false)")?\s*')
_STRING, _JSON = '" string="true">', '" string="false">'
_LINE_END = "\n"
_NAMES = re.compile(r'[^"<>\n]*')
_TAG_ENDS = Markers([">", _TOKEN])


class DsmlTools(ToolMarkup):
    """Tool calls in DSML, or in tags of the same names without a token in them."""

    def __init__(self, block: str, token: str = _TOKEN) -> None:
        """`block` is what the family calls a block, and `token` is in each tag."""
        self._block, self._token = block, token
        blocks = sorted(_BLOCKS, key=lambda name: name != block) if token else (block,)
        self.openers = tuple(f"<{token}{name}>" for name in blocks)
        self.markers = (token or f"</{block}>",)
        self.inner_tokens = (token,) if token else ()

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the calls of one block."""
        reader = calls.reader
        tags = _Tags(self._token, " " if opener.endswith(" calls>") else "")
        yield from reader.skip_space()
        while not (yield from reader.skip(opener.replace("<", "</"))):
            yield from reader.expect(tags.invoke)
            yield from _read_call(calls, tags)
            yield from reader.skip_space()

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the calls and the end of the block."""
        tags = _Tags(self._token, " " if self._block.startswith(" ") else "")
        string, other = (_STRING, _JSON) if self._token else ('">', '">')
        markup = ParameterMarkup(
            before_name=lark.marker(tags.parameter + ' name="'),
            before_value=lambda kind: lark.literal(string if kind == "string" else other),
            end=tags.parameter_end,
            after=lark.literal(_LINE_END),
            names=_NAMES,
        )
        calls = []
        for tool in tools:
            begin = lark.marker(f'{tags.invoke} name="{tool.name}">') + " " + lark.literal(_LINE_END)
            end = lark.marker(tags.invoke_end) + " " + lark.literal(_LINE_END)
            calls.append(f"{begin} {parameter_rules(lark, tool.parameters, markup)} {end}")
        each = lark.rule("invoke", " | ".join(calls))
        block_end = lark.marker(f"</{self._token}{self._block}>")
        return f"{lark.literal(_LINE_END)} {each}{'+' if parallel else ''} {block_end}"


class _Tags:
    """The tags inside a block; `space` is what comes after the token: a space in V4.1's form, nothing in the others."""

    def __init__(self, token: str, space: str) -> None:
        self.invoke = f"<{token}{space}invoke"
        self.invoke_end = f"</{token}{space}invoke>"
        self.parameter = f"<{token}{space}parameter"
        self.parameter_end = f"</{token}{space}parameter>"
        self.parameter_ends = Markers([self.parameter_end])


def _read_call(calls: CallReading, tags: _Tags) -> Reading[None]:
    """Read a call after `<｜DSML｜invoke`."""
    reader = calls.reader
    invoke = yield from _read_attributes(calls, _INVOKE)
    calls.begin(invoke["name"])
    parameters = ParameterWriter(calls, invoke["name"])
    if not invoke["is_empty"]:
        yield from reader.skip_space()
        while not (yield from reader.skip(tags.invoke_end)):
            yield from reader.expect(tags.parameter)
            yield from _read_parameter(calls, parameters, tags)
            yield from reader.skip_space()
    parameters.end()
    calls.end()


def _read_parameter(calls: CallReading, parameters: ParameterWriter, tags: _Tags) -> Reading[None]:
    attributes = yield from _read_attributes(calls, _PARAMETER)
    is_string = None if attributes["string"] is None else attributes["string"] == "true"
    read = partial(calls.reader.until, tags.parameter_ends)
    yield from parameters.read_typed(attributes["name"], is_string, read)


def _read_attributes(calls: CallReading, pattern: re.Pattern[str]) -> Reading[re.Match[str]]:
    """Read the rest of a tag, and return its attributes as a match of `pattern`."""
    text, end = yield from calls.reader.text_until(_TAG_ENDS)
    attributes = pattern.fullmatch(text)
    if attributes is None or end != ">":
        raise MalformedMarkupError
    return attributes
