"""Builds the tokenizers of Mistral's `tekken.json` and Kimi's `tiktoken.model`, which list a vocabulary by rank.

The `tokenizers` library takes merges, each a pair of tokens that become one: every way to cut a token into two others is one, and
merges that make tokens of lower rank come first. Sources: mistral-common 1.13, Kimi K2's `tokenization_kimi.py`.
"""

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from transom_core.errors import ModelError
from transom_core.model_files.text_files import read_json, read_text

# The special tokens of files that list none, up to version 7.
_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)  # fmt: skip
SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_KIMI_SPECIAL = 256  # ids after the vocabulary
_MAX_SPECIAL = 4096  # special tokens
_MAX_LENGTH, _MAX_BYTES = 1024, 4 << 20  # of one token and of all together: each cut of a token may be a merge


def cased_words(suffix: str = "", without: str = "") -> str:
    """Return an expression for words, each of which has capitals first and small letters then; `without` narrows the letters."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in (r"Lu}\p{Lt", "Ll"))
    return "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{suffix}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*"))


def split_by(expression: str) -> list[Any]:
    """Return the pre-tokenizers that cut a text into the matches of an expression, and these into bytes."""
    return [
        pre_tokenizers.Split(Regex(expression), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_KIMI_WORDS = cased_words(SUFFIXES, without=r"&&[^\p{Han}]")
_KIMI = rf"[\p{{Han}}]+|{_KIMI_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BREAKS}"


def read_kimi(path: Path, added: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """Return the tokenizer of a `tiktoken.model`; `added` is the `added_tokens_decoder` of tokenizer_config.json.

    Raises:
        ModelError: the file is broken.
    """
    text = read_text(path, path.parent)
    try:
        entries = [line.split() for line in text.splitlines() if line]
        tokens = _by_rank({int(rank): token for token, rank in entries}, len(entries))
        special = [
            AddedToken(
                content=one.get("content", f"<|reserved_token_{i}|>"),
                special=one.get("special", True),
                normalized=False,
            )
            for i in range(len(tokens), len(tokens) + _KIMI_SPECIAL)
            for one in [added.get(str(i), {})]
        ]
        return _build(tokens, special, _KIMI, special_first=False)
    except Exception as error:  # the library raises bare Exception for what does not fit
        raise ModelError(f"{path} is no vocabulary of tiktoken's: {error!r}; download it again.") from None


def read_tekken(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer, and the named tokens that chat templates use, with the file's version as `tekken_version`.

    Raises:
        ModelError: the file is broken.
    """
    data = read_json(path)
    try:
        config = data["config"]
        num_special = int(config["default_num_special_tokens"])
        if num_special > _MAX_SPECIAL:
            raise ValueError(f"{num_special} special tokens; at most {_MAX_SPECIAL} are possible")
        listed = {entry["rank"]: entry["token_str"] for entry in data.get("special_tokens") or ()}
        special = [(listed or dict(enumerate(_OLD_SPECIAL))).get(i, f"<SPECIAL_{i}>") for i in range(num_special)]
        ranked = {one["rank"]: one["token_bytes"] for one in data["vocab"]}
        tokens = _by_rank(ranked, config["default_vocab_size"] - num_special)
        control = [AddedToken(text, special=True, normalized=False) for text in special]
        rust = _build(tokens, control, config["pattern"], special_first=True)
        rust.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", special.index("<s>"))])
        return rust, _named(special, config["version"])
    except Exception as error:  # the library raises bare Exception for what does not fit
        raise ModelError(f"{path} is no vocabulary of Mistral's: {error!r}; download it again.") from None


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet, character -> byte: a printable Latin-1 byte is its own character, others are U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _by_rank(ranked: Mapping[int, str], count: int) -> list[bytes]:
    tokens = [b64decode(ranked[rank], validate=True) for rank in range(count)]
    if len({token for token in tokens if len(token) == 1}) < 256 or len(set(tokens)) < count:
        raise ValueError("a byte is missing, or a token is there twice")
    if max(map(len, tokens)) > _MAX_LENGTH or sum(map(len, tokens)) > _MAX_BYTES:
        raise ValueError(f"tokens of more than {_MAX_LENGTH} bytes, or of more than {_MAX_BYTES} together")
    return tokens


def _build(tokens: list[bytes], special: list[AddedToken], pattern: str, *, special_first: bool) -> Tokenizer:
    character = {byte: text for text, byte in byte_alphabet().items()}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    texts = ["".join(character[byte] for byte in token) for token in tokens]
    found = [
        (rank, ranks[token[:cut]], ranks[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    contents = [token.content for token in special]
    vocabulary = {text: i for i, text in enumerate([*contents, *texts] if special_first else [*texts, *contents])}
    if len(vocabulary) < len(contents) + len(texts):
        raise ValueError("a special token is there twice, or an ordinary one too")
    merges = [(texts[left], texts[right]) for _, left, right in sorted(found)]
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Sequence(split_by(pattern)), decoders.ByteLevel()
    rust.add_tokens(special)
    return rust


def _named(special: list[str], version: str) -> dict[str, str]:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named = {name: text for name, text in names.items() if text in special}
    return named | {"tekken_version": str(int(version.removeprefix("v")))}
