from __future__ import annotations
import contextlib, threading


class _L:
    def __init__(self):
        self.l = threading.RLock()

    @contextlib.contextmanager
    def read(self, left_s=None):
        with self.l:
            yield


load_lock = _L()
