"""Random JSON schemas: objects of a few properties, some levels deep, of everything that a grammar can hold."""

import random
from typing import Any

WORDS = ("id", "name", "née", "a b", 'quote"', "back\\slash", "x-1", "", "名前", "nested")
FORMATS = ("date", "uuid", "ipv4", "time")


def random_schema(random_of: random.Random) -> dict[str, Any]:
    """An object of a few properties, some levels deep at most."""
    schema = _object(random_of, 2)
    if random_of.random() < 0.3:
        schema = {"$defs": {"part": _value(random_of, 1)}, **schema}
        name = random_of.choice(WORDS)
        schema["properties"] = {**schema["properties"], name: {"$ref": "#/$defs/part"}}
        schema["required"] = sorted({*schema["required"], name})
    return schema


def _object(random_of: random.Random, depth: int) -> dict[str, Any]:
    names = random_of.sample(WORDS, random_of.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(random_of, depth) for name in names},
        "required": random_of.sample(names, random_of.randint(0, len(names))),
        "additionalProperties": False,
    }


def _value(random_of: random.Random, depth: int) -> dict[str, Any]:
    made = random_of.choice([_string, _number, _choice, *([_object, _array, _either] if depth else [])])
    return made(random_of, depth - 1)


def _string(random_of: random.Random, depth: int) -> dict[str, Any]:
    shortest = random_of.randint(0, 3)
    return random_of.choice(
        [
            {"type": "string", "minLength": shortest, "maxLength": shortest + random_of.randint(0, 6)},
            {"type": "string", "pattern": random_of.choice(["^[a-f]{2,5}$", "^(yes|no)!*$", "^\\d+(\\.\\d{2})?$"])},
            {"type": "string", "format": random_of.choice(FORMATS)},
            {"type": ["string", "null"], "maxLength": 4},
        ]
    )


def _number(random_of: random.Random, depth: int) -> dict[str, Any]:
    low = random_of.randint(-200, 200)
    return random_of.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + random_of.randint(0, 90)},
            {"type": "integer", "exclusiveMinimum": low, "maximum": low + 900, "multipleOf": 3},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + 0.5},
        ]
    )


def _choice(random_of: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", "a\nb", 'c"d', 1, 2.5, None, True, [1, "x"], {"k": "é"}]
    return random_of.choice(
        [
            {"enum": random_of.sample(values, random_of.randint(1, 5))},
            {"const": random_of.choice(values)},
            {"type": "boolean"},
        ]
    )


def _array(random_of: random.Random, depth: int) -> dict[str, Any]:
    fewest = random_of.randint(0, 2)
    made = {"type": "array", "items": _value(random_of, depth), "minItems": fewest}
    if random_of.random() < 0.3:
        made["prefixItems"] = [_value(random_of, depth)]
    return {**made, "maxItems": fewest + random_of.randint(0, 3)}


def _either(random_of: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(random_of, depth) for _ in range(random_of.randint(1, 3))]}
