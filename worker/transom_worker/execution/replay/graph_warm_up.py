"""Captures and checks the graph of every size at start-up. If the capture of a decode size fails, the worker runs without graphs.
Mixed sizes follow and need more memory: if the capture of one fails, there are none from it on, and the graphs before it stay.

If a size's graph gives other logits than the forward pass, it is captured and checked once more over other steps: cuBLAS may round
a product differently on the capture's stream, which may change the choice of an expert in a mixture of experts. If the second graph
differs too, steps of this size run eagerly, and the log names the first layer that differs; other sizes keep their graphs.

With several ranks, a step's collectives complete only if all ranks replay it, or all run it eagerly. So ranks capture the same
sizes in the same order and exchange the outcome of each capture and of each check; all keep a graph, or none does. An error in a
step that is computed, not captured, ends the rank: the others wait for it in the step's collectives. All ranks choose the same size
for a step, because they plan the same work items, which depend on the plan and on launch keys that are equal on all ranks.

The made-up steps read blocks of random numbers. Over a blank cache, a graph that reads the wrong keys would give the
right result. States of recurrent layers are read from some blocks and written to another one, so that every run of a step reads
the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from zlib import crc32

import numpy as np
import torch

from transom_core.contract import SamplingParams
from transom_core.errors import RankLost
from transom_core.kv_cache.layout import ArenaLayout
from transom_kernels.paged_attention.triton.launches import launch_keys_of
from transom_kernels.paged_attention.triton.tuning import FEW_TOKENS
from transom_kernels.quantised_kv import FORMATS, head_width, quantise_rows
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.block_tables import NO_BLOCK
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.step_arrays import Ints, StepArrays
from transom_worker.execution.replay.decode_graphs import DecodeGraphs
from transom_worker.execution.replay.decode_replay import ReplayMismatch
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.replay.graph_capture import CudaCapture, Replayable
from transom_worker.execution.replay.graph_inputs import GraphInputs, GroupLaunchKey
from transom_worker.execution.tiers.slabs import block_rows
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.scheduling.step import NO_ID, NewSequence, StepPlan

LIMIT_S = 120.0  # sizes not captured within this time run without a graph; the most used sizes come first
TRIES = (1, 3)  # a graph is captured over the step of one of these seeds, and checked over the step of seed + 1
MAX_RANDOM_BLOCKS = 64  # per group, besides the blocks that the sequences write to
# A state is large. Sequences of made-up steps read and write few; the last one is only written, by all of them.
MAX_STATES = 4

logger = logging.getLogger("transom.worker")


class _Outcome(IntEnum):
    """What came of one rank's try to capture one size."""

    RIGHT = 0
    DIFFERS = 1  # the replay gives other logits than the forward pass
    FAILED = 2


def capture_decode_graphs(
    model: Model,
    builder: BatchBuilder,
    sizes: DecodeSizes,
    device: CudaCapture,
    *,
    slab: torch.Tensor,
    parallel: Parallel,
    on_size: Callable[[], None] = lambda: None,
) -> DecodeGraphs | None:
    """Capture the graphs of as many sizes as `LIMIT_S` allows, and call `on_size` before each. If a capture fails on any rank, or
    no size has a graph, return None; a warning says why.

    The slab is blank again afterwards. An error of a forward pass that is not captured is raised.
    """
    steps = _RandomSteps(builder.layout, vocab_size=model.architecture.vocab_size, max_seqs=sizes.num_seqs[-1])
    launch_keys = _launch_keys(model, builder, steps.step(builder, DecodeSize(level=0, num_seqs=1), sizes, seed=1))
    if len(set(parallel.exchange(crc32(repr(launch_keys).encode()), slab.device))) > 1:
        logger.warning("Decode steps run without CUDA graphs: ranks have attention layers of different shapes.")
        return None
    capture = _Capture(steps, parallel, slab.device, on_size)

    def make() -> DecodeGraphs:
        steps.fill_blocks(builder, slab)
        return DecodeGraphs(model, builder, sizes, launch_keys, device)

    try:
        return capture.all(make)
    finally:
        steps.clear_blocks(builder.layout, slab)


