"""OpenVINO GenAI's `LLMPipeline` over a GGUF file, on the CPU: plain, and with its prompt lookup."""

from __future__ import annotations

from typing import Any

from foredraft.bench.peers.base import GgufPeer, PeerOptions, PeerRequest, Watch
from foredraft.bench.records import Turn

_LOOKUP_TOKENS = 5  # of the library's samples, which have no default but these
_LOOKUP_NGRAM = 3


class OpenVinoPeer(GgufPeer):
    """A GGUF file under `LLMPipeline`, with the library's defaults but for the threads and the cache of prompts.

    Drafter: `prompt-lookup` (`num_assistant_tokens`, 5 if not told, after at most 3 tokens that match, as in the
    library's samples). Prompts that come again would be read from a cache; it is off, since no other engine here has it
    so easy. The library does not tell how much it drafted. A forward is an entry of its `raw_metrics.m_batch_sizes`.
    """

    name = "openvino"
    drafters = ("none", "prompt-lookup")
    package = ("openvino_genai", "foredraft[openvino]")

    def __init__(self, options: PeerOptions) -> None:
        super().__init__(options)
        import openvino_genai

        self._library: Any = openvino_genai

    def answer(self, request: PeerRequest) -> Turn:
        """See `Peer`. Tokens are there when the library hands them to a streamer."""
        import numpy as np
        from openvino import Tensor

        kind, _ = self.kind_of(request)
        pipeline, settings = self._pipeline(kind), self._settings(request, kind)
        prompt = np.array([request.ids], dtype=np.int64)
        inputs = self._library.TokenizedInputs(Tensor(prompt), Tensor(np.ones_like(prompt)))

        def write(streamer: Any, tokens: Any) -> Any:
            watch.emit(tokens if isinstance(tokens, list) else [tokens])
            return self._library.StreamingStatus.RUNNING

        parts = {"write": write, "end": lambda streamer: None}
        streamer = type("Streamer", (self._library.StreamerBase,), parts)()
        watch = Watch()
        result = pipeline.generate(inputs, settings, streamer)
        forwards = len(result.perf_metrics.raw_metrics.m_batch_sizes)
        drafted = 0 if kind == "none" else None
        text = str(pipeline.get_tokenizer().decode(watch.ids))
        accepted = len(watch.ids) - forwards
        return watch.turn(request, text, target_forwards=forwards, draft_forwards=0, drafted=drafted, accepted=accepted)

    def conditions(self) -> dict[str, str]:
        """See `Peer`."""
        return {
            "version": self._library.__version__,
            "weights": self._file.name,
            "threads": str(self.options.most_threads()),
        }

    def _settings(self, request: PeerRequest, kind: str) -> Any:
        settings = self._library.GenerationConfig()
        settings.max_new_tokens = request.max_tokens
        settings.do_sample = request.temperature > 0
        if request.temperature:
            settings.temperature, settings.top_k, settings.top_p = request.temperature, 0, 1.0
            settings.rng_seed = request.seed
        if self.options.stop_tokens:
            settings.stop_token_ids = set(self.options.stop_tokens)
        if kind == "prompt-lookup":
            settings.num_assistant_tokens = request.draft_tokens or _LOOKUP_TOKENS
            settings.max_ngram_size = _LOOKUP_NGRAM
        return settings

    def _pipeline(self, kind: str) -> Any:
        if kind not in self._loaded:
            scheduler = self._library.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            lookup = {"prompt_lookup": True} if kind == "prompt-lookup" else {}
            threads = self.options.most_threads()
            self._loaded[kind] = self._library.LLMPipeline(
                str(self._file), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **lookup
            )
        return self._loaded[kind]
