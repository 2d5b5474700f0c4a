"""Text and token ids: tokenizer, chat templates and detokenizer."""