class _CaptureFailed(Exception):
    """An error in the steps of the only rank, which then runs without graphs."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Capture:
    """Captures all sizes on one rank, in step with the other ranks."""

    def __init__(
        self, steps: _RandomSteps, parallel: Parallel, device: torch.device, on_size: Callable[[], None]
    ) -> None:
        self._steps, self._parallel, self._device, self._on_size = steps, parallel, device, on_size

    def all(self, make: Callable[[], DecodeGraphs]) -> DecodeGraphs | None:
        """Create the graphs with `make`, and capture and check every size until `LIMIT_S` is over on any rank."""
        begin_s = time.perf_counter()
        try:
            graphs = make()
        except Exception as failure:
            self._exchange(_Outcome.FAILED)
            _warn("them", failure)
            return None
        if self._exchange(_Outcome.RIGHT) is _Outcome.FAILED:
            _warn("them", None)
            return None
        for size in graphs.sizes.all:
            self._on_size()
            is_late = time.perf_counter() - begin_s > LIMIT_S
            if any(self._parallel.exchange(is_late, self._device)):
                logger.warning("%s from %s on run without CUDA graphs: capturing took too long.", _steps(size), size)
                break
            try:
                outcome, error = self._one(graphs, size)
            except _CaptureFailed as failure:
                outcome, error = _Outcome.FAILED, failure.cause
            if outcome is _Outcome.FAILED:
                _warn(str(size), error, steps=_steps(size))
                if not size.mixed_tokens:
                    return None
                break
            if outcome is _Outcome.DIFFERS:
                graphs.drop(size)
                logger.warning(
                    "%s of %s run without CUDA graphs, which is slower: %s; %s.",
                    _steps(size), size, error or "another rank's graph is wrong", self._where(graphs, size),
                )  # fmt: skip
        spent_s, sizes = time.perf_counter() - begin_s, graphs.sizes
        logger.info(
            "Captured %d CUDA graphs in %.1f s: decode steps of up to %d sequences, mixed steps of up to %d tokens, "
            "%d levels of context.",
            graphs.num_graphs, spent_s, sizes.num_seqs[-1], sizes.most_mixed_tokens, sizes.num_levels,
        )  # fmt: skip
        return graphs if graphs.num_graphs or graphs.num_wrong else None

    def _one(self, graphs: DecodeGraphs, size: DecodeSize) -> tuple[_Outcome, Exception | None]:
        """Capture one size, with one try for each seed of `TRIES`.

        Returns the worst outcome of all ranks in the last try, and this rank's error in it.
        """
        for seed in TRIES:
            inputs, graph, error = self._record(graphs, size, seed)
            if graph is None:
                return _Outcome.FAILED, error
            own = _Outcome.RIGHT
            try:
                with self._executed():
                    graphs.check(size, inputs, graph, self._step(graphs, size, seed + 1))
            except ReplayMismatch as mismatch:
                own, error = _Outcome.DIFFERS, mismatch
            worst = self._exchange(own)
            if worst is _Outcome.RIGHT:
                break
        return worst, error

    def _record(
        self, graphs: DecodeGraphs, size: DecodeSize, seed: int, sums: torch.Tensor | None = None
    ) -> tuple[GraphInputs, Replayable | None, Exception | None]:
        """Capture one size over the step of a seed, on all ranks; return no graph, and this rank's error, if one of them fails."""
        with self._executed():
            inputs = graphs.warm_up(size, self._step(graphs, size, seed))
        graph, error, own = None, None, _Outcome.RIGHT
        try:
            graph = graphs.record(inputs, sums)
        except Exception as failure:  # nothing was computed, so the ranks can go on together
            error, own = failure, _Outcome.FAILED
        if self._exchange(own) is _Outcome.FAILED:
            graph = None
        return inputs, graph, error

    @contextmanager
    def _executed(self) -> Iterator[None]:
        """Run a step. With several ranks, an error in it ends this rank: the others wait for it in the step's collectives."""
        try:
            yield
        except (ReplayMismatch, RankLost):
            raise
        except Exception as error:
            if self._parallel.size > 1:
                raise
            raise _CaptureFailed(error) from error

    def _where(self, graphs: DecodeGraphs, size: DecodeSize) -> str:
        """Return from which layer on this rank's replay of a size differs."""
        sums, seed = graphs.layer_sums(size), TRIES[-1]
        try:
            inputs, graph, error = self._record(graphs, size, seed, sums)
            if graph is None:
                return f"its layers could not be compared ({error or 'another rank could not capture them'})"
            with self._executed():
                layer = graphs.first_wrong_layer(inputs, graph, sums, self._step(graphs, size, seed + 1))
        except _CaptureFailed as failure:
            return f"its layers could not be compared ({failure.cause})"
        return (
            "all layers agree, so the output head differs"
            if layer is None
            else f"layer {layer} is the first that differs"
        )

    def _step(self, graphs: DecodeGraphs, size: DecodeSize, seed: int) -> StepArrays:
        return self._steps.step(graphs.builder, size, graphs.sizes, seed=seed)

    def _exchange(self, own: _Outcome) -> _Outcome:
        """Return the worst outcome of all ranks."""
        return _Outcome(max(self._parallel.exchange(own, self._device)))


