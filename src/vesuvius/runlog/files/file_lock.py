"""One process at a time: the lock on an open file (flock), which the kernel frees when its holder dies."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

from vesuvius.errors import StorageError

# What file systems without flock say: NFS without its lock service, Lustre without the mount option, some of FUSE.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def take_lock(descriptor: int, path: Path) -> bool:
    """Take the lock, without waiting; returns whether it was free.  It is held until the file is closed.

    Args:
        descriptor: of the open file.
        path: of the file.

    Raises:
        StorageError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StorageError(
            f"a folder that only one process may write needs a file system with flock; got {error} for {path}; "
            "put it on another disk (VESUVIUS_RUNS for runs), or mount this one with locks (Lustre: -o flock; NFS: "
            "start its lock service)"
        ) from error
    return True
