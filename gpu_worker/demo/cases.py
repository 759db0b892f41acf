"""The weights of the demo's table: how a process gets each by itself, or shared, and its work.

By itself a process reads and converts with the very function that is `build=` when shared, so both
do the same work and differ only in how often it is done.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

import gpu_worker
from gpu_worker.demo.lines import Setting
from gpu_worker.demo.sentences import CORPUS, QUERY

Ranking = tuple[tuple[float, str], ...]

_BATCH = 4


class Case(Protocol):
    """One row of the table."""

    def read(self) -> torch.nn.Module:
        """Return the module, all of it this process's own work."""

    def share(self, worker: gpu_worker.Worker) -> gpu_worker.ModelHandle:
        """Return a handle on the module over weights that all processes share."""

    def work(self, module: torch.nn.Module) -> tuple[torch.Tensor, Ranking]:
        """Run `module` on the case's fixed input; return what came out."""


def cases(setting: Setting) -> dict[str, Case]:
    """Return every case by its key."""
    tokenizer = AutoTokenizer.from_pretrained(setting.minilm)
    return {
        "minilm": Embedder("minilm", setting.minilm, tokenizer, None),
        "minilm:bf16": Embedder("minilm:bf16", setting.minilm, tokenizer, torch.bfloat16),
        "generated:bf16": Generated("generated:bf16", setting),
    }


def digest(output: torch.Tensor) -> str:
    """Return a fingerprint of the exact bytes of `output`."""
    data = output.detach().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


class Embedder:
    """The real model, as stored or converted: embeds sentences and searches them."""

    def __init__(
        self, key: str, folder: str, tokenizer: AutoTokenizer, dtype: torch.dtype | None
    ) -> None:
        self._key = key
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = dtype

    def read(self) -> torch.nn.Module:
        options = {} if self._dtype is None else {"dtype": self._dtype}
        module: torch.nn.Module = AutoModel.from_pretrained(self._folder, **options)
        return module.eval()

    def share(self, worker: gpu_worker.Worker) -> gpu_worker.ModelHandle:
        if self._dtype is None:
            source = f"{self._folder}/model.safetensors"
            return worker.load(self._key, skeleton=self._skeleton, source=source)
        return worker.load(
            self._key, skeleton=self._skeleton, build=self.read, version=str(self._dtype)
        )

    def work(self, module: torch.nn.Module) -> tuple[torch.Tensor, Ranking]:
        batch = self._tokenizer([QUERY, *CORPUS], padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = module(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            embeddings = torch.nn.functional.normalize(pooled, dim=1)
            scores = (embeddings[1:] @ embeddings[0]).tolist()
        return embeddings, tuple(sorted(zip(scores, CORPUS, strict=True), reverse=True))

    def _skeleton(self) -> torch.nn.Module:
        module: torch.nn.Module = AutoModel.from_config(AutoConfig.from_pretrained(self._folder))
        return module


class Generated:
    """The generated float32 checkpoint, used as bfloat16."""

    def __init__(self, key: str, setting: Setting) -> None:
        self._key = key
        self._path = setting.checkpoint
        self._width = setting.width
        self._layers = setting.layers

    def read(self) -> torch.nn.Module:
        from safetensors.torch import load_file

        with torch.device("meta"):
            module = self._skeleton()
        state = {name: t.to(torch.bfloat16) for name, t in load_file(self._path).items()}
        module.load_state_dict(state, assign=True)
        return module.eval()

    def share(self, worker: gpu_worker.Worker) -> gpu_worker.ModelHandle:
        return worker.load(
            self._key, skeleton=self._skeleton, build=self.read, version=str(torch.bfloat16)
        )

    def work(self, module: torch.nn.Module) -> tuple[torch.Tensor, Ranking]:
        step = torch.linspace(-1.0, 1.0, _BATCH * self._width)
        with torch.inference_mode():
            output: torch.Tensor = module(step.view(_BATCH, self._width).to(torch.bfloat16))
        return output, ()

    def _skeleton(self) -> torch.nn.Module:
        return Stack(self._width, self._layers)


class Stack(torch.nn.Module):
    """Square linear layers, one after the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden
