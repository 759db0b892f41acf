"""Whether a file is on this machine, or comes over a network or from a program."""

from __future__ import annotations

import ctypes

_REMOTE = frozenset(
    (
        0x6969,  # NFS
        0x517B,  # SMB
        0xFF534D42,  # CIFS
        0xFE534D42,  # SMB 2
        0x65735546,  # FUSE: sshfs, s3fs, gcsfuse and many more
        0x00C36400,  # Ceph
        0x0BD00BD0,  # Lustre
        0x01021997,  # 9P
        0x5346414F,  # AFS
        0x6B414653,  # the kernel's AFS
        0x47504653,  # GPFS
        0x19830326,  # BeeGFS
        0x73757245,  # Coda
        0x786F4256,  # a virtual machine's shared folder
    )
)
"""Kinds of file systems as statfs(2) numbers them."""


def is_remote(fd: int) -> bool:
    """Say whether a page of this file may fail to come: by an error of a server, or not at all."""
    answer = (ctypes.c_long * 32)()
    if ctypes.CDLL(None).fstatfs(fd, answer) != 0:
        return True
    return int(answer[0]) & 0xFFFFFFFF in _REMOTE
