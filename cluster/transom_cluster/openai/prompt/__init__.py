"""Makes prompts: renders messages with the model's chat template, and turns text into tokens."""
