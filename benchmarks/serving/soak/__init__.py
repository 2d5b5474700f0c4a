"""Runs a real cluster on loopback for hours, with mixed traffic and random kills, and checks the promises of docs/reliability.md.

    python -m benchmarks.serving.soak --hours 1
    python -m benchmarks.serving.soak --minutes 10 --seed 7 --json soak.json

Two tiny random models of equal geometry in float32 take turns; their texts do not depend on batches, hits or the number of ranks.
Four phases follow one another: *calm* (every request of each model, which gives the texts to compare with, and many of them
again), *disturbed* (traffic, kills, bursts, weights that change in their folder, redeploys with other settings and the other
model), *steady* (the same traffic without kills: memory must be flat) and *end* (nothing may be left in use; the blocks on the
disk are those of their models). A hostile client is there in the two phases of traffic. A journal has every event with its time.
The exit status is 1 if a promise broke; the report names it.

docs/reliability.md has the figures of the last long one. `make test-all` runs ten minutes of it.
"""
