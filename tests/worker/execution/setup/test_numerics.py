"""The version of the numbers, a part of every model's identity, is that of the sources that compute them."""

import ast
import io
import tokenize
from hashlib import blake2b
from pathlib import Path

import transom_kernels
from transom_core import model_config
from transom_worker import models, sampling
from transom_worker.execution.setup.cache_setup import NUMERICS

PACKAGES = (transom_kernels, model_config, models, sampling)  # what decides the numbers of equal weights and settings


def code_of(source: str) -> str:
    """A module's text without comments, docstrings and empty lines, which is the same for every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            lines[node.lineno - 1 : node.lineno - 1 + num_lines] = [""] * num_lines
    return "\n".join(line.rstrip() for line in lines if line.strip())


def test_the_version_of_the_numbers_is_that_of_their_sources() -> None:
    digest = blake2b(digest_size=8)
    for package in PACKAGES:
        folder = Path(package.__file__ or "").parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder).as_posix()}\n{code_of(path.read_text())}\n".encode())
    assert digest.hexdigest() == NUMERICS, (
        f'Code that computes numbers was changed: write NUMERICS = "{digest.hexdigest()}" in cache_setup.py. Blocks on disks and '
        "streams of workers with the code of before then belong to another model."
    )
