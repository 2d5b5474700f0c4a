"""`transom bench policies`: what KV policies save and what they cost, on one worker without HTTP.

- `runs`: runs requests on an engine and notes memory, time and preemptions.
- `scenarios`: memory and throughput, preemptions under a tight budget, quality by window, requests in a fixed budget.
- `losing_cases`: tasks whose answer lies far back: a needle in a haystack, JSON brackets, repetition.
- `streams`: text of several times the model's trained length.
- `report`: all figures as tables and as PNG plots.
"""
