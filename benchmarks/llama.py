"""llama.cpp through llama-cpp-python's lowest layer, an optional peer: `pip install llama-cpp-python`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

_BATCH = 512  # tokens, llama.cpp's own default


class Llama:
    """One GGUF file with an f32 KV cache, as here; `f16` takes llama.cpp's default."""

    def __init__(self, file: Path, threads: int, kv: str = "f32", context: int = 4096) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, _BATCH, _BATCH
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = {"f32": 0, "f16": 1}[kv]
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def decode(self, tokens: Sequence[int], position: int, *, scored: bool = True) -> float:
        """Seconds of one forward over tokens from a position on, with logits of all or only of the last."""
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, 0
            batch.logits[i] = scored or i == len(tokens) - 1
        started = perf_counter()
        failed = self._lib.llama_decode(self._context, batch)
        seconds = perf_counter() - started
        self._lib.llama_batch_free(batch)
        assert not failed
        return seconds

    def forget(self, position: int) -> None:
        """Drop what is cached from a position on."""
        self._lib.llama_memory_seq_rm(self._memory, 0, position, -1)

    def generate(self, prompt: Sequence[int], tokens: int, stop: frozenset[int]) -> list[int]:
        """Greedy decoding."""
        self.forget(0)
        for start in range(0, len(prompt), _BATCH):
            self.decode(prompt[start : start + _BATCH], start, scored=False)
        answer: list[int] = []
        while True:
            row = self._lib.llama_get_logits_ith(self._context, -1)
            answer.append(int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()))
            if len(answer) == tokens or answer[-1] in stop:
                return answer
            self.decode(answer[-1:], len(prompt) + len(answer) - 1)
