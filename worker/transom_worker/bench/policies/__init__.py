"""`transom bench policies`: measures what KV policies save and what they cost, on one worker without HTTP.

- `policy_runs`: runs requests on an engine and records memory, time and preemptions.
- `scenarios`: memory and throughput, preemptions under a tight budget, quality by window, requests in a fixed budget; tasks whose
  answers depend on text far back: a needle in a haystack, JSON brackets, repetition; text of several times the trained length.
- `texts`: the prompts of all measurements.
- `results`: all figures as tables and as JSON.
"""
