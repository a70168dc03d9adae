"""SGLang and llama.cpp's server: the command, and what is not carried over. Configuration only, nothing is started.

Options are those of SGLang's `srt/arg_groups/fields/spec.py` (main, 015c872) and of llama.cpp's
`tools/server/README.md`, which its argument table writes (master, 00dc805: `--draft-max` and its like are gone there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foredraft.errors import UnsupportedError
from foredraft.handover.check import Parallel
from foredraft.handover.plan import is_local, options, quoted
from foredraft.handover.translate import one_of
from foredraft.proposers.ngram import NGram

_TREE_WIDTH, _TREE_DEPTH = 4, 5  # SGLang's usual tree
_SUFFIX_MATCH = 4  # tokens of a match in llama.cpp's maps, which look up one length only


@dataclass(frozen=True)
class Other:
    """What another engine is started with."""

    engine: str
    command: tuple[str, ...]
    stands_in: str | None = None
    notes: tuple[str, ...] = ()

    def page(self) -> str:
        """Markdown: the command, and what to know of it."""
        notes = [note for note in (self.stands_in, *self.notes) if note is not None]
        listed = "".join(f"- {note}.\n" for note in notes)
        return f"# {self.engine}\n\n```console\n{quoted(self.command)}\n```\n\n{listed}"


@dataclass(frozen=True)
class _Drafting:
    """Options of one drafter."""

    values: Mapping[str, object]
    stands_in: str | None = None
    notes: tuple[str, ...] = ()


Make = Callable[[str, int], _Drafting]
"""Of a drafter's argument and number of tokens."""


def sglang(model: str, drafter: str, draft_tokens: int, parallel: Parallel, head: str | None = None) -> Other:
    """`sglang.launch_server` for a drafter.

    Args:
        model: Folder or hub id.
        drafter: As `--drafter` takes it.
        draft_tokens: Most tokens of a draft.
        parallel: Over how many devices.
        head: Folder of a head that the drafter does not name.

    Raises:
        UnsupportedError: Nothing there could stand in.
    """
    found = _drafting("SGLang", _SGLANG, drafter, draft_tokens, head)
    sizes = {
        "--tp-size": parallel.tensor if parallel.tensor > 1 else None,
        "--pp-size": parallel.pipeline if parallel.pipeline > 1 else None,
        "--dp-size": parallel.data if parallel.data > 1 else None,
    }
    command = ["python3", "-m", "sglang.launch_server", "--model-path", model, *options({**found.values, **sizes})]
    return Other("SGLang", (*command, "--enable-metrics"), found.stands_in, found.notes)


def llama_cpp(model: str, drafter: str, draft_tokens: int, parallel: Parallel, head: str | None = None) -> Other:
    """`llama-server` for a drafter; arguments and errors as of `sglang`.

    Raises:
        UnsupportedError: Nothing there could stand in, or it spreads a model in other ways.
    """
    if parallel != Parallel():
        raise UnsupportedError(
            "llama.cpp's server spreads a model by --split-mode and --tensor-split over the devices that it finds, "
            "and has no tensor, pipeline or data parallel sizes: leave them out."
        )
    found = _drafting("llama.cpp", _LLAMA_CPP, drafter, draft_tokens, head)
    path = Path(model).expanduser()
    notes = found.notes
    if is_local(model) and path.is_dir():
        notes = (
            *notes,
            "llama.cpp reads GGUF files: convert the folder with its convert_hf_to_gguf.py, and name the file",
        )
    name = "--hf-repo" if not is_local(model) and not model.endswith(".gguf") else "--model"
    command = ["llama-server", name, model, *options(found.values), "--metrics"]
    return Other("llama.cpp", tuple(command), found.stands_in, notes)


def _drafting(engine: str, table: dict[str, Make], drafter: str, draft_tokens: int, head: str | None) -> _Drafting:
    from foredraft.loading import parse_drafter

    if parse_drafter(drafter) is None:
        return _Drafting({})
    alone = one_of(engine, drafter, tuple(table))
    if alone is not None:
        found = _drafting(engine, table, alone.drafter, draft_tokens, head)
        return replace(found, stands_in=found.stands_in or alone.why)
    name, _, argument = drafter.partition(":")
    if name not in table:
        raise UnsupportedError(f"{engine} has nothing like '{drafter}': choose one of {', '.join(table)}.")
    return table[name](argument or head or "", draft_tokens)


# SGLang. Its draft tokens count the root.


