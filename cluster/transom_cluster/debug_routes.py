"""What happened to a request, over HTTP."""

from __future__ import annotations

from fastapi import FastAPI

from transom_cluster.router import Router


def add_to(api: FastAPI, router: Router) -> None:
    """Add the routes."""
