"""`Handovers`: lets the worker that will decode a prompt fetch its prefix while a prefill worker still computes it.

    router          places a prompt at a prefill worker, and names the worker that will probably continue (`Request.decoder`)
    prefill worker  after each step that published blocks, tells the decoder what it has (`PrefixPeers.fetch_early`); one call of a
                    request at a time, so that a slow decoder gets fewer and larger parts
    decoder         fetches the blocks of full-attention layers that it lacks (`PrefixFetches.fetch_early`)

After the first token, the router places the request again, and the decoder fetches what is left: the blocks of the last chunk, and
those of sliding windows, which early fetches leave out because windows move on. If these fail, it fetches everything then.
"""

import asyncio
import logging
from collections.abc import Sequence

from transom_core.config import TransferConfig
from transom_core.contract import PrefixSource, Request
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.engine.transfer.store import OnEngine, TransferStore

logger = logging.getLogger("transom.worker")

# The pause between two looks for new blocks; each that finds none doubles it. A look waits for a step, and takes the engine's time.
LOOK_S, LONGEST_LOOK_S = 5e-3, 0.1


class Handovers:
    """The handovers of one prefill worker, `own_id` on `node`. All methods run on its event loop; `on_engine` runs a function on
    the engine's thread."""

    def __init__(
        self,
        own_id: str,
        node: str,
        peers: PrefixPeers,
        store: TransferStore,
        on_engine: OnEngine,
        config: TransferConfig,
    ) -> None:
        self._own_id, self._place = own_id, PrefixSource.place_of(node, is_on_device=True)
        self._peers, self._store, self._on_engine, self._timeout_s = peers, store, on_engine, config.timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to hand over those of the admitted requests that name a decoder."""
        for request in requests:
            # Under a KV policy no layer keeps every token. The other choices of a prompt (`n` > 1) wait for its first one.
            if request.decoder is not None and request.kv_policy is None and request.choice_index == 0:
                task = asyncio.create_task(self._run(request, request.decoder))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, request: Request, decoder: str) -> None:
        num_told, pause_s = 0, LOOK_S  # blocks that the decoder knows of
        try:
            # `query.chain` has the hashes of the blocks published so far; None: the request has ended here.
            while (query := await self._on_engine(lambda: self._store.published(request.request_id))) is not None:
                if len(query.chain) > num_told:
                    num_told, pause_s = len(query.chain), LOOK_S
                    source = PrefixSource(worker=self._own_id, num_tokens=query.num_tokens, place=self._place)
                    async with asyncio.timeout(self._timeout_s):  # the decoder has the same limit
                        await self._peers.fetch_early(decoder, source, query, request.sharer)
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        except Exception as error:
            logger.info("Worker %s cannot fetch a prompt while it is computed: %r", decoder, error)
