"""`Tokenizer`: converts text to token ids and back, and chats to prompts, with the Rust library `tokenizers`.

transformers' tokenizer gives equal ids but takes seconds to import and load. This one loads in a tenth of a second to two, from
`tokenizer.json`, `tekken.json`, `tiktoken.model` or a GGUF file. It does not change after loading, so any thread may call it.

The library's `encode` holds the GIL. This module calls only `encode_batch_fast`, which releases the GIL and makes neither offsets
nor texts of tokens, so that other threads continue while a long text is tokenised (docs/performance.md).

Two kinds of vocabulary are supported:

- **byte level** (GPT-2, Llama 3, Qwen): each character of a token's text stands for a byte, in a fixed alphabet of 256 characters;
  a space is `Ġ`.
- **SentencePiece** (Llama 2, Gemma): a token's text is ordinary text, with `▁` for a space; a byte that no other token covers has a
  token like `<0x0A>`.

**Added tokens** (`<|im_start|>`) come on top of the vocabulary: the library splits text at them first. **Special tokens** are the
added tokens that `skip_special_tokens` leaves out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as RustTokenizer

from transom_core.errors import ModelError, RequestError
from transom_core.model_files.resolve import ModelFiles, eos_token_ids
from transom_core.model_files.text_files import read_json, read_text
from transom_core.text.built_in_templates import built_in_template
from transom_core.text.chat_template import ChatTemplate, Prompt, read_messages
from transom_core.text.default_tool_prompt import messages_with_tools
from transom_core.text.gguf_tokenizer import read_gguf_vocabulary
from transom_core.text.ranked_tokenizers import byte_alphabet, read_kimi, read_tekken
from transom_core.text.template_renderer import TemplateRenderer, TemplateTooExpensive, shared_renderer
from transom_core.text.turn_boundaries import ChatTokens, Markers

_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_UNCHECKED_CHARS = 10_000  # the length of a longer text is checked before it is encoded
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

CheckLength = Callable[..., None]
"""Raises RequestError for a number of tokens that is too large. `at_least=True` says that the text has that many or more."""


class Tokenizer:
    """One model's tokenizer and chat template. `Tokenizer.load` makes it from a model's files.

    `named_tokens` has the texts of those of bos_token, eos_token, unk_token and pad_token that the model has.
    """

    def __init__(
        self,
        rust: RustTokenizer,
        *,
        named_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
        eos_token_ids: Sequence[int],
        model_type: str = "",
    ) -> None:
        """`eos_token_ids` end a text, as the named eos_token does. `tool_template` is the template for chats with tools, if the
        model has two templates. `model_type` is that of the model's config, because families differ in their answers' markup."""
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._byte_level = _is_byte_level(rust)
        added = rust.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._markers = Markers(
            {
                token.content: i
                for i, token in added.items()
                if _cuts_text(token, normalizes=rust.normalizer is not None)
            }
        )
        self._added_texts = {i: token.content for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}  # token id -> its bytes, for the tokens that were requested so far
        # `skip_special_tokens` -> token id -> its text, for tokens of whole characters that `Detokenizer` has decoded so far.
        self.whole_texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self._named_tokens = dict(named_tokens)
        self._template = (
            ChatTemplate(source=chat_template, tool_source=tool_template, special_tokens=self._named_tokens)
            if chat_template
            else None
        )
        self.model_type = model_type
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_token_ids, *self._named_id("eos_token"))))

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """Load the tokenizer of a resolved model.

        Raises:
            ModelError: the tokenizer is missing, broken, or of a kind that is not supported; the message names the file.
        """
        load = _load_gguf if files.is_gguf else _load_folder
        return load(files.path, eos_token_ids(files), str(files.config.get("model_type", "")))

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model came with a chat template."""
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """Return the text of the template that renders chats with tools; None if the model came with none."""
        return None if self._template is None else self._template.tool_source or self._template.source

    @property
    def template_knows_tools(self) -> bool:
        """Return whether the chat template supports tools. Otherwise `default_tool_prompt` puts them into the system prompt."""
        return self._template is not None and self._template.knows_tools(has_tools=True)

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Return id -> text of the added tokens, special or not."""
        return self._added_texts

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Return the most bytes of a text that one token can stand for; None if a token may stand for any number of bytes.

        It is None for a vocabulary without a token for each byte, because the token for unknown text may stand for any text.
        """
        if not self._byte_level and self._rust.token_to_id("<0x0A>") is None:
            return None
        # A normalizer may shorten a text, by half with the compositions of NFC, and to a third with SentencePiece's space.
        slack = 3 if self._rust.normalizer is not None else 1
        return slack * max(len(text.encode()) for text in self._rust.get_vocab(with_added_tokens=True))

    def to_json(self) -> str:
        """Return the tokenizer as the text of a `tokenizer.json`, without truncation and padding."""
        return str(self._rust.to_str())

    @cached_property
    def digest(self) -> str:
        """Return the digest of the vocabulary. Processes with equal digests mean the same token by a token id."""
        tokens = sorted(self._rust.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()

    def check_chat_template(self) -> None:
        """Render a chat of one message, so that a template that never ends is found before there are requests.

        Raises:
            ModelError: the template exceeds a limit of time or memory. A template may refuse this chat without an error.
        """
        if self._template is None:
            return
        renderer = TemplateRenderer()  # not the shared one: the process that checks a start renders no other chat
        try:
            renderer.render(self._template, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
        except TemplateTooExpensive as error:
            raise ModelError(f"A chat of one message shows that the model's chat template is broken. {error}") from None
        except RequestError:
            return
        finally:
            renderer.close()

    def encode(
        self,
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        check_length: CheckLength | None = None,
    ) -> list[int]:
        """Return the token ids of `text`, or of a pair of texts. The text of a special token in it becomes that token.

        `check_length` is called twice. The first call is before encoding, which takes up to 140 times the memory of the text; it
        gets the least number of tokens that a text of this length can have. The second call is before the ids become Python
        objects, which takes memory and holds the GIL for 40 ms for a million ids; it gets the number of tokens.

        Raises:
            RequestError: the text has half of a surrogate pair, which cannot be encoded; or `check_length` raises it.
        """
        whole = text + (second or "")
        if check_length is not None and len(whole) > MAX_UNCHECKED_CHARS and self.longest_token_bytes is not None:
            num_bytes = len(whole) if whole.isascii() else len(whole.encode("utf-8", "surrogatepass"))
            check_length(-(-num_bytes // self.longest_token_bytes), at_least=True)
        try:
            given = text if second is None else (text, second)
            (encoding,) = self._rust.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        except TypeError:
            message = "The text holds half of a surrogate pair (such as \\ud83d alone); send valid Unicode."
            raise RequestError(message) from None
        if check_length is not None:
            check_length(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids beyond the vocabulary have no text; bytes that are not UTF-8 become U+FFFD."""
        known = [i for i in token_ids if 0 <= i < 2**32]
        return str(self._rust.decode(known, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        r"""Return one token's text as OpenAI's log-probabilities write it: bytes of an incomplete character become `\xe2\x80`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that one token adds to a text; none for an id beyond the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._make_bytes(token_id)
        return data

    def marker_id(self, text: str) -> int | None:
        """Return the id of the one token that is this marker of chat or answer markup; None if the text is ordinary tokens.

        Such a token is a special token, or an added token with a text like `<tool_call>`, which ordinary text does not contain.
        """
        token_id: int | None = self._rust.token_to_id(text)
        is_marker = token_id in self._special_ids or (token_id in self._added_texts and text[:1] + text[-1:] == "<>")
        return token_id if is_marker else None

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves out this token."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        check_length: CheckLength | None = None,
    ) -> Prompt:
        """Return a chat as a prompt: its text, its token ids, the turn boundaries, at which messages end, and the cache marks.

        `template` replaces the model's own template; `extra` are further variables for it, such as `tools`. A message's end is a
        turn boundary only if the ids of the chat up to there are a prefix of the whole chat's ids. `check_length`: see `encode`.

        Raises:
            RequestError: there is no template, a message is malformed, or the template refuses the messages.
        """
        chosen = self._choose_template(template)
        checked = read_messages(messages)
        tools = (extra or {}).get("tools") or ()
        if not chosen.knows_tools(has_tools=bool(tools)):
            checked = messages_with_tools(checked, tools)
        chat = shared_renderer().render(chosen, checked, add_generation_prompt=add_generation_prompt, extra=extra)
        token_ids = self.encode(chat.text, add_special_tokens=False, check_length=check_length)
        tokens = ChatTokens(
            chat.text, token_ids, markers=self._markers, encode=partial(self.encode, add_special_tokens=False)
        )
        return Prompt(
            text=chat.text,
            token_ids=tuple(token_ids),
            turn_boundaries=tokens.turn_boundaries(chat.turn_ends),
            cache_marks=tokens.cache_marks(chat.cache_marks, chat.turn_ends),
        )

    def _choose_template(self, template: str | None) -> ChatTemplate:
        if template is not None:
            return ChatTemplate(source=template, special_tokens=self._named_tokens, param="chat_template")
        if self._template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions, or give one as chat_template.", param="messages"
            )
        return self._template

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return str(token).encode()  # an added token, whose text is plain
        if token_id in self._added_texts:
            # Gemma's runs of spaces are added tokens
            return self._added_texts[token_id].replace(_SENTENCEPIECE_SPACE, " ").encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace(_SENTENCEPIECE_SPACE, " ").encode()

    def _named_id(self, name: str) -> tuple[int, ...]:
        token_id = self._rust.token_to_id(self._named_tokens[name]) if name in self._named_tokens else None
        return () if token_id is None else (token_id,)


def _load_folder(folder: Path, eos_token_ids: Sequence[int], model_type: str) -> Tokenizer:
    path, tekken, kimi = (folder / name for name in ("tokenizer.json", "tekken.json", "tiktoken.model"))
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    named = {name: value for name in _NAMED_TOKENS if (value := _token_text(settings.get(name)))}
    for name, value in named.items():
        if value != value.encode(errors="replace").decode():  # JSON may escape half of a pair of UTF-16
            raise ModelError(f"{settings_path} says {name} {value!r}, which is no text; download the file again.")
    templates = _folder_templates(folder, settings)
    kind = model_type
    # A tekken.json has what chats need, also beside a tokenizer.json without a template.
    if tekken.exists() and not (path.exists() and templates.get("default")):
        rust, named = read_tekken(tekken)
        kind = f"tekken{named['tekken_version']}"
    if kimi.exists() and model_type.startswith("kimi") and not path.exists():
        rust = read_kimi(kimi, settings.get("added_tokens_decoder") or {})
    elif path.exists() or not tekken.exists():
        rust = _read_rust(path, folder)
    return Tokenizer(
        rust,
        named_tokens=named,
        chat_template=templates.get("default") or built_in_template(kind, rust.token_to_id),
        tool_template=templates.get("tool_use"),
        eos_token_ids=eos_token_ids,
        model_type=model_type,
    )


def _read_rust(path: Path, folder: Path) -> RustTokenizer:
    if not path.exists():
        raise ModelError(
            f"{path} is missing, and so are Mistral's tekken.json and Kimi's tiktoken.model; transformers writes it: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    text = read_text(path, folder)
    try:
        return RustTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for everything that is wrong in the file
        raise ModelError(f"{path} cannot be read: {error}.") from None


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> chat template: of a template file, else of `tokenizer_config.json`, else of `chat_template.json`."""
    found = settings.get("chat_template")
    named = (
        {entry.get("name"): entry.get("template") for entry in found} if isinstance(found, list) else {"default": found}
    )
    of_processor = folder / "chat_template.json"  # of models that take images too
    if not named.get("default") and of_processor.exists():
        named["default"] = read_json(of_processor).get("chat_template")
    own_files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (default := folder / "chat_template.jinja").exists():
        own_files["default"] = default
    named |= {name: read_text(path, folder) for name, path in own_files.items()}
    return {name: template for name, template in named.items() if isinstance(template, str) and template}


def _load_gguf(path: Path, eos_token_ids: Sequence[int], model_type: str) -> Tokenizer:
    vocabulary = read_gguf_vocabulary(path)
    return Tokenizer(
        vocabulary.rust,
        named_tokens=vocabulary.named_tokens,
        chat_template=vocabulary.chat_template,
        eos_token_ids=eos_token_ids,
        model_type=model_type,
    )


def _is_byte_level(rust: RustTokenizer) -> bool:
    """Return whether the vocabulary is byte level; if not, it is SentencePiece's. Raises ModelError for any other kind."""
    decoder: dict[str, Any] = json.loads(rust.decoder.__getstate__()) if rust.decoder else {"type": None}
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return True
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise ModelError(f"tokenizer.json decodes by {sorted(map(str, kinds))}; supported: ByteLevel and SentencePiece's.")


def _cuts_text(token: AddedToken, *, normalizes: bool) -> bool:
    """Return whether every occurrence of this added token splits the text, so that the text before it is tokenised as if alone.

    `normalizes`: the tokenizer has a normaliser. It changes the text before added tokens declared as `normalized` are searched.
    """
    return not (token.single_word or token.lstrip or (token.normalized and normalizes))


_BYTE_OF_CHARACTER = byte_alphabet()


def _token_text(value: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, which is a string or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
