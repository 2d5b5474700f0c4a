"""Answers that are held to grammars: valid however their steps are planned, or ended by an error."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from tests.core.grammar.random_schemas import random_schema
from tests.core.grammar.vocabularies import PERSON, json_grammar
from tests.engine_driver import drain, make_engine, make_hooked_engine, make_request, run
from tests.how_many import num_examples
from tests.present import present
from tests.worker.conftest import Start
from transom_core.contract import OutputEvent, Request
from transom_core.grammar import GrammarMatcher, compile_grammar
from transom_worker.engine.engine import Engine

BATCH = 10


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    made = make_engine(str(tiny_model))
    yield made
    made.shutdown()


def end(engine: Engine, request: Request) -> OutputEvent:
    """The last event of a request that runs alone; its tokens and text together."""
    engine.add(request)
    events = drain(engine)
    assert not engine.requests
    assert not len(engine.grammars.masks)
    token_ids = tuple(token for event in events for token in event.token_ids)
    return events[-1]._replace(token_ids=token_ids, text="".join(event.text for event in events))


@pytest.mark.parametrize("first", range(0, num_examples(30, 500), BATCH))
def test_answers_to_random_schemas_that_stop_are_valid(engine: Engine, first: int) -> None:
    """A batch of schemas at once, sampled at high temperature, which is noise held to a grammar; nothing else ends with "stop"."""
    schemas = [random_schema(random.Random(first + i)) for i in range(BATCH)]
    options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 300, "ignore_eos": False}
    asked = [
        replace(make_request(f"r{i}", [40 + i, 50], grammar=json_grammar(schema), **options), seed=first + i)
        for i, schema in enumerate(schemas)
    ]
    answers = run(engine, asked)
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(json.loads(answer.text), schema, format_checker=checker)
        else:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", 300)
    assert sum(answer.finish_reason == "stop" for answer in answers) >= BATCH // 2


def test_a_row_waits_for_its_token_and_the_others_do_not(tiny_model: Path) -> None:
    """With two steps in flight, every plan has the free row, and every other plan the constrained one, with a mask."""
    engine, executor = make_hooked_engine(str(tiny_model), steps_in_flight=2)
    plans: list[tuple[int, bool]] = []
    submit = executor.submit
    executor.submit = lambda plan: (plans.append((len(plan.seq_ids), plan.grammar_mask is not None)), submit(plan))[1]  # type: ignore[method-assign, func-returns-value]
    run(engine, [make_request("warm", [5], grammar=PERSON, max_tokens=1)])
    plans.clear()
    held = make_request("held", [32, 33], grammar=PERSON, max_tokens=10, temperature=1.0)
    run(engine, [make_request("free", [30, 31], max_tokens=100), held])
    engine.shutdown()
    assert all(is_masked == (num_rows == 2) for num_rows, is_masked in plans)
    first = plans.index((2, True))
    assert plans[first : first + 19] == [(2, True), *[(1, False), (2, True)] * 9]
    assert len(plans) in (100, 101)


def test_a_document_of_two_tokens_goes_on_after_any_of_them(engine: Engine) -> None:
    """Also after the last one: nothing can follow, so the answer is the end alone."""
    ask = make_request("whole", [50, 51, 52], grammar='start: "7" "8"', ignore_eos=False)
    whole = end(engine, ask)
    assert (whole.text, len(whole.token_ids), whole.finish_reason) == ("78", 2, "stop")
    for cut in range(3):
        rest = end(engine, replace(ask, request_id=f"cut{cut}", resumed_output_ids=whole.token_ids[:cut]))
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert (rest.text, rest.finish_reason) == ("78"[cut:], "stop")


@pytest.mark.parametrize(
    ("grammar", "params", "text", "finish_reason"),
    [
        ('start: "yes"', {}, "yes", "stop"),
        ('start: "yes"', {"ignore_eos": False, "min_tokens": 10}, "yes", "stop"),  # it cannot be longer
        ('start: "yes"', {"max_tokens": 1}, None, "length"),
        ("start: /[7]{3}/ <|im_end|>", {"ignore_eos": False}, "777", "stop"),  # end of text that the grammar names
        ('start: /[7]{2}/ <|im_start|> "8"', {}, "778", "stop"),  # special tokens are no text
        ("start: /[7]{1,9}/", {"ignore_eos": True}, "777777777", "stop"),  # never end of text
        ("start: /[7]{1,9}/", {"ignore_eos": False, "min_tokens": 9}, "777777777", "stop"),
        ('start: "ab7cd"', {"stop": ("7",), "ignore_eos": False}, "ab", "stop"),
        ("start: /[7]+/", {"max_tokens": 5}, "77777", "length"),
        ('start: /[78]{4}/ "!"', {"logit_bias": {39: -100.0}, "ignore_eos": False}, "8888!", "stop"),
        ('start: "77"', {"logit_bias": {39: -100.0}, "ignore_eos": False}, "77", "stop"),  # a bias is no ban
    ],
)
def test_what_ends_an_answer(
    engine: Engine, grammar: str, params: dict[str, Any], text: str | None, finish_reason: str
) -> None:
    assert engine.tokenizer.token(39) == "7"
    event = end(engine, make_request("r", [60, 61], grammar=grammar, **params))
    assert event.error is None
    assert event.finish_reason == finish_reason
    assert text is None or event.text == text


@pytest.mark.parametrize(
    ("grammar", "params", "kind", "message"),
    [
        ("start: nothing", {}, "RequestError", "unknown name"),
        (json_grammar({"not": {}}), {}, "RequestError", '"not" is not supported'),
        ("start: /[7]{3}/", {"stop_token_ids": (39,), "min_tokens": 9}, "RequestError", "lower min_tokens"),
        ("start: a\na: b a\nb: a b", {}, "RequestError", "allows no answer"),
    ],
)
def test_what_cannot_be_held_ends_with_an_error(
    engine: Engine, grammar: str, params: dict[str, Any], kind: str, message: str
) -> None:
    error = present(end(engine, make_request("r", [60, 61], grammar=grammar, **params)).error)
    assert error.kind == kind
    assert message in error.message
    assert run(engine, [make_request("after", [60, 61])])[0].finish_reason == "length"


def test_a_grammar_that_becomes_too_complex_ends_its_answer_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is never sampled without its grammar: the matcher's failure is the answer's end."""
    engine.add(make_request("r", [60, 61], grammar="start: /[a-z]+/", max_tokens=40))
    engine.add(make_request("other", [60, 62], grammar="start: /[a-z]+/", max_tokens=8))
    events: list[OutputEvent] = []
    while engine.has_work:
        events += engine.step()
        if sum(event.request_id == "r" for event in events) == 3:
            present(engine.requests["r"].grammar).library_matcher.consume_token(39)  # which the grammar does not allow
    last = {event.request_id: event for event in events}
    assert last["other"].finish_reason == "length"
    assert "does not allow" in present(last["r"].error).message
    assert last["r"].position == 3  # tokens that have left; the refused one has not


