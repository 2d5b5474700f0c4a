from __future__ import annotations

import json
from pathlib import Path

import pytest

from transom_core.errors import ConfigError
from transom_worker.simulate.replay import Arrivals
from transom_worker.simulate.trace import read_trace

GOOD: dict[str, object] = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [10**18, 7]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_equal_ids_are_equal_tokens_and_no_two_answers_are_equal(tmp_path: Path) -> None:
    longer = GOOD | {"input_length": 1024, "timestamp": 2000}
    first, second = read_trace(write(tmp_path / "t.jsonl", GOOD, "", longer)).requests
    prompts = first.prompt_token_ids(), second.prompt_token_ids()
    assert len(prompts[0]) == 700 == first.num_prompt_tokens
    assert prompts[1][:700] == prompts[0]
    assert len(set(prompts[1])) == 1024
    answers = [set(range(a.first_token, a.first_token + a.num_tokens)) for a in (first.answer, second.answer)]
    assert len(answers[0] | answers[1]) == 6
    assert not (answers[0] | answers[1]) & set(prompts[1])
    assert (first.arrival_s, second.arrival_s) == (1.5, 2.0)


def test_requests_come_in_the_order_of_the_file_and_up_to_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD | {"timestamp": 3}, "never read")
    workload = read_trace(path, limit=2)
    assert [request.arrival_s for request in workload.requests] == [1.5, 0.003]
    assert list(Arrivals(workload).due(2.0)) == [1, 0]  # by the clock whatever the order


def test_the_first_requests_may_be_left_out(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path / "t.jsonl", *(GOOD | {"timestamp": 1000 * at} for at in range(5))))
    assert [request.arrival_s for request in workload.part(1, 3).requests] == [1, 2, 3]
    assert [request.arrival_s for request in workload.part(3, None).requests] == [3, 4]
    with pytest.raises(ConfigError, match="--skip 5 leaves no request of t; give at most 4"):
        workload.part(5, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: is not JSON"),
        ("[" * 100_000, r"line 2: is not JSON"),
        ("[1]", r"line 2: holds '\[1\]'; give an object with timestamp, input_length"),
        ({key: value for key, value in GOOD.items() if key != "hash_ids"}, r"line 2: has no hash_ids"),
        (GOOD | {"timestamp": -1}, r"line 2: timestamp is -1; give a number of at least 0"),
        (GOOD | {"timestamp": "now"}, r"line 2: timestamp is 'now'"),
        (GOOD | {"input_length": 0}, r"line 2: input_length is 0; give a whole number of at least 1"),
        (GOOD | {"output_length": 2.5}, r"line 2: output_length is 2.5"),
        (GOOD | {"output_length": True}, r"line 2: output_length is True"),
        (GOOD | {"output_length": 2**32}, r"line 2: output_length is 4294967296, which makes"),
        (GOOD | {"hash_ids": "7"}, r"line 2: hash_ids is 7; give a list"),
        (GOOD | {"hash_ids": [1, None]}, r"line 2: hash_ids is \[1, None\]; give a list of whole numbers"),
        (GOOD | {"hash_ids": [1]}, r"line 2: hash_ids has 1 ids; an input_length of 700 tokens takes 2"),
        (GOOD | {"input_length": 10**12}, r"line 2: hash_ids has 2 ids; an input_length of 1000000000000"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path / "t.jsonl", GOOD, line))


def test_files_without_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(tmp_path / "empty.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "bytes.jsonl")
