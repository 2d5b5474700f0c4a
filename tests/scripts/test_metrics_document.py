"""docs/metrics.md is what the code says: `make docs` writes it."""

from __future__ import annotations

from pathlib import Path

from scripts.metrics_page import PAGE, page, router_families

from tests.engine_driver import make_engine


def test_the_page_is_that_of_the_code(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model))
    try:
        assert PAGE.read_text() == page(engine.metrics.registry.collect(), router_families()), "run `make docs`"
    finally:
        engine.shutdown()
