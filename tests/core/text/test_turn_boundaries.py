"""Turn boundaries of chats in every kind of template and tokenizer, against tokenising each beginning of the chat by itself."""

import re
from itertools import pairwise, takewhile
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import assume, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models, normalizers, pre_tokenizers

from tests.how_many import num_examples
from transom_core.text.chat_template import MAX_CACHE_MARKS, ChatTemplate, Prompt, read_messages
from transom_core.text.tokenizer import Tokenizer
from transom_core.text.turn_boundaries import FREE_CHARS, MAX_COMPARED_TEXTS, ChatTokens, Markers

EACH = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {
    "chatml": EACH
    + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + END
    + "<|im_start|>assistant\n{% endif %}",
    "no marker at the end": EACH + "<|im_start|>{{ m.role }}: {{ m.content }} " + END + "<|im_start|>it: {% endif %}",
    "no marker at the beginning": EACH + "{{ m.role }}: {{ m.content }}<|im_end|>" + END + "assistant:{% endif %}",
    "marker between": "{% for m in messages %}{% if not loop.first %}<|im_end|>{% endif %}{{ m.content }}"
    + END
    + "it:{% endif %}",
    "plain": EACH + "### {{ m.role }}:\n{{ m.content }}\n" + END + "### it:\n{% endif %}",
    "glued": EACH + "{{ m.content }}" + END + "{% endif %}",
    "trimmed": EACH + "<|im_start|>{{ m.role }}\n{{ m.content | trim }}" + END + "<|im_start|>{% endif %}",
}
PIECES = ["the", " th", "e", " ", "\n", "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "a", "é", "🦜", "."]
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
CHATS = st.lists(CONTENTS, min_size=1, max_size=5).map(
    lambda contents: [{"role": "user", "content": content} for content in contents]
)


def bpe(*, first: bool, normalizer: Any = None, **marker: bool) -> Tokenizer:
    """A SentencePiece-like tokenizer; with `first` only the text's first word gets a space before it."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thea.<|im_srd>\n", "th", "the", "▁the", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(letters))}
    rust = RustTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if first else "always", split=False)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if normalizer is not None:
        rust.normalizer = normalizer
    rust.add_special_tokens([AddedToken(text, **marker) for text in ("<|im_start|>", "<|im_end|>")])
    rust.add_tokens([AddedToken("<|im_", normalized=False), AddedToken(" th", normalized=False)])
    return Tokenizer(rust, named_tokens={}, chat_template=None, eos_token_ids=())


@pytest.fixture(scope="module")
def tokenizers(tiny: Tokenizer, demo: Tokenizer) -> dict[str, Tokenizer]:
    return {
        "byte level": tiny,
        "gguf": demo,
        "first": bpe(first=True),
        "always": bpe(first=False),
        "prepend": bpe(first=False, normalizer=normalizers.Prepend("▁"), normalized=True),
        "strip": bpe(first=True, normalizer=normalizers.Strip(), normalized=True),
        "lstrip": bpe(first=True, lstrip=True),
        "rstrip": bpe(first=True, rstrip=True),
        "single word": bpe(first=True, single_word=True),
    }


KINDS = ["byte level", "gguf", "first", "always", "prepend", "strip", "lstrip", "rstrip", "single word"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=num_examples(daily=30, exhaustive=600), deadline=None)
@given(messages=CHATS, template=st.sampled_from(sorted(TEMPLATES)), generation=st.booleans())
def test_boundaries_equal_those_of_tokenising_each_beginning(
    tokenizers: dict[str, Tokenizer], kind: str, messages: list[dict[str, str]], template: str, generation: bool
) -> None:
    tokenizer, source = tokenizers[kind], TEMPLATES[template]
    chat = tokenizer.apply_chat_template(messages, template=source, add_generation_prompt=generation)
    assert chat.turn_boundaries == _by_tokenising(tokenizer, chat, messages, source, generation)


@pytest.mark.parametrize("kind", ["byte level", "gguf", "always", "prepend"])
@settings(max_examples=num_examples(daily=20, exhaustive=400), deadline=None)
@given(messages=CHATS, template=st.sampled_from(sorted(TEMPLATES)), data=st.data())
def test_the_tokens_before_a_cache_mark_are_the_chats_and_those_of_its_text_before_the_mark(
    tokenizers: dict[str, Tokenizer], kind: str, messages: list[dict[str, Any]], template: str, data: st.DataObject
) -> None:
    """Other tokenizers, those with `first` among them, treat a text's beginning, or what follows a marker, in another way.

    A mark may then be before its place, so that a hit computes a few tokens more. A mark inside a marker is at its beginning; the
    text up to the mark ends in half a marker, and may have fewer tokens in common.
    """
    tokenizer, marks = tokenizers[kind], []
    for index, message in enumerate(messages):
        places = st.lists(st.integers(0, len(message["content"])), max_size=2, unique=True).map(sorted)
        cuts = [0, *data.draw(places), len(message["content"])]
        marks += [(index, cut) for cut in cuts[1:-1]]
        parts = [{"type": "text", "text": message["content"][a:b]} for a, b in pairwise(cuts)]
        messages[index] = message | {"content": parts, "cache_marks": tuple(cuts[1:-1])}
    chat = tokenizer.apply_chat_template(messages, template=TEMPLATES[template])
    assert len(chat.cache_marks) <= min(len(marks), MAX_CACHE_MARKS)
    rendered = ChatTemplate(source=TEMPLATES[template], special_tokens={}).render_chat(
        read_messages(messages), add_generation_prompt=True
    )
    inside = {at for match in re.finditer(r"<\|im_(start|end)\|>", chat.text) for at in range(*match.span())[1:]}
    assume(inside.isdisjoint(rendered.cache_marks))
    commons = set()
    for mark in rendered.cache_marks:
        alone = tokenizer.encode(chat.text[:mark], add_special_tokens=False)
        commons.add(
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, chat.token_ids, strict=False)))
        )
    assert set(chat.cache_marks) == commons - {0}


def _by_tokenising(
    tokenizer: Tokenizer, chat: Prompt, messages: list[dict[str, str]], source: str, generation: bool
) -> tuple[int, ...]:
    template = ChatTemplate(source=source, special_tokens={})
    boundaries = set()
    rendered = template.render_chat(messages, add_generation_prompt=generation)
    assert rendered.text == chat.text
    for end in rendered.turn_ends:
        token_ids = tokenizer.encode(chat.text[:end], add_special_tokens=False)
        if tuple(token_ids) == chat.token_ids[: len(token_ids)]:
            boundaries.add(len(token_ids))
    return tuple(sorted(boundaries - {0}))


def test_a_chat_is_tokenised_once_without_the_global_lock(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`encode` and `encode_batch` are not called: the one holds the lock, the other makes offsets and texts of tokens."""
    rust = Mock(wraps=tiny._rust)
    monkeypatch.setattr(tiny, "_rust", rust)
    messages = [{"role": "user", "content": f"message {i} with some words in it"} for i in range(40)]
    chat = tiny.apply_chat_template(messages, template=TEMPLATES["chatml"])
    assert len(chat.turn_boundaries) == 32
    assert rust.method_calls == [call.encode_batch_fast([chat.text], add_special_tokens=False)]


def test_without_markers_as_much_text_is_compared_as_four_chats_have() -> None:
    """The first message and the latest ones are compared."""
    compared = []

    def encode(text: str) -> list[int]:
        compared.append(len(text))
        return [ord(character) for character in text]

    text = "x" * 2 * FREE_CHARS
    chat = ChatTokens(text, encode(text), markers=Markers({}), encode=encode)
    step = len(text) // 40
    ends = list(range(step, len(text), step))
    boundaries = chat.turn_boundaries(ends)
    assert sum(compared[1:]) <= MAX_COMPARED_TEXTS * len(text)
    assert sorted(compared[1:]) == list(boundaries)
    assert boundaries[0] == ends[0]
    assert list(boundaries[1:]) == ends[-len(boundaries[1:]) :]
    assert len(boundaries) == 5