def _sglang_head(algorithm: str, needs_model: bool = True) -> Make:
    def make(argument: str, tokens: int) -> _Drafting:
        if needs_model and not argument:
            raise UnsupportedError(
                f"SGLang's {algorithm} needs the folder or hub id of a head: name one behind the drafter."
            )
        wide = tokens > _TREE_DEPTH
        values = {
            "--speculative-algorithm": algorithm,
            "--speculative-draft-model-path": argument or None,
            "--speculative-num-steps": _TREE_DEPTH if wide else tokens,
            "--speculative-eagle-topk": _TREE_WIDTH if wide else 1,
            "--speculative-num-draft-tokens": tokens + 1,
        }
        note = "Drafts of more tokens than that are trees there as here" if wide else "Short drafts are chains"
        return _Drafting(values, notes=(f"{note}: {values['--speculative-num-steps']} steps",))

    return make


def _sglang_draft(argument: str, tokens: int) -> _Drafting:
    values = {
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": argument,
        "--speculative-num-steps": tokens,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": tokens + 1,
    }
    return _Drafting(values, notes=("The draft model needs the target's vocabulary",))


def _sglang_ngram(stands_in: str | None = None, breadth: int = 10) -> Make:
    def make(argument: str, tokens: int) -> _Drafting:
        values = {
            "--speculative-algorithm": "NGRAM",
            "--speculative-num-draft-tokens": tokens + 1,
            "--speculative-ngram-max-bfs-breadth": breadth,
        }
        notes = (
            "Its trie is of all requests' tokens, where prompt lookup here reads the request's own",
            "It runs on CUDA devices and CPUs, without DP attention",
        )
        return _Drafting(values, stands_in, notes)

    return make


_SGLANG: dict[str, Make] = {
    "eagle3": _sglang_head("EAGLE3"),
    "eagle": _sglang_head("EAGLE"),
    "mtp": _sglang_head("NEXTN", needs_model=False),
    "draft": _sglang_draft,
    "suffix": _sglang_ngram(),
    "ngram": _sglang_ngram(breadth=1),
    "recycling": _sglang_ngram("SGLang has no token recycling: its n-gram trie learns from earlier text as well"),
    "lookahead": _sglang_ngram("SGLang has no lookahead decoding: its n-gram trie finds such repetitions"),
    "medusa": _sglang_ngram("SGLang has no Medusa heads: what needs no model stands in, or an EAGLE-3 head would"),
    "early_exit": _sglang_ngram("SGLang does not draft with a part of the target: what needs no model stands in"),
    "layer_skip": _sglang_ngram("SGLang does not draft with a part of the target: what needs no model stands in"),
    "self_quant": _sglang_ngram("SGLang does not draft with a part of the target: what needs no model stands in"),
}


# llama.cpp


def _llama_model(kind: str, note: str) -> Make:
    def make(argument: str, tokens: int) -> _Drafting:
        values = {
            "--spec-type": kind,
            "--spec-draft-model": argument or None,
            "--spec-draft-n-max": tokens,
            "--spec-draft-sampling": "probabilistic",
        }
        return _Drafting(values, notes=(note,))

    return make


def _llama_simple(argument: str, tokens: int) -> _Drafting:
    own = NGram.parse(argument)
    simple = "--spec-ngram-simple"
    values = {"--spec-type": "ngram-simple", f"{simple}-size-n": own.shortest, f"{simple}-size-m": tokens}
    note = f"It looks up matches of {own.shortest} tokens only, foredraft of up to {own.longest}"
    return _Drafting(values, notes=(note,))


def _llama_map(stands_in: str | None) -> Make:
    def make(argument: str, tokens: int) -> _Drafting:
        name = "--spec-ngram-map-k4v"
        values = {"--spec-type": "ngram-map-k4v", f"{name}-size-n": _SUFFIX_MATCH, f"{name}-size-m": tokens}
        note = f"Its map counts up to four continuations of {_SUFFIX_MATCH} tokens, within a request, and drafts chains"
        return _Drafting({**values, f"{name}-min-hits": 1}, stands_in, (note,))

    return make


_GGUF = "The draft model must be a GGUF file of the target's vocabulary"
_LLAMA_CPP: dict[str, Make] = {
    "eagle3": _llama_model(
        "draft-eagle3", "The head must be a GGUF file: convert its folder with convert_hf_to_gguf.py"
    ),
    "mtp": _llama_model(
        "draft-mtp", "The target's GGUF file must have its MTP layers, or a file of their own be named"
    ),
    "draft": _llama_model("draft-simple", _GGUF),
    "suffix": _llama_map("llama.cpp has no suffix trees: its map of n-grams with counts is nearest"),
    "ngram": _llama_simple,
    "recycling": _llama_map("llama.cpp has no token recycling: its map of n-grams with counts is nearest"),
    "lookahead": _llama_map("llama.cpp's server has no lookahead decoding: its map of n-grams is nearest"),
}
