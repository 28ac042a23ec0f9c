"""Checks which users can change a path. Daemons and drivers share this rule for directories and
sockets on this host. Reads only metadata."""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

WRITABLE_BY_OTHERS = 0o022


def why_unsafe(directory: Path, *, forbidden: int = WRITABLE_BY_OTHERS) -> str:
    """Return the reason why another user could replace files in `directory`; empty: only root can.

    directory: absolute, and it exists. forbidden: permission bits that it must not have.

    Raises:
        OSError: part of the path cannot be read.
    """
    facts = directory.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISDIR(facts.st_mode):
        return "is not a directory" + (", but a link" if stat.S_ISLNK(facts.st_mode) else "")
    if facts.st_uid not in trusted_users():
        return f"belongs to user {facts.st_uid}"
    if mode & forbidden:
        return f"has mode {mode:04o}"
    return next(_unsafe_parents(directory), "")


def trusted_users() -> frozenset[int]:
    """Return the users with full control of this process: its user, and root, who owns / (with
    another uid in some user namespaces)."""
    return frozenset((os.geteuid(), 0, Path("/").lstat().st_uid))


def _unsafe_parents(directory: Path) -> Iterator[str]:
    """Yield faults above the directory: a parent or link that another user owns, or a parent in
    which others may rename files that they do not own."""
    trusted = trusted_users()
    for path in dict.fromkeys((*directory.parents, *directory.resolve().parents)):
        facts = path.lstat()
        if facts.st_uid not in trusted:
            yield f"lies below {path}, which belongs to user {facts.st_uid}"
        if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & stat.S_ISVTX:
            continue  # in a sticky directory users rename only their own files
        if facts.st_mode & stat.S_IWOTH:
            yield f"lies below {path}, in which every user may rename files"
        if facts.st_mode & stat.S_IWGRP and not _is_private(facts.st_gid):
            yield f"lies below {path}, in which group {facts.st_gid} may rename files"


def _is_private(group: int) -> bool:
    """Return True if a group is private to this user (user private groups, used with umask 002):
    the primary group, named like the user, without other members."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own_name = user.pw_name
    return (user.pw_gid, entry.gr_name) == (group, own_name) and {*entry.gr_mem} <= {own_name}
