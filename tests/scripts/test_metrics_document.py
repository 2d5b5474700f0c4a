"""docs/metrics.md is what the code says: `make docs` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.metrics_page import OF_ROUTERS, PAGE, _sections, page, router_families

from tests.engine_driver import make_engine


def test_the_page_is_that_of_the_code(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model))
    try:
        assert PAGE.read_text() == page(engine.metrics.registry.collect(), router_families()), "run `make docs`"
    finally:
        engine.shutdown()


def test_a_family_without_a_section_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match="transom_router_workers"):
        list(_sections(router_families(), OF_ROUTERS[:1]))
