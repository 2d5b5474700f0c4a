"""Checked kernels, for tests: each of their memory accesses is compared with the ranges of memory that the launch named.

Kernels work on raw addresses. With TRANSOM_CHECKED_KERNELS=1 they are compiled with a check before each load and store. An access
outside the named ranges goes to a spare page instead and is recorded, and the launch raises IndexError.
"""

import os
from typing import Any

import numpy as np
from llvmlite import binding, ir

CHECKED = os.environ.get("TRANSOM_CHECKED_KERNELS") == "1"

_MAX_RANGES = 4096  # in a recorded program one run names the tensors of many launches
_FAULTS, _FAULT_ADDRESS, _FAULT_BYTES, _SPARE, _NUM_RANGES, _RANGES = range(6)
_SPARE_BYTES = 1 << 16

_I64 = ir.IntType(64)

# words: number of faults, address and bytes of the last one, address of the spare page, number of ranges, then (begin, end) pairs
_table = np.zeros(_RANGES + 2 * _MAX_RANGES, dtype=np.int64) if CHECKED else np.zeros(0, dtype=np.int64)
_spare = np.zeros(_SPARE_BYTES if CHECKED else 0, dtype=np.uint8)
# code finds the table by this symbol: cached code cannot know the table's address in this process
_TABLE_SYMBOL = "transom_checked_ranges"
if CHECKED:
    _table[_SPARE] = _spare.ctypes.data
    binding.add_symbol(_TABLE_SYMBOL, _table.ctypes.data)


def set_ranges(ranges: list[tuple[int, int]]) -> None:
    """Name the memory that the next launch may touch, as (address, bytes).

    Raises:
        ValueError: there are too many ranges.
    """
    if len(ranges) > _MAX_RANGES:
        raise ValueError(f"{len(ranges)} ranges of memory; checked kernels take at most {_MAX_RANGES} in one launch.")
    _table[_NUM_RANGES] = 0
    pairs = np.array([(begin, begin + size) for begin, size in ranges], dtype=np.int64).reshape(-1)
    _table[_RANGES : _RANGES + len(pairs)] = pairs
    _table[_NUM_RANGES] = len(ranges)


def raise_fault(name: str) -> None:
    """Raise IndexError if a kernel touched other memory since the last call."""
    if _table[_FAULTS]:
        faults, address, size = (int(word) for word in _table[:3])
        _table[_FAULTS] = 0
        named = _table[_RANGES : _RANGES + 2 * int(_table[_NUM_RANGES])].reshape(-1, 2).tolist()
        near = min(named, key=lambda pair: max(pair[0] - address, address - pair[1]), default=None)
        raise IndexError(
            f"{name}: {faults} accesses outside of its memory, the last of {size} bytes at {address:#x}"
            + (
                "."
                if near is None
                else f", next to the range {near[0]:#x} to {near[1]:#x} ({address - near[1]:+d} after its end)."
            )
        )


def checked_address(b: ir.IRBuilder, address: ir.Value, num_bytes: ir.Value | int) -> ir.Value:
    """Return the address; in checked kernels, the spare page's address if the access is outside the named ranges."""
    if not CHECKED:
        return address
    size = num_bytes if isinstance(num_bytes, ir.Value) else ir.Constant(_I64, num_bytes)
    return b.call(_check_function(b.module), [address, size])


def _check_function(module: ir.Module) -> ir.Function:
    """Return the module's function check(address, bytes) -> address, which the first call adds to the module:

    if bytes <= 0 or any(begin <= address and address + bytes <= end for begin, end in the named ranges):
        return address
    record a fault; return the address of the spare page
    """
    name = "transom_check"
    found: Any = module.globals.get(name)
    if found is not None:
        return found
    check = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64]), name)
    check.linkage = "linkonce_odr"
    check.attributes.add("noinline")
    address, size = check.args
    start, head, body, following, good, bad = (
        check.append_basic_block(label) for label in ("start", "head", "body", "following", "good", "bad")
    )
    b = ir.IRBuilder(start)
    table = b.ptrtoint(ir.GlobalVariable(module, _I64, _TABLE_SYMBOL), _I64)

    def word(index: ir.Value | int) -> ir.Value:
        index = ir.Constant(_I64, index) if isinstance(index, int) else index
        byte = b.add(table, b.mul(index, ir.Constant(_I64, 8)))
        return b.inttoptr(byte, ir.PointerType(_I64))

    end = b.add(address, size)
    count = b.load(word(_NUM_RANGES))
    b.cbranch(b.icmp_signed("<=", size, ir.Constant(_I64, 0)), good, head)
    b.position_at_end(head)
    index = b.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), start)
    b.cbranch(b.icmp_signed("<", index, count), body, bad)
    b.position_at_end(body)
    first = b.add(ir.Constant(_I64, _RANGES), b.mul(index, ir.Constant(_I64, 2)))
    inside = b.and_(
        b.icmp_signed(">=", address, b.load(word(first))),
        b.icmp_signed("<=", end, b.load(word(b.add(first, ir.Constant(_I64, 1))))),
    )
    b.cbranch(inside, good, following)
    b.position_at_end(following)
    index.add_incoming(b.add(index, ir.Constant(_I64, 1)), following)
    b.branch(head)
    b.position_at_end(bad)
    b.atomic_rmw("add", word(_FAULTS), ir.Constant(_I64, 1), "acq_rel")
    b.store(address, word(_FAULT_ADDRESS))
    b.store(size, word(_FAULT_BYTES))
    b.ret(b.load(word(_SPARE)))
    b.position_at_end(good)
    b.ret(address)
    return check
