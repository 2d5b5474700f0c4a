"""The Workers dashboard's section about answers that are held to grammars: how many, and what masks and compiling cost."""

from __future__ import annotations

from dashboards.panels import high_is_bad, lines
from dashboards.queries import WORKER, rate, ratio, split, total

GRAMMARS = [
    lines(
        "Requests held to grammars",
        {
            "{{worker}} running": total("transom_grammar_running_requests", WORKER, "worker"),
            "{{worker}} new a second": rate("transom_grammar_requests_total", WORKER, "worker"),
            "{{worker}} failed a second": rate("transom_grammar_failed_requests_total", WORKER, "worker"),
        },
        "short",
        shows="Requests with a grammar (JSON schemas, required tools, patterns) that run; "
        "those a second that come, and that an error of their grammar ends.",
        act="Errors: schemas that become too complex in mid-answer; "
        "the clients' error message says after how many tokens.",
    ),
    lines(
        "Time for masks by worker",
        split(rate, "transom_grammar_mask_seconds_total", WORKER, "worker"),
        "percentunit",
        shows="Share of its time that each worker's engine waits for masks of allowed tokens. Dashed: 3 % and 10 %.",
        act="Over 3 %: schemas with hundreds of optional properties, or many constrained requests on few cores.",
        limits=high_is_bad(0.03, 0.1),
    ),
    lines(
        "Time of a mask",
        {
            "{{worker}}": ratio(
                rate("transom_grammar_mask_seconds_total", WORKER, "worker"),
                rate("transom_grammar_masks_total", WORKER, "worker"),
                "worker",
            )
        },
        "s",
        shows="Mean time for which the engine waits for one answer's mask; those of a step are computed together.",
        act="Over 0.1 ms: large enumerations or many optional properties.",
    ),
    lines(
        "Kept grammars",
        split(total, "transom_grammar_cache_bytes", WORKER, "worker"),
        "bytes",
        shows="Bytes of compiled grammars that each worker keeps, of 256 MiB at most.",
        act="At its bound: clients send ever new schemas, and each is compiled.",
    ),
    lines(
        "Compiling grammars",
        {
            "{{worker}}": ratio(
                rate("transom_grammar_compile_seconds_total", WORKER, "worker"),
                rate("transom_grammar_compiles_total", f'{WORKER},outcome="compiled"', "worker"),
                "worker",
            )
        },
        "s",
        shows="Mean time of compiling a grammar that was not kept, while its request waits.",
        act="Over 0.1 s: large schemas; equal ones are compiled once, so clients should not vary them.",
    ),
]
