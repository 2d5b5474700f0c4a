"""The Workers dashboard's section about answers that are held to grammars: how many, and what masks and compiling cost."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.panels import About, high_is_bad, lines
from dashboards.queries import WORKER, Query, rate, ratio, split, total

GRAMMARS = Section(
    title="Grammars",
    panels=[
        lines(
            About(
                title="Requests held to grammars",
                shows="Requests with a grammar (JSON schemas, required tools, patterns) that run; those a second that come, and "
                "that an error of their grammar ends.",
                act="Errors: schemas that become too complex in mid-answer; the clients' error message says after how many tokens.",
            ),
            [
                Query(expr=total("transom_grammar_running_requests", WORKER, "worker"), legend="{{worker}} running"),
                Query(
                    expr=rate("transom_grammar_requests_total", WORKER, "worker"),
                    legend="{{worker}} new a second",
                ),
                Query(
                    expr=rate("transom_grammar_failed_requests_total", WORKER, "worker"),
                    legend="{{worker}} failed a second",
                ),
            ],
            "short",
        ),
        lines(
            About(
                title="Time for masks by worker",
                shows="Share of its time that each worker's engine waits for masks of allowed tokens. Dashed: 3 % and 10 %.",
                act="Over 3 %: schemas with hundreds of optional properties, or many constrained requests on few cores.",
            ),
            split(rate, "transom_grammar_mask_seconds_total", WORKER, "worker"),
            "percentunit",
            limits=high_is_bad(0.03, 0.1),
        ),
        lines(
            About(
                title="Time of a mask",
                shows="Mean time for which the engine waits for one answer's mask; those of a step are computed together.",
                act="Over 0.1 ms: large enumerations or many optional properties.",
            ),
            [
                Query(
                    expr=ratio(
                        rate("transom_grammar_mask_seconds_total", WORKER, "worker"),
                        rate("transom_grammar_masks_total", WORKER, "worker"),
                        "worker",
                    ),
                    legend="{{worker}}",
                )
            ],
            "s",
        ),
        lines(
            About(
                title="Kept grammars",
                shows="Bytes of compiled grammars that each worker keeps, of 256 MiB at most.",
                act="At its bound: clients send ever new schemas, and each is compiled.",
            ),
            split(total, "transom_grammar_cache_bytes", WORKER, "worker"),
            "bytes",
        ),
        lines(
            About(
                title="Compiling grammars",
                shows="Mean time of compiling a grammar that was not kept, while its request waits.",
                act="Over 0.1 s: large schemas; equal ones are compiled once, so clients should not vary them.",
            ),
            [
                Query(
                    expr=ratio(
                        rate("transom_grammar_compile_seconds_total", WORKER, "worker"),
                        rate("transom_grammar_compiles_total", f'{WORKER},outcome="compiled"', "worker"),
                        "worker",
                    ),
                    legend="{{worker}}",
                )
            ],
            "s",
        ),
    ],
)
