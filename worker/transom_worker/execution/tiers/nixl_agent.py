"""`NixlAgent`: lets other workers' ranks read this rank's memory, and reads theirs, by NIXL (https://github.com/ai-dynamo/nixl).

    agent = open_agent(transfer, memories)             registers the slabs once; None where NIXL is not installed or not wanted
    handle = agent.start(source, kind, spans, tier)    begins to read; on one host the bytes may have come when it returns
    agent.state(handle)                                "PROC" while bytes may still arrive, then once "DONE" or why it failed
    agent.disconnect(metadata)                         only while nothing is read from this agent

A read in flight cannot be ended: with NIXL 1.5.1 over TCP, bytes came after its handle was released, and even after the source's
agent was removed. They cannot come any more once the read is "DONE" or "ERR", or the agent is gone. So a caller that gives a
read up waits for one of these; if the source dies, NIXL says "ERR".

NIXL chooses the transport by UCX, whose environment variables hold; the settings set some of them (`TransferConfig.ucx`).
"""

import logging
import logging.config
import os
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from transom_core.config import TransferConfig
from transom_core.contract.kv_transfer import MemoryRegion, RankMemory
from transom_core.errors import ConfigError
from transom_worker.execution.tiers.slabs import TierMemory

logger = logging.getLogger("transom.worker")

PROGRESS_WAIT_US = 100_000  # an event ends the wait at once

Spans = NDArray[np.uint64]
"""Bytes to read, [n, 3]: the address in the source's memory, the address here, and the number of bytes."""


class NixlAgent:
    """The NIXL agent of one rank, whose tiers are `memories`. `memory` is what other ranks need to read this one's.

    One thread calls it. Any method but `state` may raise any exception.
    """

    def __init__(self, memories: Mapping[int, TierMemory]) -> None:
        _api = load_nixl()
        _let_progress_wait(_api.nixlBind)
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints each agent to the standard output
        self._agent: Any = _api.nixl_agent(uuid4().hex, _api.nixl_agent_config(backends=["UCX"]))
        regions = {tier: _region(memory) for tier, memory in memories.items()}
        self._slabs = [memory.slab for memory in memories.values()]  # they live as long as the agent
        self._registered = [
            self._agent.register_memory(
                [(regions[tier].address, memory.slab.nbytes, regions[tier].device, "")], regions[tier].kind
            )
            for tier, memory in memories.items()
        ]
        self.memory = RankMemory(agent=self._agent.get_agent_metadata(), regions=regions)
        self._names: dict[bytes, str] = {}  # metadata of another agent -> its name, while it is connected

    def start(self, source: RankMemory, kind: tuple[str, int], spans: Spans, tier: int) -> Any:
        """Begin to read from a region of this kind and device into a tier of this rank, and return the read's handle."""
        name = self._names.get(source.agent)
        if name is None:
            name = self._names[source.agent] = self._agent.add_remote_agent(source.agent).decode()
        target = self.memory.regions[tier]
        here = self._descriptors(spans[:, 1], spans[:, 2], target.kind, target.device)
        theirs = self._descriptors(spans[:, 0], spans[:, 2], *kind)
        handle = self._agent.initialize_xfer("READ", here, theirs, name)
        try:
            self._agent.transfer(handle)
        except Exception:
            self._release(handle)
            raise
        return handle

    def state(self, handle: Any) -> str:
        """Return "PROC", or free the handle and return "DONE" or why the read failed."""
        try:
            state = str(self._agent.check_xfer_state(handle))
        except Exception as error:
            state = f"{type(error).__name__}: {error}"
        if state != "PROC":
            self._release(handle)
        return state

    def disconnect(self, metadata: bytes) -> None:
        """Close the connection to an agent, from which nothing is read at the moment; the next `start` connects again."""
        if (name := self._names.pop(metadata, None)) is not None:
            self._agent.remove_remote_agent(name)

    def close(self) -> None:
        """Take the memory back: no other rank can read it any more, and no byte comes any more. Idempotent."""
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered, self._slabs, self._agent = [], [], None

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            logger.exception("A read of another worker's memory could not be released.")

    def _descriptors(self, addresses: Spans, sizes: Spans, kind: str, device: int) -> Any:
        return self._agent.get_xfer_descs(np.stack([addresses, sizes, np.full_like(sizes, device)], axis=1), kind)


def load_nixl() -> Any:
    """Import NIXL's Python interface.

    NIXL configures logging when it is imported, which would close the handlers of the whole process: Ray Serve's would then keep
    every later line in memory, and write none of them.
    """
    configure, raise_exceptions = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        import nixl._api as _api
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raise_exceptions
    return _api


def open_agent(transfer: TransferConfig, memories: Mapping[int, TierMemory]) -> NixlAgent | None:
    """Return the agent of a rank; None if KV transfer is off, or goes through Ray.

    Raises:
        ConfigError: the settings ask for NIXL, and it cannot be used.
    """
    if not transfer.is_on or transfer.wire == "ray":
        return None
    os.environ.update(transfer.ucx)  # UCX reads them when the agent is made
    try:
        return NixlAgent(memories)
    except Exception as error:  # of a library that may be missing, or that this machine may not suit
        if transfer.wire == "nixl":
            raise ConfigError(f"--kv-transfer-wire is nixl, which transom[transfer] installs: {error}") from error
        if not isinstance(error, ModuleNotFoundError):
            logger.warning("NIXL cannot be used, so KV blocks move through Ray: %s", error)
        return None


def _let_progress_wait(bindings: Any) -> None:
    """Let the progress threads of agents made from now on wait for events. NIXL 1.5.1 has no setting of it in Python and gives
    them no time to wait, so that each idle agent takes a core (3.5 s of CPU time in 5 s)."""
    given = bindings.nixlAgentConfig
    if not getattr(given, "waits", False):

        def set_field(config: Any, name: str, value: Any) -> None:
            given.__setattr__(config, name, PROGRESS_WAIT_US if name == "pthrDelay" else value)

        bindings.nixlAgentConfig = type("WaitingConfig", (given,), {"waits": True, "__setattr__": set_field})


def _region(memory: TierMemory) -> MemoryRegion:
    device = memory.slab.device
    return MemoryRegion(
        address=memory.slab.data_ptr(),
        kind="VRAM" if device.type == "cuda" else "DRAM",
        device=device.index or 0,
        strides=tuple(group.stride_bytes for group in memory.layout.groups),
    )
