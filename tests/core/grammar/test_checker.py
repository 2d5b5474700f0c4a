"""Schemas from outside are compiled on trial in a child process: bounded time and memory, and a reason that names what is wrong."""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.core.grammar.hostile_schemas import LARGE, TOO_MUCH, grammar
from tests.core.grammar.vocabularies import tiny
from tests.how_many import num_examples
from transom_core.errors import RequestError
from transom_core.grammar import GrammarChecker
from transom_core.grammar.checker import HALF_LIFE_S
from transom_core.text.tokenizer import Tokenizer

KEYWORDS: dict[str, Any] = {
    "type": ["string", "integer", "object", "array", ["string", "null"], "number", "nonsense"],
    "multipleOf": [3, 0.1, 97, 999983, 1e-9],
    "minimum": [-5, 0, 1e300, 7.25],
    "maximum": [10, -1, 1e-300],
    "minLength": [0, 5, 10**6],
    "maxLength": [3, 10**9],
    "pattern": ["^a+$", "(a|b){1,500}", "(?:x{100}){100}", "[", "\\p{L}+"],
    "minItems": [0, 3, 10**7],
    "maxItems": [2, 10**8],
    "minProperties": [1, 5],
    "enum": [[1, "a", None], [], [{"a": 1}]],
    "const": [1, {"a": [1]}],
    "format": ["date-time", "uuid", "email", "nothing"],
    "required": [["a", "b"], ["zz"]],
    "$ref": ["#", "#/properties/a", "#/$defs/x", "http://nowhere.invalid/x"],
}
NESTED = ("items", "additionalProperties", "not", "contains")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    yield from _checker(cpu_s=1.5, clock=time.monotonic)


@pytest.fixture(scope="module")
def time_s() -> list[float]:
    """The time on the clock of `hasty`, which a test may change."""
    return [0.0]


@pytest.fixture(scope="module")
def hasty(time_s: list[float]) -> Iterator[GrammarChecker]:
    """A checker that gives up early."""
    yield from _checker(cpu_s=0.5, clock=lambda: time_s[0])


def _checker(*, cpu_s: float, clock: Callable[[], float]) -> Iterator[GrammarChecker]:
    made = GrammarChecker(tiny(), cpu_s=cpu_s, memory_bytes=384 << 20, clock=clock)
    made.warm_up()
    yield made
    pids = made.pids
    made.close()
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_asks_too_much_is_refused(hasty: GrammarChecker, name: str) -> None:
    with pytest.raises(RequestError, match="The grammar of the answer cannot be used: ") as caught:
        hasty.check(grammar(TOO_MUCH[name]), param="response_format")
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 1000
    assert hasty.known(grammar(TOO_MUCH[name]))


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_are_allowed(checker: GrammarChecker, name: str) -> None:
    checker.check(grammar(LARGE[name]))


def test_what_was_found_is_kept(checker: GrammarChecker) -> None:
    """No child is asked again, whether the grammar can be used or not."""
    unknown, not_supported = "start: nothing", grammar({"type": "array", "uniqueItems": True})
    for text, problem in (("start: /[a-f]+/", None), (unknown, "unknown name"), (not_supported, '"uniqueItems"')):
        assert not checker.known(text)
        for _ in range(2):
            found = problem_of(checker, text)
            assert found is None if problem is None else problem in str(found)
            assert checker.known(text)


def test_what_is_kept_of_an_error_is_short(checker: GrammarChecker) -> None:
    """The library's message quotes the client's text; 8,192 of them were 4 GB."""
    before = checker.kept.num_bytes
    for text in (f"start: /[{'x' * 200_000}/", f'start: "a" {"y" * 200_000}'):
        assert len(str(problem_of(checker, text))) < 400
        assert checker.known(text)
    assert checker.kept.num_bytes - before < 4000


def test_a_refusal_by_time_is_kept_for_a_minute(hasty: GrammarChecker, time_s: list[float]) -> None:
    """Time is that of a shared core: the same schema may be fine when the machine is less busy."""
    slow = grammar(TOO_MUCH["a large common multiple"])
    assert "cannot be used" in str(problem_of(hasty, slow))
    assert problem_of(hasty, 'start: "a"') is None
    time_s[0] = 59.0
    assert hasty.known(slow)
    time_s[0] = 60.0
    assert not hasty.known(slow)
    assert hasty.known('start: "a"')


