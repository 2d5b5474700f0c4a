"""docs/flags.md says what the code says: `make docs` writes it."""

from __future__ import annotations

import pytest
from scripts.flags_page import PAGE, SECTIONS, page


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(SECTIONS), "run `make docs`"


def test_a_setting_without_a_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="log_format"):
        page(SECTIONS[:-1])
