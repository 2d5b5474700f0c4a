"""`DigestTable`: gives each of the last digests a place, in compact arrays, without objects for the garbage collector.

Only the first 8 bytes of a digest are kept: two of so few digests practically never agree in them, and if they did, only a count
would be wrong. The places are those of the lines of an 8-way set-associative cache. The digest chooses the set:

    set 0  | place 0 | place 1 | ... | place 7 |
    set 1  | place 8 | ...

In a full set a new digest replaces the oldest one. So digests are forgotten nearly in the order in which they came.
"""

PLACES = 8  # of a set
KEY_BYTES = 8  # of a digest
SET_BYTES = PLACES * KEY_BYTES
FREE = bytes(KEY_BYTES)  # the key of a place without a digest


class DigestTable:
    """Up to `capacity` digests, 8 bytes each. The arrays are allocated with the first digest."""

    def __init__(self, capacity: int) -> None:
        self._num_sets = max(1, capacity // PLACES)  # a table without sets could not remember anything
        self.num_places = self._num_sets * PLACES
        self._keys = bytearray()
        self._oldest = bytearray()  # by set: the place whose digest is the oldest, once the set has been full
        self._num_digests = 0

    def __len__(self) -> int:
        return self._num_digests

    def __contains__(self, digest: bytes) -> bool:
        return self.find(digest) is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return len(self._keys) + len(self._oldest)

    def find(self, digest: bytes) -> int | None:
        """Return the place of a digest; None if it has none."""
        begin = self._set_of(digest)
        found = self._keys.find(digest[:KEY_BYTES], begin, begin + SET_BYTES)
        return None if found < 0 or found % KEY_BYTES else found // KEY_BYTES  # other matches span two keys

    def take(self, digest: bytes) -> int:
        """Return the digest's place. A new digest takes a free one of its set, or else that of the set's oldest digest."""
        if not self._keys:
            self._keys, self._oldest = bytearray(self.num_places * KEY_BYTES), bytearray(self._num_sets)
        keys, key, begin = self._keys, digest[:KEY_BYTES], self._set_of(digest)
        at = keys.find(key, begin, begin + SET_BYTES)
        if at < 0 or at % KEY_BYTES:
            at = keys.find(FREE, begin, begin + SET_BYTES)
            if at >= 0:
                at = -(-at // KEY_BYTES) * KEY_BYTES  # the match may begin with zeros of the key before the free place
                self._num_digests += 1
            else:
                which = begin // SET_BYTES
                at = begin + self._oldest[which] * KEY_BYTES
                self._oldest[which] = (self._oldest[which] + 1) % PLACES
            keys[at : at + KEY_BYTES] = key
        return at // KEY_BYTES

    def give_up(self, place: int) -> None:
        """Forget the digest of a place."""
        self._keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] = FREE
        self._num_digests -= 1

    def _set_of(self, digest: bytes) -> int:
        """Return the first byte of a digest's set; the digest's last bytes choose it, and its first ones are the key."""
        return int.from_bytes(digest[-4:], "little") % self._num_sets * SET_BYTES