def test_what_a_grammar_takes_is_measured_and_limited(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in one child: it does not matter what the one before has left. A text says little of what it takes."""
    small, words = checker.check("start: /[a-c]+/"), grammar({"enum": [f"word {i}" for i in range(10_000)]})
    first, second = (checker.check(f"start: /(a{{1000}}){{{count}}}/") for count in (999, 998))
    assert first.text == "start: /(a{1000}){999}/"
    for found in (first, second):
        assert 30 << 20 < found.num_bytes < 64 << 20
    assert small.num_bytes < 2 << 20
    assert checker.check(words).num_bytes < 16 << 20
    assert 0 < checker._children.ask({"grammar": words})["cpu_s"] < checker._cpu_s
    assert checker.check(first.text) == first
    monkeypatch.setattr("transom_core.grammar.checker.MAX_COMPILED_BYTES", 16 << 20)
    problem = problem_of(checker, "start: /(a{1000}){997}/")
    assert re.search(r"it takes [3-6]\d MiB of memory and 16 are allowed; send a smaller schema", str(problem))


def test_a_vocabulary_that_cannot_be_read_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "to_json", lambda _: "{}")
    broken = GrammarChecker(tiny())
    for _ in range(2):
        assert "cannot be used with this model's vocabulary" in str(problem_of(broken, "start: /a/"))
    assert not broken.pids


def test_equal_texts_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, may_answer, asked = GrammarChecker(tiny()), threading.Event(), []

    def ask(task: dict[str, Any], *, is_patient: bool) -> dict[str, Any]:
        asked.append(task)
        may_answer.wait()
        return {"num_bytes": 1}

    monkeypatch.setattr(made._children, "ask", ask)
    threads = [threading.Thread(target=made.check, args=("start: /x/",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    may_answer.set()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_a_check_does_not_wait_for_a_patient_one_of_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made, may_answer = GrammarChecker(tiny()), threading.Event()

    def ask(task: dict[str, Any], *, is_patient: bool) -> dict[str, Any]:
        if is_patient:
            may_answer.wait()
        return {"num_bytes": 1}

    monkeypatch.setattr(made._children, "ask", ask)
    patient = threading.Thread(target=lambda: made.check("start: /x/", client="hostile", is_patient=True))
    patient.start()
    while not made._asking:
        time.sleep(0.001)
    usual = threading.Thread(target=lambda: made.check("start: /x/", client="usual"), daemon=True)
    usual.start()
    usual.join(20.0)
    has_waited = usual.is_alive()
    may_answer.set()
    patient.join()
    assert not has_waited
    assert not made._asking


def test_a_client_whose_checks_took_long_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time counts: a child with little priority may take long for a small grammar."""
    asked, now_s = [], [0.0]
    checker = GrammarChecker(tiny(), clock=lambda: now_s[0])

    def ask(task: dict[str, Any], *, is_patient: bool) -> dict[str, Any]:
        asked.append(is_patient)
        now_s[0] += 5.0
        return {"num_bytes": 1, "cpu_s": 0.6}

    monkeypatch.setattr(checker._children, "ask", ask)
    for number, client in enumerate(["a", "a", "a", "b"]):
        checker.check(f'start: "{number}"', client=client, is_patient=checker.is_patient(client))
    assert asked == [False, False, True, False]
    assert checker.is_patient("a")
    now_s[0] += HALF_LIFE_S
    assert not checker.is_patient("a")


@pytest.mark.parametrize("seed", range(num_examples(10, 400)))
def test_random_schemas_are_answered(checker: GrammarChecker, seed: int) -> None:
    """For any keywords together, with any values, the answer is yes, or a reason in one line."""
    random_of = random.Random(seed)
    problem = problem_of(checker, grammar({"$defs": {"x": _schema(random_of, 2)}, **_schema(random_of, 3)}))
    assert problem is None or problem.startswith("The grammar of the answer cannot be used: ")
    assert "\n" not in (problem or "")


def problem_of(checker: GrammarChecker, text: str) -> str | None:
    """Why a grammar cannot be used; None if it can."""
    try:
        checker.check(text)
    except RequestError as error:
        return str(error)
    return None


def _schema(random_of: random.Random, depth: int) -> dict[str, Any]:
    made = {
        name: random_of.choice(values)
        for name, values in random_of.sample(list(KEYWORDS.items()), random_of.randint(0, 4))
    }
    if depth:
        for name in random_of.sample(NESTED, random_of.randint(0, 2)):
            made[name] = _schema(random_of, depth - 1)
        for name in random_of.sample(LISTS, random_of.randint(0, 2)):
            made[name] = [_schema(random_of, depth - 1) for _ in range(random_of.randint(1, 3))]
        if random_of.random() < 0.5:
            made["properties"] = {key: _schema(random_of, depth - 1) for key in "ab"}
    return made
