"""`tekken.json` and `tiktoken.model` cut text as tiktoken does; Mistral's chats are as mistral-common 1.13 has them."""

import json
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from transom_core.errors import ModelError
from transom_core.model_files.resolve import ModelFiles
from transom_core.text.tokenizer import Tokenizer

NUM_SPECIAL = 24
NEW_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def load(folder: Path, version: str = "v7", tokens: tuple[bytes, ...] = ()) -> Tokenizer:
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    config = {"pattern": r"\s*\S+|\s+", "version": version, "default_num_special_tokens": NUM_SPECIAL}
    data: dict[str, Any] = {
        "config": config | {"default_vocab_size": NUM_SPECIAL + len(every)},
        "vocab": [{"rank": i, "token_bytes": b64encode(token).decode()} for i, token in enumerate([*every, b"unused"])],
    }
    if version != "v7":
        data["special_tokens"] = [{"rank": i, "token_str": text} for i, text in enumerate(NEW_SPECIAL)]
    (folder / "tekken.json").write_text(json.dumps(data))
    return read(folder)


def read(folder: Path, model_type: str = "mistral") -> Tokenizer:
    files = ModelFiles(name="m", path=folder, is_gguf=False, config={"model_type": model_type}, generation_config={})
    return Tokenizer.load(files)


def load_kimi(folder: Path, tokens: tuple[bytes, ...]) -> Tokenizer:
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    (folder / "tiktoken.model").write_text("".join(f"{b64encode(one).decode()} {i}\n" for i, one in enumerate(every)))
    added = {str(len(every) + 2): {"content": "<|im_end|>", "special": True}}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return read(folder, "kimi_k2")


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the neighbours that make the token of the lowest rank, the first of them, until none make a token."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
        if piece in ranks or not found:
            return [ranks[part] for part in ([piece] if piece in ranks else parts)]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("kind", ["tekken", "kimi"])
def test_text_is_cut_as_by_tiktoken(tmp_path: Path, kind: str) -> None:
    source = random.Random(0)
    tokens: list[bytes] = [bytes([byte]) for byte in range(256)]
    while len(tokens) < 330:
        made = b"".join(source.choices([b"a", b"b", b" ", "é".encode(), *tokens[256:]], k=2))
        tokens += [made] if made not in tokens and len(made) < 9 else []
    added, ranks = tuple(tokens[256:]), {token: rank for rank, token in enumerate(tokens)}
    tokenizer = load_kimi(tmp_path, added) if kind == "kimi" else load(tmp_path, tokens=added)
    first, bos = (0, []) if kind == "kimi" else (NUM_SPECIAL, [1])
    for _ in range(300):
        words = ["".join(source.choices("abé", k=source.randint(1, 12))) for _ in range(4)]
        want = [first + i for n, word in enumerate(words) for i in merged((" " * (n > 0) + word).encode(), ranks)]
        assert list(tokenizer.encode(" ".join(words))) == [*bos, *want]
    assert tokenizer.eos_token_ids == (332 if kind == "kimi" else 2,)


CALLS = [{"id": f"abcdefgh{i}", "function": {"name": "f", "arguments": {"city": "é", "n": i}}} for i in (1, 2)]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    *({"role": "tool", "tool_call_id": f"abcdefgh{i}", "content": text} for i, text in ((2, "sun"), (1, "rain"))),
    {"role": "assistant", "content": "Wet. "},
    {"role": "user", "content": "Now?"},
]
TOOLS = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f"}}][/AVAILABLE_TOOLS]'
OBJECTS = ", ".join(f'{{"name": "f", "arguments": {{"city": "é", "n": {i}}}, "id": "abcdefgh{i}"}}' for i in (1, 2))
BY_ID = "".join(f'[TOOL_CALLS]f[CALL_ID]abcdefgh{i}[ARGS]{{"city": "é", "n": {i}}}' for i in (1, 2))
WITHOUT_IDS = BY_ID.replace("[CALL_ID]abcdefgh1", "").replace("[CALL_ID]abcdefgh2", "")


@pytest.mark.parametrize(
    ("version", "tools", "calls", "results"),
    [
        ("v7", ("", TOOLS), f"[TOOL_CALLS][{OBJECTS}]", ("abcdefgh2[TOOL_CONTENT]sun", "abcdefgh1[TOOL_CONTENT]rain")),
        ("v11", ("", TOOLS), BY_ID, ("abcdefgh1[TOOL_CONTENT]rain", "abcdefgh2[TOOL_CONTENT]sun")),
        ("v13", (TOOLS, ""), WITHOUT_IDS, ("rain", "sun")),
    ],
)
def test_chats(tmp_path: Path, version: str, tools: tuple[str, str], calls: str, results: tuple[str, str]) -> None:
    extra = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert load(tmp_path, version).apply_chat_template(CHAT, add_generation_prompt=True, extra=extra).text == (
        f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]{tools[0]}[INST]Hi[/INST]{calls}</s>"
        f"[TOOL_RESULTS]{results[0]}[/TOOL_RESULTS][TOOL_RESULTS]{results[1]}[/TOOL_RESULTS]Wet.</s>{tools[1]}[INST]Now?[/INST]"
    )


def test_versions_without_a_template_and_broken_files(tmp_path: Path) -> None:
    assert not load(tmp_path, "v15").has_chat_template
    many = tuple(b"a" * length for length in range(2, 3001))  # 4 million merges
    for tokens, message in ((many, "more than 1024 bytes"), ((b"</s>",), "there twice"), ((b"a",), "there twice")):
        with pytest.raises(ModelError, match=f"no vocabulary of Mistral's.*{message}.*download it again"):
            load(tmp_path, tokens=tokens)
