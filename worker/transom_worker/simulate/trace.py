"""Reads recorded traces: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

A hash id stands for 512 prompt tokens.

Example: {"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}: id 46 stands for the prompt's first
512 tokens, id 47 for the other 188. Equal ids stand for equal tokens after equal prefixes. No two requests have the same answer.
"""

import json
from pathlib import Path
from typing import Any

from transom_core.errors import ConfigError
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload

HASH_TOKENS = 512  # tokens that a hash id stands for
MAX_TOKENS = 2**32  # distinct token ids; prefixes are hashed over ids of 32 bits


def read_trace(path: Path, *, limit: int | None = None) -> Workload:
    """Return the first `limit` requests of a file (all if None), in the file's order.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is not such a request. The message names line and field.
    """
    reader = _Reader(path)
    requests: list[SimulatedRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(requests) == limit:
                    break
                if line.strip():
                    requests.append(reader.read(number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.") from None
    if not requests:
        raise ConfigError(f"The trace {path} holds no request; give JSON lines with {', '.join(FIELDS)}.")
    return Workload(name=path.stem, requests=tuple(requests))


FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class _Reader:
    """Reads the lines of one trace; each hash id becomes a run of token ids of its own.

    Methods that check a field take the line's number for their error messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._space = TokenSpace()
        self._runs: dict[int, Run] = {}

    def read(self, number: int, line: str) -> SimulatedRequest:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"is not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise self._error(number, f"holds {line.strip()[:40]!r}; give an object with {', '.join(FIELDS)}")
        timestamp = self._number(number, fields, "timestamp", least=0)
        num_prompt_tokens = self._whole(number, fields, "input_length", least=1)
        num_answer_tokens = self._whole(number, fields, "output_length", least=1)
        request = SimulatedRequest(
            prompt=self._prompt(number, fields, num_prompt_tokens),
            answer=self._space.take(num_answer_tokens),
            arrival_s=timestamp / 1000,
        )
        if self._space.num_taken > MAX_TOKENS:
            raise self._error(
                number,
                f"output_length is {num_answer_tokens}, which makes {self._space.num_taken} different tokens so far; "
                f"at most {MAX_TOKENS} can be told apart, so shorten it or cut the file here",
            )
        return request

    def _prompt(self, number: int, fields: dict[str, Any], num_tokens: int) -> tuple[Run, ...]:
        ids = self._field(number, fields, "hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise self._error(number, f"hash_ids is {str(ids)[:40]}; give a list of whole numbers")
        needed = -(-num_tokens // HASH_TOKENS)
        if len(ids) != needed:
            raise self._error(
                number,
                f"hash_ids has {len(ids)} ids; an input_length of {num_tokens} tokens takes {needed}, "
                f"one per {HASH_TOKENS} tokens",
            )
        runs = [self._run(i) for i in ids]
        runs[-1] = runs[-1].cut(num_tokens - (needed - 1) * HASH_TOKENS)
        return tuple(runs)

    def _run(self, hash_id: int) -> Run:
        run = self._runs.get(hash_id)
        if run is None:
            run = self._runs[hash_id] = self._space.take(HASH_TOKENS)
        return run

    def _whole(self, number: int, fields: dict[str, Any], name: str, *, least: int) -> int:
        value = self._field(number, fields, name)
        if type(value) is not int or value < least:
            raise self._error(number, f"{name} is {value!r}; give a whole number of at least {least}")
        return value

    def _number(self, number: int, fields: dict[str, Any], name: str, *, least: float) -> float:
        value = self._field(number, fields, name)
        if type(value) not in (int, float) or not least <= value < float("inf"):
            raise self._error(number, f"{name} is {value!r}; give a number of at least {least}")
        return float(value)

    def _field(self, number: int, fields: dict[str, Any], name: str) -> Any:
        if name not in fields:
            raise self._error(number, f"has no {name}; it needs {', '.join(FIELDS)}")
        return fields[name]

    def _error(self, number: int, what: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {number}: {what}.")
