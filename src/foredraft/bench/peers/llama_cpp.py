"""llama.cpp by way of llama-cpp-python: plain, and with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.bench.peers.base import GgufPeer, PeerError, PeerRequest, Watch
from foredraft.bench.records import Turn

_RANDOM_SEED = 2**32 - 1  # to llama.cpp this one means: take any


class LlamaCppPeer(GgufPeer):
    """A GGUF file under `llama_cpp.Llama`, with the library's defaults but for the context and the threads.

    Drafter: `prompt-lookup` (`LlamaPromptLookupDecoding`, 10 tokens if not told). The library would keep the cache of
    a prompt that comes again; it is told to forget, since no other engine here has it so easy.
    """

    name = "llama.cpp"
    drafters = ("none", "prompt-lookup")
    package = ("llama_cpp", "foredraft[llama]")

    def answer(self, request: PeerRequest) -> Turn:
        """See `Peer`. A forward is a call of `Llama.eval`."""
        kind, _ = self.kind_of(request)
        refuse_beyond(request, self.options.context)
        llama = self._llama(kind)
        if kind == "prompt-lookup":
            llama.draft_model.num_pred_tokens = request.draft_tokens or type(llama.draft_model)().num_pred_tokens
        llama.set_seed(request.seed % _RANDOM_SEED)
        llama.reset()
        stop = set(self.options.stop_tokens) or {llama.token_eos()}
        watch = Watch()
        evaluate = llama.eval

        def counted(tokens: Sequence[int]) -> None:
            watch.forward(tokens[1:] if watch.ids else ())
            evaluate(tokens)

        llama.eval = counted
        try:
            for token in llama.generate(
                list(request.ids), temp=request.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
            ):
                watch.emit([int(token)])
                if len(watch.ids) == request.max_tokens or token in stop:
                    break
        finally:
            del llama.eval  # the method is there again
        return watch.turn(request, llama.detokenize(watch.ids).decode(errors="replace"), draft_forwards=0)

    def conditions(self) -> dict[str, str]:
        """See `Peer`."""
        import llama_cpp

        threads = str(self.options.most_threads())
        return {"version": llama_cpp.__version__, "weights": self._file.name, "threads": threads}

    def _llama(self, kind: str) -> Any:
        if kind not in self._loaded:
            from llama_cpp import Llama
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            threads, lookup = self.options.most_threads(), kind == "prompt-lookup"
            self._loaded[kind] = Llama(
                str(self._file),
                n_ctx=self.options.context,
                n_threads=threads,
                n_threads_batch=threads,
                draft_model=LlamaPromptLookupDecoding() if lookup else None,
                logits_all=lookup,  # it takes them all to verify, but makes room for them only when told so
                verbose=False,
            )
        return self._loaded[kind]


def refuse_beyond(request: PeerRequest, context: int) -> None:
    """Raise `PeerError` for a prompt and an answer for which there is no room."""
    needed = len(request.ids) + request.max_tokens
    if needed > context:
        raise PeerError(
            f"the prompt has {len(request.ids)} tokens and the answer may have {request.max_tokens}, but room was made "
            f"for {context}: give a context of {needed} or more"
        )
