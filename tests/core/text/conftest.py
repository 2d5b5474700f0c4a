"""Tokenizers of a tiny Llama's folder and of the demo model's GGUF file."""

from pathlib import Path

import pytest

from tests.tiny_checkpoints import tiny_llama
from transom_core.model_files.resolve import resolve_model
from transom_core.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture(scope="session")
def tiny(folder: Path) -> Tokenizer:
    return Tokenizer.load(resolve_model(str(folder)))


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model("smollm2"))
