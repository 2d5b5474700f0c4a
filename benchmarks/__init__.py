"""Measurements of speed and of promises, one folder a question. Each module's docstring has its command and its last figure.

| folder | question | claim of the README that it backs |
|---|---|---|
| `engine` | How fast is the engine beside others, and each kernel beside the device's limits? | decode and prefill against vLLM |
| `cache` | How much does the prefix cache find when memory is short? | prefix hits beside vLLM's |
| `routing` | How much prefill does routing by hits save, in virtual time? | routing by exact prefix hits |
| `serving` | What does a client of the HTTP server see: under load, under kills, after a loss? | failover and the soak |
| `gpu` | Is everything right and fast on a GPU? | nothing yet: no GPU has run it |

Run them from the root of the repository as modules: `python -m benchmarks.engine.cpu_peers --help`. Results belong into
`results/local`, which git ignores, and figures into the documents. A benchmark that gave its figure and guards nothing is
deleted: the document that has the figure names the commit, and `git show COMMIT:benchmarks/NAME.py` shows how it was measured.
"""
