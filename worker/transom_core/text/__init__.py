"""Turns text into token ids and back: tokenizer, chat templates and detokenizer; also tool calls and reasoning (`markup`)."""
