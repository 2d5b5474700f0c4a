"""`Handovers`: lets the worker that will decode a prompt fetch its prefix while a prefill worker still computes it.

    router          places a prompt at a prefill worker, and names the worker that will probably continue (`Request.decoder`)
    prefill worker  asks the decoder which blocks it can use; after each step that published blocks, lends them and offers them to
                    the decoder (`PrefixPeers.fetch_early`); but while the decoder fetches only the whole prompt, so that a slow
                    decoder gets fewer and larger parts
    decoder         fetches the blocks of full-attention layers that it lacks (`PrefixFetches.fetch_early`)

The last offer, mostly between the step that made the first token and the next one, has also the blocks of sliding windows, which
the others leave out because windows move on. Meanwhile the router places the request at the decoder, and it waits there for that
fetch. If an offer fails or is late, the decoder asks for everything then.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from transom_core.config import TransferConfig
from transom_core.contract import PrefixSource, Request
from transom_core.contract.kv_transfer import PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.engine.transfer.served_exports import PrefixExports
from transom_worker.engine.transfer.store import TransferStore

logger = logging.getLogger("transom.worker")

# The pause between two looks for new blocks; each that finds none doubles it. A look waits for a step, and takes the engine's time.
LOOK_S, LONGEST_LOOK_S = 5e-3, 0.1


class Handovers:
    """The handovers of one prefill worker, `own_id` on `node`. `is_here` says whether a request is at this worker, by its id. All
    methods run on the worker's event loop."""

    def __init__(
        self,
        own_id: str,
        node: str,
        peers: PrefixPeers,
        store: TransferStore,
        exports: PrefixExports,
        config: TransferConfig,
        *,
        is_here: Callable[[str], bool],
    ) -> None:
        self._own_id, self._place = own_id, PrefixSource.place_of(node, is_on_device=True)
        self._peers, self._store, self._exports = peers, store, exports
        self._timeout_s, self._is_here = config.timeout_s, is_here
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to hand over those requests that name a decoder. The engine may not have them yet."""
        for request in requests:
            # Under a KV policy no layer keeps every token. The other choices of a prompt (`n` > 1) wait for its first one. Requests
            # that end with their first token do not go on elsewhere.
            goes_on = request.decoder is not None and request.params.max_tokens != 1
            if goes_on and request.kv_policy is None and request.choice_index == 0:
                task = asyncio.create_task(self._run(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, request: Request) -> None:
        prompt, pause_s = self._store.handed_over(request), LOOK_S
        num_told = num_held = 0  # hash blocks that the decoder knows of, and those that it has
        assert request.decoder is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                query = await self._peers.own_query(request.decoder, prompt) if prompt.chain else None
            if query is None:
                return
            async with asyncio.TaskGroup() as calls:
                call: asyncio.Task[int] | None = None
                is_here = True
                while num_told < len(query.chain) and is_here:
                    is_here = self._is_here(request.request_id)  # if not, this look is the last one
                    if call is not None and call.done():
                        num_held, call = call.result(), None
                    # While the decoder fetches, and for a request that is gone, only the whole prompt is worth an offer.
                    more_than = num_told if is_here and call is None else len(query.chain) - 1
                    offer = await self._exports.open_early(
                        request.request_id, query, more_than=more_than, num_held=num_held
                    )
                    if offer is not None:
                        num_told, pause_s = offer.num_hash_blocks, LOOK_S
                        call = calls.create_task(self._offer(request, query, offer))
                    elif is_here:
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        except Exception as error:
            logger.info("Worker %s cannot fetch a prompt while it is computed: %r", request.decoder, error)

    async def _offer(self, request: Request, query: PrefixQuery, offer: PrefixOffer) -> int:
        """Offer blocks to the decoder, and return up to which hash block it has them then; 0 if it has not."""
        assert request.decoder is not None
        source = PrefixSource(worker=self._own_id, num_tokens=offer.start, place=self._place)
        has_come = False
        try:
            async with asyncio.timeout(
                2 * self._timeout_s
            ):  # the decoder's limit begins when other fetches of the prompt end
                has_come = await self._peers.fetch_early(request.decoder, source, query, offer, request.sharer)
        finally:
            if not has_come:
                self._exports.close(offer.export_id)
        return offer.num_hash_blocks if has_come else 0
