"""One worker of the demo: `python -m gpu_worker.demo.worker`.

The first line it reads says who it is, each further one asks for something, and each of those gets
one answer. It ends with its standard input, so it never outlives the demo.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import tempfile
import time
from typing import BinaryIO, assert_never

import accelerate  # noqa: F401 - imported before the first model, as transformers is
import torch
from transformers import AutoModel, BertConfig
from transformers.utils import logging as transformers_logging

from gpu_worker.demo.cases import Case, cases, digest
from gpu_worker.demo.lines import (
    Answered,
    Ask,
    Close,
    Failed,
    Finished,
    Leave,
    Open,
    Opened,
    Ready,
    Reply,
    Request,
    Settle,
    Touch,
    encode,
    request_decoder,
    setting_decoder,
)
from gpu_worker.demo.ways import Plain, Shared, Way

_PAGE_BYTES = 4096


class Performer:
    """Does what the demo asks for."""

    def __init__(self, shared: Shared, plain: Plain, known: dict[str, Case]) -> None:
        self._shared = shared
        self._plain = plain
        self._known = known
        self._current: tuple[Way, Case] | None = None

    def perform(self, request: Request) -> Reply:
        """Do it, and return the answer."""
        match request:
            case Open(key, name):
                way = self._shared if name == "shared" else self._plain
                return self._open(way, self._known[key])
            case Ask():
                return self._answer()
            case Touch():
                with self._opened()[0].use() as module:
                    touch(module)
            case Settle():
                settle()
            case Close():
                self._opened()[0].close()
            case Leave():
                self._shared.leave()
            case _:
                assert_never(request)
        return Finished()

    def _open(self, way: Way, case: Case) -> Opened:
        self._current = way, case
        started_s = time.perf_counter()
        generation = way.open(case)
        return Opened(time.perf_counter() - started_s, generation)

    def _opened(self) -> tuple[Way, Case]:
        assert self._current is not None, "no model is open"
        return self._current

    def _answer(self) -> Answered:
        way, case = self._opened()
        started_s = time.perf_counter()
        with way.use() as module:
            output, ranking = case.work(module)
        took_s = time.perf_counter() - started_s
        return Answered(took_s, digest(output), ranking)


def main() -> None:
    """Get ready, then answer requests until there are no more."""
    requests, replies = _take_pipes()
    setting = setting_decoder.decode(requests.readline())
    torch.set_num_threads(1)
    _quieten()
    performer = Performer(Shared(setting.socket, setting.name), Plain(), cases(setting))
    _try_out()
    # Hundreds of thousands of objects that the imports made: each full collection would visit them.
    gc.collect()
    gc.freeze()
    _say(replies, Ready(time.monotonic() - setting.started_s))
    for line in requests:
        try:
            reply = performer.perform(request_decoder.decode(line))
        except Exception as error:  # whatever it is, the demo says it and ends
            reply = Failed(f"{type(error).__name__}: {error}")
        _say(replies, reply)


def touch(module: torch.nn.Module) -> None:
    """Read one byte of every page of the module's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.detach().flatten().view(torch.uint8)
        data[::_PAGE_BYTES].sum()
        data[-1:].sum()


def settle() -> None:
    """Give memory that nothing uses back to the kernel."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _try_out() -> None:
    """Save, read and run a tiny model, so that whatever is imported late is imported now."""
    config = BertConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    with tempfile.TemporaryDirectory() as tiny, torch.inference_mode():
        AutoModel.from_config(config).save_pretrained(tiny)
        for dtype in (torch.float32, torch.bfloat16):
            AutoModel.from_pretrained(tiny, dtype=dtype).eval()(torch.ones(1, 4, dtype=torch.long))


def _quieten() -> None:
    """Keep libraries from talking in the middle of the story."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The file holds a buffer (`position_ids`) that the model makes itself. transformers passes over
    # that in silence, and gpu_worker warns.
    logging.getLogger("gpu_worker").setLevel(logging.ERROR)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the two pipes, and leave no way for a library to print into them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _say(replies: BinaryIO, reply: Reply) -> None:
    replies.write(encode(reply))
    replies.flush()


if __name__ == "__main__":
    main()
