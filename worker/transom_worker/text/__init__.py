"""Text and token ids: tokenizers, chat templates, and the detokenizer."""
