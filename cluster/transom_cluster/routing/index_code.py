"""The compiled part of the fleet's prefix index: a hash table from blocks to the workers that have them; `hit_search` uses it.

Terms:

    key       names one block of one cache group: the first 8 bytes of its digest, changed by the group's number. Among 40 million
              blocks, two have equal keys with a probability of 1 in 20,000. A search may then promise a block that the worker does
              not have; the worker, which compares whole digests, computes it
    holder    a number for one tier of one worker. A worker has four: a multiple of four for its device, the next one for its host
              tier, the next one for its disk tier, and one that is not used. It may have four more that are being cleared
    entry     a key and its value in the hash table. The value says which holders have the block:
                   0   no entry        -h - 1   only holder h        s > 0   the holders in set number s
    set       two or more holders, as a row of bits. Equal sets are stored once and reference-counted, because the blocks of one
              prompt mostly have only a few different sets
    part      one of 1,024 small tables, chosen by the key's top bits, so that each grows in well under a millisecond

A part is an array of 12 bytes per slot: all keys (64 bits), then all values (32 bits). It uses linear probing: an entry is in the
slot that the key's next bits give, or in the next free one. Deleting leaves no tombstones: later entries move back instead.

All data is in arrays that `PrefixTable` owns. If one is full, a function returns which; the caller lets it grow and calls again,
and the function continues where it stopped.

numba compiles a function at its first call and keeps the code on disk for later starts. Compiling takes seconds. Assigning whole
arrays (`a[:] = b`), or viewing an array as another type, would double that time, because numba would also compile the code for
their error messages.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]

NUM_PARTS = 1024
SLOT_BYTES = 12
ADDRESS, CAPACITY, COUNT = 0, 1, 2  # columns of `parts`
FREE, NUM_SETS = 0, 1  # entries of `counts`: the first free set; sets in use
# Entries of `cursor`: where `apply_runs` continues, and the number of blocks added minus the number removed.
RUN, OFFSET, DIGEST, NET = 0, 1, 2, 3
DONE, SETS_FULL = -1, -2  # results; a result of 0 or more is the number of a part that is full

_GROUP_STEP = np.uint64(0x9E3779B97F4A7C15)
_PART_SHIFT = np.uint64(54)
_SLOT_SHIFT = np.uint64(22)
_LOW_32 = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_NONE = np.uint64(0)
_BIT_FACTOR = np.uint64(0x03F79D71B4CB0A89)  # the top 6 bits of its product with 2**i differ for every i
_BIT_INDEX = np.zeros(64, np.int64)
for _bit in range(64):
    _BIT_INDEX[(int(_BIT_FACTOR) << _bit & (1 << 64) - 1) >> 58] = _bit


Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function. The code is cached in `NUMBA_CACHE_DIR`, beside the source, or in the user's cache directory.

    If none of these can be written, every process compiles the function again.
    """
    try:
        made: Function = njit(cache=True)(function)
    except RuntimeError:  # no place for the code
        made = njit(function)
    return made


def inner(function: Function) -> Function:
    """Compile a function that only compiled functions call."""
    made: Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return made


def _pointer_to(item: types.Type):
    """Make the function that turns an address into a pointer to items of one type."""

    @intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(item)(types.int64), generate

    return pointer


_keys_at = _pointer_to(types.uint64)
_values_at = _pointer_to(types.int32)

# Bits


@inner
def _lowest_bit(word):
    """Return the index of a word's lowest set bit."""
    return _BIT_INDEX[((word & (~word + _ONE)) * _BIT_FACTOR) >> np.uint64(58)]


@inner
def _has(bits, holder):
    return (bits[holder >> 6] >> np.uint64(holder & 63)) & _ONE != _NONE


@inner
def _is_empty(bits):
    together = _NONE
    for word in bits:
        together |= word
    return together == _NONE


@inner
def _only_holder(bits):
    """Return the only holder of a set, or -1 if there are several."""
    found = -1
    for i in range(len(bits)):
        word = bits[i]
        if word:
            if found >= 0 or word & (word - _ONE):
                return -1
            found = 64 * i + _lowest_bit(word)
    return found


# Sets of holders


@inner
def _bucket(bits, num_buckets):
    mixed = np.uint64(0)
    for word in bits:
        mixed = (mixed ^ word) * _GROUP_STEP
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(num_buckets - 1))


@compiled
def link_sets(sets: Words, uses: Numbers, links: Numbers, buckets: Numbers, counts: Integers) -> None:
    """Rebuild the index of sets after arrays have grown: used sets go into the hash buckets, the others into the free list."""
    for bucket in range(len(buckets)):
        buckets[bucket] = 0
    counts[FREE] = 0
    for number in range(len(sets) - 1, 0, -1):
        if uses[number]:
            bucket = _bucket(sets[number], len(buckets))
            links[number] = buckets[bucket]
            buckets[bucket] = number
        else:
            links[number] = counts[FREE]
            counts[FREE] = number


