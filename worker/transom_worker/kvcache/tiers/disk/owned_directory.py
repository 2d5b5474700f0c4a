"""`OwnedDirectory`: a directory of this process's user that is opened once; files in it are named relative to its descriptor.

A path may lead elsewhere the next time that it is used: a user who may write into a directory above can replace the directory by a
link or another directory. A descriptor always refers to the directory that was opened. So the directories of the disk tier are
opened once, one after the other, and no link is followed:

    DIR                 the operator's: of this user or root, and no other user may put anything in it
    DIR/transom-kv      ours, mode 0700
    DIR/transom-kv/...  ours, mode 0700
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_ONLY = 0o700


class OwnedDirectory:
    """An open directory. Its descriptor is closed only when nothing refers to the object any more.

    If it were closed earlier, a thread could still use its number, which may then belong to another file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)

    def enter(self, name: str) -> OwnedDirectory:
        """Open the directory `name` in this one, and make it if it does not exist; only its owner can read it then.

        Raises:
            PermissionError: it belongs to another user.  OSError: it is not a directory, or cannot be opened.
        """
        self.make(name)
        entered = OwnedDirectory(os.open(name, _FLAGS, dir_fd=self.descriptor))
        if os.fstat(entered.descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{name} belongs to another user")
        os.fchmod(entered.descriptor, _OWNER_ONLY)
        return entered

    def make(self, name: str) -> None:
        """Make a directory in this one, unless the name exists already. Raises OSError."""
        with suppress(FileExistsError):
            os.mkdir(name, _OWNER_ONLY, dir_fd=self.descriptor)

    def reopen(self, name: str = ".") -> int:
        """Open a directory in this one (by default this one itself), and return a new descriptor, which the caller closes. Raises
        OSError."""
        return os.open(name, _FLAGS, dir_fd=self.descriptor)


def open_directory(path: Path) -> OwnedDirectory:
    """Open the operator's directory, and make it if it does not exist.

    Raises:
        PermissionError: other users could replace what this process makes in it.
        OSError: it is not a directory (a link, for example), or cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_OWNER_ONLY, exist_ok=True)
    opened = OwnedDirectory(os.open(path, _FLAGS))
    status = os.fstat(opened.descriptor)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError("it belongs to another user")
    is_shared = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid())
    # In a sticky directory, such as /tmp, no other user can rename or remove what is ours.
    if is_shared and not status.st_mode & stat.S_ISVTX:
        raise PermissionError("other users may write into it; give a directory below it, or take that right from them")
    return opened
