"""Transom's log lines, shown on standard error unless the program has its own way of logging."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def show_logs() -> None:
    """Show Transom's lines from INFO on. Handlers and levels that somebody has set stay as they are; idempotent."""
    logger = logging.getLogger("transom")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
