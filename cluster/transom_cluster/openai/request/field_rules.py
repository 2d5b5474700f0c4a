"""Rules for fields of OpenAI's and vLLM's APIs that this server does not support: it ignores harmless ones and refuses the others.

The server never silently ignores a field that would change the response. A field with the value null counts as not given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from transom_core.errors import RequestError

MAX_NEUTRAL_BYTES = 64  # every neutral value is shorter, so a longer text is refused without parsing it

_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",  # prompts with a common prefix meet by its blocks
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)

_REFUSED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    # field: its neutral values, which ask for the default behaviour; with (), the server accepts only null
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
}

_REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}

_REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"suffix": ("",), "prompt_embeds": (), "tools": ([],)}

_INSTEAD = {
    # field: what to send instead
    "functions": "send tools, each {'type': 'function', 'function': {...}}",
    "function_call": "send tool_choice",
    "suffix": "the model only continues a prompt; write the text that follows into the prompt itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """What one endpoint does with fields that its body model does not have.

    `refused` maps a field to its neutral values. The server accepts these values, because they ask for the default behaviour.
    """

    ignored: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]

    def check(self, texts: Mapping[str, Raw]) -> None:
        """Check that refused fields have a neutral value. `texts` maps each refused field that is not null to its JSON text.

        Raises:
            RequestError: a field has another value; `param` names the field.
        """
        for name, text in texts.items():
            neutral = self.refused[name]
            if is_one_of(text, neutral):
                continue
            leave_out = f"leave it out, or send {neutral[0]!r}" if neutral else "leave it out"
            raise RequestError(f"{name} is not supported; {_INSTEAD.get(name, leave_out)}.", param=name)


def is_one_of(text: Raw, values: Sequence[Any]) -> bool:
    """Return whether the JSON text `text` is one of `values`. The types must be equal too, so that `true` is not 1."""
    if len(memoryview(text)) > MAX_NEUTRAL_BYTES:
        return False
    try:
        given = msgspec.json.decode(text)
    except ValueError:  # msgspec does not check the UTF-8 of strings inside a `Raw` text until it decodes them
        return False
    return any(type(given) is type(value) and given == value for value in values)


CHAT_RULES = FieldRules(ignored=_HARMLESS, refused=_REFUSED_EVERYWHERE | _REFUSED_IN_CHAT)
COMPLETION_RULES = FieldRules(ignored=_HARMLESS, refused=_REFUSED_EVERYWHERE | _REFUSED_IN_COMPLETIONS)
TOKENIZE_RULES = FieldRules(ignored=frozenset(), refused={"chat_template": ()})
NO_RULES = FieldRules(ignored=frozenset(), refused={})
