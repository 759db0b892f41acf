"""Where the coordinator's socket is, for those who are not told, and where one logs."""

from __future__ import annotations

import os
import warnings

from shm_store.errors import ArgumentRefused

SOCKET_VARIABLE = "WEIGHT_CACHE_SOCKET"


def default_socket_path() -> str:
    """Return the path of this user's socket: the same for every process of the user.

    It lies in the user's runtime directory, as `platformdirs` finds it; the directory need not
    exist.

    Raises:
        ArgumentRefused: the directory it would be in is somebody else's.
    """
    import platformdirs

    with warnings.catch_warnings():
        # Newer ones warn where XDG_RUNTIME_DIR is not set, as in most containers. Both ends fall
        # back to the same directory, so there is nothing to warn of.
        warnings.simplefilter("ignore")
        try:
            directory = platformdirs.user_runtime_dir("weight-cache")
        except PermissionError as error:
            raise ArgumentRefused(
                f"there is no safe place for this user's socket: {error}",
                remedy=f"choose one with --socket or {SOCKET_VARIABLE}",
            ) from error
    return os.path.join(directory, "coordinator.sock")


def socket_path(chosen: str | os.PathLike[str] | None = None) -> str:
    """Return `chosen`, else what WEIGHT_CACHE_SOCKET says, else the default.

    An empty variable counts as unset: there is no shorter way to unset one for a single command.

    Raises:
        ArgumentRefused: `chosen` is empty or has a NUL in it, or there is no safe default.
    """
    if chosen is None:
        return os.environ.get(SOCKET_VARIABLE) or default_socket_path()
    path = os.fspath(chosen)
    if not path or "\0" in path:
        # The kernel would bind a name of its own choice, one outside the file system, or the part
        # before the NUL.
        raise ArgumentRefused(
            f"{path!r} is no path of a socket",
            remedy=f"leave it out, and {SOCKET_VARIABLE} or the default is used",
        )
    return path


def log_path(socket: str) -> str:
    """Return where a coordinator logs that runs in the background: one file for each socket."""
    import platformdirs

    name = os.path.abspath(socket).strip(os.sep).replace(os.sep, "%")
    return os.path.join(platformdirs.user_log_dir("weight-cache"), f"{name}.log")