@inner
def _use_set(bits, sets, uses, links, buckets, counts):
    """Return the number of the set with these bits, and count one more use of it. There must be a free set."""
    bucket = _bucket(bits, len(buckets))
    number = buckets[bucket]
    while number:
        is_equal = True
        for i in range(len(bits)):
            is_equal &= sets[number, i] == bits[i]
        if is_equal:
            uses[number] += 1
            return number
        number = links[number]
    number = np.int32(counts[FREE])
    counts[FREE] = links[number]
    counts[NUM_SETS] += 1
    for i in range(len(bits)):
        sets[number, i] = bits[i]
    uses[number] = 1
    links[number] = buckets[bucket]
    buckets[bucket] = number
    return number


@inner
def _release_set(number, sets, uses, links, buckets, counts):
    """Count one use less of a set; a set without uses becomes free."""
    uses[number] -= 1
    if uses[number]:
        return
    bucket = _bucket(sets[number], len(buckets))
    if buckets[bucket] == number:
        buckets[bucket] = links[number]
    else:
        before = buckets[bucket]
        while links[before] != number:
            before = links[before]
        links[before] = links[number]
    links[number] = counts[FREE]
    counts[FREE] = number
    counts[NUM_SETS] -= 1


@inner
def _read_value(value, sets, bits):
    """Write the holders that an entry's value names into `bits`."""
    only = np.int64(-value - 1)
    for i in range(len(bits)):
        bits[i] = sets[value, i] if value > 0 else _NONE
    if value < 0:
        bits[only >> 6] = _ONE << np.uint64(only & 63)


# The hash table


@inner
def _home_slot(key, capacity):
    return np.int64(((key >> _SLOT_SHIFT) & _LOW_32) * np.uint64(capacity) >> np.uint64(32))


@inner
def _slot(keys, values, capacity, key):
    """Return the slot of a key, or the free slot where the key would be inserted."""
    at = _home_slot(key, capacity)
    while values[at] != 0 and keys[at] != key:
        at += 1
        if at == capacity:
            at = 0
    return at


@inner
def _delete(keys, values, capacity, at):
    """Empty a slot, and move later entries back, so that each stays reachable from its home slot without a gap."""
    after = at
    while True:
        after += 1
        if after == capacity:
            after = 0
        if values[after] == 0:
            break
        home = _home_slot(keys[after], capacity)
        # The entry must not move to `at` if its home slot is after `at`: cyclically in (at, after].
        if (at < home <= after) if at < after else (home <= after or home > at):
            continue
        keys[at] = keys[after]
        values[at] = values[after]
        at = after
    values[at] = 0


@inner
def _is_full(part):
    """Return whether a part has too few free slots for another entry, which would fill more than 85 % of them."""
    return (part[COUNT] + 1) * 20 > part[CAPACITY] * 17


@compiled
def move_part(old: Integers, new: Integers) -> None:
    """Copy the entries of a part (a row of `parts`) into an empty, larger or smaller one."""
    keys, values, capacity = _keys_at(old[ADDRESS]), _values_at(old[ADDRESS] + 8 * old[CAPACITY]), old[CAPACITY]
    to_keys, to_values = _keys_at(new[ADDRESS]), _values_at(new[ADDRESS] + 8 * new[CAPACITY])
    for at in range(capacity):
        if values[at]:
            to = _slot(to_keys, to_values, new[CAPACITY], keys[at])
            to_keys[to] = keys[at]
            to_values[to] = values[at]
    new[COUNT] = old[COUNT]


@inner
def _key(first_word, group):
    return first_word ^ (np.uint64(group) * _GROUP_STEP)


@inner
def _value(parts, key):
    part = parts[np.int64(key >> _PART_SHIFT)]
    if part[COUNT] == 0:
        return np.int32(0)
    keys, values = _keys_at(part[ADDRESS]), _values_at(part[ADDRESS] + 8 * part[CAPACITY])
    return values[_slot(keys, values, part[CAPACITY], key)]


# Changes


