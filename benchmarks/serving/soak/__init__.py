"""Runs a real cluster on loopback for hours, with mixed traffic and random kills, and checks the promises of docs/reliability.md.

    python -m benchmarks.serving.soak --hours 1
    python -m benchmarks.serving.soak --minutes 10 --seed 7 --json soak.json

The phases *calm*, *disturbed*, *steady* and *end* follow one another; docs/reliability.md tells what happens in each. A journal has
every event with its time. The exit status is 1 if a promise broke; the report names it. Processes start throughout a soak from the
sources in this folder, so change them in another worktree meanwhile.

docs/reliability.md has the figures of the last long one. `make test-all` runs ten minutes of it.
"""