def test_an_answer_whose_grammar_others_have_filled_can_go_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a compiled grammar share its lexer states. One answer alone that needs too many ends with an error."""
    text = "start: /(a|b)*a(a|b){20}/"
    ask = make_request("r", [60], grammar=text, max_tokens=60, temperature=1.0)
    whole = end(engine, ask)
    monkeypatch.setitem(compile_grammar.__globals__, "_LIMITS", LLParserLimits(max_lexer_states=400))
    compiler = engine.grammars.compiler
    unlimited = compiler._entries.get(text)
    assert isinstance(unlimited, GrammarMatcher)
    compiler.forget(text, unlimited.copy())
    for i in range(4):
        engine.add(replace(ask, request_id=f"r{i}", prompt_token_ids=(60 + i,)))
    events = [event for event in drain(engine) if event.request_id == "r0"]
    error, token_ids = present(events[-1].error), tuple(token for event in events for token in event.token_ids)
    assert (error.kind, error.loss_cause, token_ids) == ("WorkerLost", "stopped", whole.token_ids[: len(token_ids)])
    assert token_ids + end(engine, replace(ask, resumed_output_ids=token_ids)).token_ids == whole.token_ids
    # all at once with a new grammar: together they fill it again, which ends some, and none begins anew
    for i in range(9):
        engine.add(replace(ask, request_id=f"r{i}", resumed_output_ids=token_ids))
    assert "WorkerLost" not in {event.error.kind for event in drain(engine) if event.error is not None}
    if isinstance(filled := compiler._entries.get(text), GrammarMatcher):
        compiler.forget(text, unlimited)  # of an answer to the grammar before it: the new one stays
        assert compiler._entries.get(text) is filled
        compiler.forget(text, filled)
    assert "too complex" in str(end(engine, replace(ask, params=replace(ask.params, max_tokens=1000))).error)


def test_a_request_that_was_aborted_leaves_nothing(engine: Engine) -> None:
    """While its grammar is compiled, and while it runs; its id may be used again with another grammar at once."""
    engine.add(make_request("r", [60], grammar="start: /[a-f]{5}/", max_tokens=5))
    assert engine.has_work
    engine.add(make_request("never", [60], grammar="start: /[g-z]{5}/", max_tokens=5))
    assert engine.abort("never")
    assert engine.abort("r")
    assert not len(engine.grammars.compiler._jobs)  # no request wants these grammars any more
    engine.add(make_request("r", [60], grammar="start: /[0-9]{5}/", max_tokens=5))
    assert "".join(event.text for event in drain(engine)).isdigit()
    engine.add(make_request("s", [60], grammar="start: /[a-f]+/", max_tokens=50))
    while not engine.step():
        pass
    assert len(engine.grammars.masks) == 1
    engine.abort("s")
    assert not len(engine.grammars.masks)
    assert drain(engine) == []


def test_metrics_count_requests_masks_and_compiling(start: Start) -> None:
    engine = start()
    run(engine, [make_request(f"r{i}", [70 + i], grammar="start: /[a-c]{9}/", max_tokens=4) for i in range(3)])
    end(engine, make_request("wrong", [70], grammar="start: nothing"))
    engine.publish()
    page = engine.metrics.text().decode()
    values = {name: float(value) for name, value in re.findall(r"transom_grammar_(\w+){.*} (.*)", page)}
    expected = {"requests_total": 4, "failed_requests_total": 1, "running_requests": 0, "masks_total": 3 * 4}
    assert {name: values[name] for name in expected} == expected
    assert min(values[name] for name in ("mask_seconds_total", "compile_seconds_total", "cache_bytes")) > 0
    counts = dict(re.findall(r'transom_grammar_compiles_total{.*outcome="(\w+)".*} (.*)', page))
    assert counts == {"compiled": "2.0", "cached": "2.0"}
