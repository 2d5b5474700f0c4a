"""Bodies of requests: their fields, the checks of each field, and what a body says about sampling, prompt and answer."""
