"""The values of JSON Schema's `format` for strings as regular expressions, for markup that writes strings without quotes.

They are the formats that the grammar library knows, and allow what it allows, so that a tool's schema means the same in every
notation.
"""

from transom_core.errors import RequestError

_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_HOUR_MINUTE})"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_SECONDS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST_LABEL = _LABEL.replace("*", "{0,61}")
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(  # eight groups, or `::` after `n` groups and before up to 7 - n others
    [f"({_HEX}:){{7}}{_HEX}"]
    + [f"{f'({_HEX}:){{{n - 1}}}{_HEX}' if n else ''}::(({_HEX}:){{0,{6 - n}}}{_HEX})?" for n in range(7)]
    + [f"({_HEX}:){{6}}{_HEX}::"]
)
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_URI_PART = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"  # of a path
_URI_HOST = _URI_PART.replace(":@", "")
_AUTHORITY = rf"(({_URI_HOST}|:)*@)?(\[({_IPV6})\]|{_URI_HOST}*)(:[0-9]*)?"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P({_DAYS}({_SECONDS})?|{_SECONDS}|[0-9]+W)",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_HOST_LABEL}(\.{_HOST_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//{_AUTHORITY}(/{_URI_PART}*)*|/?({_URI_PART}+(/{_URI_PART}*)*)?)"
        rf"(\?({_URI_PART}|[/?])*)?(#({_URI_PART}|[/?])*)?"
    ),
}


def format_pattern(name: str) -> str:
    """Return a regular expression for whole texts of this format.

    Raises:
        RequestError: the format is none that a grammar can hold.
    """
    if name not in _FORMATS:
        raise RequestError(
            f"A tool's schema has 'format' {name[:40]!r}, which an answer cannot be held to; leave it out, set strict to false, or "
            f"use one of {', '.join(_FORMATS)}.",
            param="tools",
        )
    return _FORMATS[name]
