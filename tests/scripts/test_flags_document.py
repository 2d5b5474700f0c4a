"""docs/flags.md says what the code says: `make docs` writes it."""

from __future__ import annotations

from scripts.flags_page import PAGE, page

from transom_core.settings.settings import SECTIONS, Settings


def test_the_page_is_that_of_the_code_and_has_every_setting() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
    assert [name for part in SECTIONS.values() for name in part.model_fields] == list(Settings.model_fields)