@compiled
def apply_runs(
    parts: Integers,
    sets: Words,
    uses: Numbers,
    links: Numbers,
    buckets: Numbers,
    counts: Integers,
    holder: int,
    digests: Words,
    runs: Integers,
    cursor: Integers,
) -> int:
    """Add blocks to a holder or remove them, from `cursor` on. Return DONE, SETS_FULL, or the part that must grow first.

    `holder` is the worker's device. `digests` has four 64-bit words per block. A row of `runs` [runs, 4] is about the next blocks:
    group, 1 (added) or 0 (removed), number of blocks, tier. Adding a block that the holder has, or removing one that it does not
    have, changes nothing.
    """
    bits = np.empty(sets.shape[1], np.uint64)
    while cursor[RUN] < len(runs):
        run = runs[cursor[RUN]]
        group, is_added, count = run[0], run[1] == 1, run[2]
        of_tier = holder + run[3]
        alone = np.int32(-of_tier - 1)
        word, bit = of_tier >> 6, _ONE << np.uint64(of_tier & 63)
        while cursor[OFFSET] < count:
            if counts[FREE] == 0:
                return SETS_FULL
            key = _key(digests[4 * cursor[DIGEST]], group)
            number = np.int64(key >> _PART_SHIFT)
            part = parts[number]
            if is_added and _is_full(part):
                return number
            keys, values = _keys_at(part[ADDRESS]), _values_at(part[ADDRESS] + 8 * part[CAPACITY])
            at = _slot(keys, values, part[CAPACITY], key)
            value = values[at]
            if is_added:
                if value == 0:
                    keys[at] = key
                    values[at] = alone
                    part[COUNT] += 1
                    cursor[NET] += 1
                elif value != alone and not (value > 0 and sets[value, word] & bit):
                    _read_value(value, sets, bits)
                    bits[word] |= bit
                    values[at] = _use_set(bits, sets, uses, links, buckets, counts)
                    if value > 0:
                        _release_set(value, sets, uses, links, buckets, counts)
                    cursor[NET] += 1
            elif value == alone:
                _delete(keys, values, part[CAPACITY], at)
                part[COUNT] -= 1
                cursor[NET] -= 1
            elif value > 0 and sets[value, word] & bit:
                _read_value(value, sets, bits)
                bits[word] &= ~bit
                values[at] = _reduced(bits, value, sets, uses, links, buckets, counts)
                cursor[NET] -= 1
            cursor[OFFSET] += 1
            cursor[DIGEST] += 1
        cursor[OFFSET] = 0
        cursor[RUN] += 1
    return DONE


@inner
def _reduced(bits, value, sets, uses, links, buckets, counts):
    """Return the new value of an entry whose set `value` shrinks to `bits`, which are not empty."""
    only = _only_holder(bits)
    new = np.int32(-only - 1) if only >= 0 else _use_set(bits, sets, uses, links, buckets, counts)
    _release_set(value, sets, uses, links, buckets, counts)
    return new


@compiled
def clear_holders(
    part: Integers,
    sets: Words,
    uses: Numbers,
    links: Numbers,
    buckets: Numbers,
    counts: Integers,
    holders: Words,
    at: int,
) -> int:
    """Remove holders (bits) from a part's entries, from slot `at` on. Return DONE, or the next slot if there is no free set."""
    bits = np.empty(sets.shape[1], np.uint64)
    keys, values = _keys_at(part[ADDRESS]), _values_at(part[ADDRESS] + 8 * part[CAPACITY])
    while at < part[CAPACITY]:
        value = values[at]
        is_empty = False
        if value < 0:
            is_empty = _has(holders, np.int64(-value - 1))
        elif value > 0:
            if counts[FREE] == 0:
                return at
            _read_value(value, sets, bits)
            is_changed = False
            for i in range(len(bits)):
                is_changed |= bits[i] & holders[i] != _NONE
                bits[i] &= ~holders[i]
            if is_changed:
                is_empty = _is_empty(bits)
                if is_empty:
                    _release_set(value, sets, uses, links, buckets, counts)
                else:
                    values[at] = _reduced(bits, value, sets, uses, links, buckets, counts)
        if is_empty:
            _delete(keys, values, part[CAPACITY], at)  # then look at this slot again: an entry may have moved here
            part[COUNT] -= 1
        else:
            at += 1
    return DONE


# Searching


@compiled
def find_runs(
    parts: Integers, digests: Words, group: int, step: int, begin: int, end: int, ends: Integers, values: Numbers
) -> int:
    """Look up the blocks [begin, end) of one group, and return the number of runs of blocks with equal values.

    A block spans `step` hash blocks, so block `i` has the digest of its last one, `(i + 1) * step - 1`. The runs' ends and values
    are written to `ends` and `values` [end - begin].
    """
    count = 0
    for block in range(begin, end):
        value = _value(parts, _key(digests[(block + 1) * step - 1, 0], group))
        if count and values[count - 1] == value:
            ends[count - 1] = block + 1
        else:
            ends[count] = block + 1
            values[count] = value
            count += 1
    return count