def _steps(size: DecodeSize) -> str:
    return "Mixed steps" if size.mixed_tokens else "Decode steps"


def _warn(what: str, error: Exception | None, *, steps: str = "Decode steps") -> None:
    """Say why there are no graphs, or none of further mixed sizes; `error` is None if it was another rank's."""
    reason = "another rank's capture failed" if error is None else f"{type(error).__name__}: {error}"
    logger.warning(
        "%s run without CUDA graphs: capturing %s failed (%s). --enforce-eager does without the attempt.",
        steps,
        what,
        reason,
    )


def _launch_keys(model: Model, builder: BatchBuilder, arrays: StepArrays) -> tuple[GroupLaunchKey, ...]:
    """Run a forward pass, and return the launch keys that the model's attention layers use in each group."""
    batch = builder.batch(arrays)
    model.forward(batch)
    return tuple((index, key) for index, group in enumerate(batch.groups) for key in launch_keys_of(group))


class _RandomSteps:
    """Steps of made-up sequences over blocks of random numbers. Each sequence writes to a block of its own."""

    def __init__(self, layout: ArenaLayout, *, vocab_size: int, max_seqs: int) -> None:
        self._vocab_size, self._specs = vocab_size, [group.spec for group in layout.groups]
        self._blocks = [
            _own_blocks(layout, group, MAX_STATES if spec.is_state else MAX_RANDOM_BLOCKS + max_seqs)
            for group, spec in enumerate(self._specs)
        ]

    def fill_blocks(self, builder: BatchBuilder, slab: torch.Tensor) -> None:
        """Fill the blocks with random numbers."""
        generator = torch.Generator(slab.device).manual_seed(0)
        for layer, group in enumerate(builder.group_of_layer):
            rows = torch.tensor(self._blocks[group], device=slab.device)
            cache = builder.caches[layer]
            for stored, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
                numbers = (len(rows), *stored.shape[1:-1], head_width(stored))
                values = torch.randn(numbers, generator=generator, device=slab.device, dtype=torch.float32)
                if scale is None:
                    stored[rows] = values.to(stored.dtype)
                else:
                    elements, scale[rows] = quantise_rows(values, FORMATS[stored.dtype])
                    stored.view(torch.uint8)[rows] = elements.view(torch.uint8)  # torch scatters no 8-bit floats

    def clear_blocks(self, layout: ArenaLayout, slab: torch.Tensor) -> None:
        """Zero these blocks again, and the dump blocks, to which padding sequences write."""
        for group, blocks in enumerate(self._blocks):
            rows = torch.tensor([*blocks, layout.dump_block(group)], device=slab.device)
            block_rows(layout, slab, group)[rows] = 0

    def step(self, builder: BatchBuilder, size: DecodeSize, sizes: DecodeSizes, *, seed: int) -> StepArrays:
        """Make a step with all sequences of a decode size: a long one, and short ones. A step of a mixed size has a long one of
        each tiling, and may have fewer sequences and tokens than the size.

        With an odd seed the long sequence is as long as the size's level allows; with an even one it is five eighths as long.
        """
        random = np.random.default_rng(seed)
        counts, specs = np.ones(size.num_seqs, dtype=np.int64), self._specs
        reach = sizes.reach_tokens(size.level)
        long = [(1, 1)]
        if size.mixed_tokens:
            counts = _mixed_counts(size, sizes.reach_tokens(0), random)
            long += [(2, FEW_TOKENS), (FEW_TOKENS + 1, size.mixed_tokens)]
        num_seqs = len(counts)
        starts = random.integers(0, sizes.reach_tokens(0) - counts + 1)
        for least, most in long:
            of_tiling = np.flatnonzero((counts >= least) & (counts <= most))
            if len(of_tiling):
                chosen = random.choice(of_tiling)
                last_start = reach - counts[chosen]
                starts[chosen] = last_start if seed % 2 else min(reach * 5 // 8, last_start)
        # Random lower bounds, as attention has them during a window repair, so that graphs are checked with them too.
        nowhere = [NO_ID] * num_seqs  # of states; below, they get their blocks
        attend_from = [nowhere if spec.is_state else random.integers(0, starts // 4 + 1).tolist() for spec in specs]
        store = SequenceStore(specs, max_num_seqs=num_seqs)
        for seq_id, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            store.add(_sequence(seq_id, start, random.integers(0, self._vocab_size, count).tolist()))
            for group in [group for group, spec in enumerate(specs) if not spec.is_state]:
                self._fill_table(store, seq_id, num_seqs, group, (start, start + count), random)
        ends = starts + counts
        goes_on = (counts > 1) & (random.random(num_seqs) < 0.25)  # chunks that do not end their prompts have no logits
        plan = StepPlan(
            step_id=0,
            seq_ids=list(range(num_seqs)),
            start=starts.tolist(),
            count=counts.tolist(),
            attend_from=attend_from,
            write_from=[
                nowhere if spec.is_state else self._write_from(group, starts, ends) for group, spec in enumerate(specs)
            ],
            logits_from=np.where(goes_on, ends, ends - 1).tolist(),
        )
        arrays = builder.arrays(plan, store)
        for group, spec in enumerate(specs):
            if spec.is_state:
                *read, written = self._blocks[group]
                arrays.groups[group].first_block[:] = random.choice(read or [NO_BLOCK], num_seqs)
                arrays.groups[group].block_table[:] = written
        return arrays

    def _write_from(self, group: int, starts: Ints, ends: Ints) -> list[int]:
        """Return from which position on each sequence writes to its last block, if every sequence has a block of its own; else its
        end. Tokens before it go to the dump block.

        If two tokens had the same slot, their writes would race.
        """
        size = self._specs[group].block_size
        writes = len(self._blocks[group]) > len(starts)
        first: list[int] = (np.maximum(starts, (ends - 1) // size * size) if writes else ends).tolist()
        return first

    def _fill_table(
        self,
        store: SequenceStore,
        seq_id: int,
        num_seqs: int,
        group: int,
        new: tuple[int, int],
        random: np.random.Generator,
    ) -> None:
        """Give a sequence the blocks that its group would keep for new tokens [start, end): random ones that all sequences share,
        and its own block as the last."""
        tables, spec, own = store.tables[group], self._specs[group], self._blocks[group]
        shared = own[num_seqs:] or own
        (start, end), live_ranges = new, spec.live(new[0])
        last = (end - 1) // spec.block_size
        first = live_ranges[-1][0] if live_ranges else start
        first = max(first // spec.block_size, spec.num_sink_blocks)
        num_sink_blocks = min(spec.num_sink_blocks, last + 1)
        num_blocks = num_sink_blocks + max(0, last - first + 1)
        chosen = random.choice(np.array(shared), num_blocks).tolist()
        chosen[-1] = own[seq_id % len(own)]
        tables.apply(store[seq_id].row, dropped=0, first_block=first, blocks=chosen)


def _own_blocks(layout: ArenaLayout, group: int, max_blocks: int) -> list[int]:
    """Return blocks in pages that only this group uses here, so that no other group's blocks overlap them."""
    blocks: list[int] = []
    for page in range(group, layout.num_pages, len(layout.groups)):
        blocks += range(layout.first_block(page, group), layout.end_block(page, group))
        if len(blocks) >= max_blocks:
            break
    return blocks[:max_blocks] or [0]


def _mixed_counts(size: DecodeSize, longest: int, random: np.random.Generator) -> Ints:
    """Return the new tokens of made-up sequences in random order: two chunks of prompts, two of a few tokens, and single tokens."""
    counts: list[int] = []
    left = int(random.integers(size.mixed_tokens // 2 + 1, size.mixed_tokens + 1))
    while left and len(counts) < size.num_seqs:
        kinds = {0: (FEW_TOKENS + 1, left // 2), 1: (2, FEW_TOKENS)}
        least, most = kinds.get(len(counts) % 8, (1, 1)) if len(counts) < 16 else (1, 1)
        most = max(1, min(most, left, longest))
        counts.append(int(random.integers(min(least, most), most + 1)))
        left -= counts[-1]
    return random.permutation(np.array(counts))


def _sequence(seq_id: int, start: int, token_ids: list[int]) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        request_id="",
        token_ids=(*(0,) * start, *token_ids),
        num_prompt_tokens=start + len(token_ids),
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
