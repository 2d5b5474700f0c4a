"""`DiskWatch`: keeps the cache's index of the disk tier (`disk.index`) up to date with the folder, within a second or so.

Files come and go without the engine's knowledge: the ranks write them while steps run, every process that shares the space removes
old ones, and other workers of the same model write their own. So a thread of the watch lists the folder every `PERIOD_S` at a
bounded cost (`disk.listing`), and the engine's thread applies the changes (`take_news`). While the index is out of date, a read may
fail, or a prefix that could have been read may be computed.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.kvcache.tiers.disk.index import DiskIndex
from transom_worker.kvcache.tiers.disk.listing import BlockKey, ListedChanges

logger = logging.getLogger("transom.worker")

PERIOD_S = 1.0


class DiskWatch:
    """Lists the files of `folder` for `index`. The engine's thread calls it, unless a method names another thread."""

    def __init__(self, folder: BlockFolder, index: DiskIndex) -> None:
        """List everything at once, and start a thread that lists what changes."""
        self._index = index
        self._listing = folder.new_listing()
        self._lock = threading.Lock()  # guards the listing
        self._found: SimpleQueue[ListedChanges] = SimpleQueue()
        self._forgotten: SimpleQueue[Sequence[BlockKey]] = SimpleQueue()
        self._ended = threading.Event()
        self._on_news: Callable[[], object] = lambda: None  # called on the watch's thread
        self.always_has_news = False  # if set, each listing counts as news, even if it found no change
        self._take_over(self._listing.look_at_all())
        self._thread = threading.Thread(target=self._watch, name="transom-disk-watch", daemon=True)
        self._thread.start()

    @property
    def has_news(self) -> bool:
        """Whether `take_news` has changes to apply."""
        return not self._found.empty()

    def on_news(self, call: Callable[[], object]) -> None:
        """Call this on the watch's thread when there is news."""
        self._on_news = call

    def take_news(self) -> None:
        """Apply the changes that listings have found to the index."""
        while not self._found.empty():
            self._take_over(self._found.get())

    def look(self) -> None:
        """List all changed subfolders now, instead of waiting for the thread; `take_news` applies what is found. For any thread."""
        self._report(all_changes=True)

    def forget(self, blocks: Sequence[BlockKey]) -> None:
        """Remove these blocks from the index, because reading them failed; a later listing adds those that have files again."""
        self.take_news()  # first, since changes that were found before the failure may still add these blocks
        self._take_over(ListedChanges([], list(blocks)))
        self._forgotten.put(blocks)

    def close(self) -> None:
        """End the thread; it may still list for a moment."""
        self._ended.set()

    def _watch(self) -> None:
        """Make a round of the listing every `PERIOD_S`, until `close`. Runs on the watch's thread."""
        while not self._ended.wait(PERIOD_S):
            try:
                self._report()
            except Exception:  # the thread must go on: an index that is out of date makes no request fail
                logger.exception("The disk cache's folder could not be listed.")

    def _report(self, *, all_changes: bool = False) -> None:
        """Make a round of the listing (or list everything), and queue its changes for `take_news`."""
        with self._lock:
            while not self._forgotten.empty():
                self._listing.forget(self._forgotten.get())
            changes = self._listing.look_at_all() if all_changes else self._listing.look()
            if changes.added or changes.removed or self.always_has_news:
                self._found.put(changes)
        if self.has_news:
            self._on_news()

    def _take_over(self, changes: ListedChanges) -> None:
        """Apply changes to the index. Runs on the engine's thread."""
        for group, digests in self._by_group(changes.removed):
            self._index.remove(group, digests)
        for group, digests in self._by_group(changes.added):
            self._index.add(group, digests)

    def _by_group(self, blocks: Iterable[BlockKey]) -> Iterable[tuple[int, list[bytes]]]:
        """Yield (group, digests) for each of the model's groups; files of other groups are ignored."""
        by_group: list[list[bytes]] = [[] for _ in self._index.groups]
        for group, digest in blocks:
            if group < len(by_group):
                by_group[group].append(digest)
        return enumerate(by_group)
