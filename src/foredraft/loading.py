"""From names to what runs: a backend for each model and a drafter that is ready, checked before anything loads."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

from foredraft.backends.base import Backend
from foredraft.backends.checkpoint import load_checkpoint, pick_device
from foredraft.backends.native.cache import KV_TYPES
from foredraft.backends.native.families import NotNativeError
from foredraft.backends.native.tensors import WEIGHTS
from foredraft.backends.transformers import TransformersBackend
from foredraft.checks import is_integer, require
from foredraft.costs import Costs
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.models import ModelFiles, Notify, file_key, resolve
from foredraft.proposers import DRAFTERS
from foredraft.proposers.auto import DEFAULT_PARTS, Auto
from foredraft.proposers.base import Drafter
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.ssd import FORKING, Saguaro, Ssd
from foredraft.proposers.trained import Eagle3, Trained
from foredraft.proposers.translation import translation_between

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    DrafterLike: TypeAlias = str | Drafter | PreTrainedModel | None

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "transformers")
_MOST_THREADS = 1024
AHEAD: dict[str, type[Ssd]] = {"ssd": Ssd, "saguaro": Saguaro}
"""Drafters that ask another one ahead of time."""
DRAFTER_KINDS: dict[str, type[Drafter]] = {**DRAFTERS, "hybrid": Hybrid, **AHEAD}
"""All that can be named, by name."""
_NEEDED = {
    "draft": "draft:REF with a model",
    "early_exit": "early_exit:L with a number of layers",
    "eagle": "eagle:REF with the folder or hub id of a head",
    "medusa": "medusa:REF with the folder or hub id of heads",
    "ssd": f"ssd:DRAFTER with {FORKING}",
    "saguaro": "saguaro:DRAFTER with draft:REF, layer_skip, self_quant, eagle3, eagle or mtp",
}
KNOWN_DRAFTERS = ", ".join(("none", *(drafter.usage for drafter in DRAFTER_KINDS.values())))


def cache_folder() -> Path:
    """Where fetched and converted models lie: `FOREDRAFT_CACHE`, else the platform's cache folder."""
    override = os.environ.get("FOREDRAFT_CACHE")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("foredraft", appauthor=False)


def parse_drafter(drafter: DrafterLike) -> tuple[str, Any] | None:
    """Split `name` or `name:argument`; anything that is loaded already is passed on.

    Returns:
        `(name, argument)`, or `None` for plain decoding.

    Raises:
        InvalidInputError: Unknown name (with the nearest known one), or an argument too many or too few.
    """
    if drafter is None or drafter == "none":
        return None
    if isinstance(drafter, Drafter):
        return drafter.name, drafter
    if isinstance(drafter, torch.nn.Module):
        return DraftModel.name, drafter
    if not isinstance(drafter, str):
        kind = type(drafter).__name__
        raise InvalidInputError(f"A drafter is a name, a transformers model or a Drafter, but this is {kind}.")
    name, _, argument = drafter.partition(":")
    if name == "hybrid" or (name == "auto" and argument):
        return name, _parse_parts(name, argument)
    if name in AHEAD and argument:
        return name, _parse_inner(name, argument)
    known = ("none", *DRAFTERS, *AHEAD)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise InvalidInputError(f"There is no drafter '{name}'.{hint} Known: {KNOWN_DRAFTERS}.")
    if name == "none":
        _refuse_argument(name, argument)
        return None
    usage = DRAFTER_KINDS[name].usage
    if usage == name:
        _refuse_argument(name, argument)
    elif "[" not in usage and not argument:
        raise InvalidInputError(f"Drafter '{name}' needs more: {_NEEDED[name]}.")
    DRAFTER_KINDS[name].check_argument(argument)
    return name, argument


def _refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise InvalidInputError(f"Drafter '{name}' takes no argument, but was given '{argument}'.")


def check_memory(folder: str | Path, choice: tuple[str, Any] | None) -> Path:
    """The folder, if what `parse_drafter` chose can keep there what it learns.

    Raises:
        UnsupportedError: It learns nothing; the message names those that do.
        InvalidInputError: The path is that of a file.
    """
    name, argument = choice or ("none", None)
    if name in AHEAD and isinstance(argument, tuple):
        name, argument = argument
    if not (argument.learns if isinstance(argument, Drafter) else name != "none" and DRAFTER_KINDS[name].learns):
        *others, last = (drafter.usage for drafter in DRAFTER_KINDS.values() if drafter.learns)
        raise UnsupportedError(
            f"Drafter '{name}' learns nothing that a memory could keep. Use {', '.join(others)} or {last}."
        )
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"The memory {folder} is a file, but must be a folder, or a name for a new one.")
    return folder


def _parse_parts(joiner: str, argument: str) -> list[tuple[str, Any]]:
    parts = [parse_drafter(part) for part in argument.split("+")]
    found = [part for part in parts if part is not None and part[0] not in ("hybrid", "auto", *AHEAD)]
    names = [name for name, _ in found]
    least, wanted = (2, "two or more") if joiner == "hybrid" else (1, "one or more")
    if len(found) < max(least, len(parts)) or len(set(names)) < len(names):
        raise InvalidInputError(
            f"Drafter '{joiner}:{argument}' must join {wanted} different drafters, such as {joiner}:ngram+recycling."
        )
    return found


def _parse_inner(name: str, argument: str) -> tuple[str, Any]:
    """The drafter that `ssd` asks ahead of time."""
    found = parse_drafter(argument)
    if found is None or found[0] in ("auto", *AHEAD):
        raise InvalidInputError(f"Drafter '{name}:{argument}' cannot be: use {name}: with {FORKING}.")
    return found


@dataclass(frozen=True)
class EngineChoice:
    """Which backend runs the models, and how; `load` documents the values.

    Raises:
        InvalidInputError: An unknown value, or values that no backend takes together.
    """

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    threads: int | None = None
    kv: str = "f32"
    draft_threads: int | None = None
    """Of the native backend, for what drafts; `None` takes as many as `threads`."""
    draft_device: str | None = None
    """Of draft models; `None` is the target's."""

    def __post_init__(self) -> None:
        require("backend", self.backend, self.backend in BACKENDS, f"one of {', '.join(BACKENDS)}")
        require("weights", self.weights, self.weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
        for name in ("threads", "draft_threads"):
            count = getattr(self, name)
            good = count is None or (is_integer(count) and 1 <= count <= _MOST_THREADS)
            require(name, count, good, f"an integer in [1, {_MOST_THREADS}]")
        if self.draft_device is not None:
            pick_device(self.draft_device)  # one that is not there is told before anything loads
        require("kv", self.kv, self.kv in KV_TYPES, f"one of {', '.join(KV_TYPES)}")
        reason, asked = self.not_native, (self.weights, self.threads, self.kv) != ("auto", None, "f32")
        if reason is not None and (asked or self.backend == "native"):
            wanted = "weights, threads and kv belong to" if self.backend != "native" else "you asked for"
            raise InvalidInputError(f"The native backend, which {wanted}, cannot be taken: {reason}.")

    @property
    def for_drafts(self) -> EngineChoice:
        """What draft models run on. On another device than a CPU it is transformers, by its own defaults."""
        if self.draft_device is not None and pick_device(self.draft_device).type != "cpu":
            return EngineChoice(device=self.draft_device)
        if self.draft_device is not None and self.not_native is not None:
            return EngineChoice(device=self.draft_device, threads=self.draft_threads)
        device, threads = self.draft_device or self.device, self.draft_threads or self.threads
        return replace(self, device=device, threads=threads, draft_threads=None, draft_device=None)

    @property
    def not_native(self) -> str | None:
        """Why the native backend is out of the question whatever the model; `None` if it is not."""
        if self.backend == "transformers":
            return "backend is 'transformers'"
        if pick_device(self.device).type != "cpu":
            return "it runs on a CPU, and the device is not one (device='cpu' takes the CPU)"
        return "dtype belongs to the transformers backend (use weights instead)" if self.dtype != "auto" else None


class Loader:
    """Loads targets and draft models alike; `load` documents the arguments."""

    def __init__(
        self,
        cache: str | Path | None = None,
        engine: EngineChoice | None = None,
        notify: Notify = lambda _: None,
    ) -> None:
        self._cache = Path(cache) if cache is not None else cache_folder()
        self._engine = engine or EngineChoice()
        self._notify = notify
        self._costs: dict[Backend, Costs] = {}

    def model(
        self, reference: str, engine: EngineChoice | None = None
    ) -> tuple[Backend, PreTrainedTokenizerBase, ModelFiles]:
        """The model that a reference names, its tokenizer, and where it lies; `engine` is what runs it, if another."""
        engine = engine or self._engine
        files = resolve(reference, self._cache, self._notify)
        self._notify(f"Loading {reference}")
        reason = engine.not_native
        if reason is None:
            try:
                return *self._native(files, engine), files
            except NotNativeError as error:
                if engine.backend == "native" or engine.weights != "auto":
                    raise
                reason = error.reason
        logger.info("Backend transformers for %s: %s", reference, reason)
        converted = self._cache / "converted" / file_key(files.path) if files.is_gguf else None
        model, tokenizer = load_checkpoint(files.path, device=engine.device, dtype=engine.dtype, converted=converted)
        return TransformersBackend(model, vocabulary_size(tokenizer)), tokenizer, files

    def backend_of(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Backend:
        """A transformers model that is loaded already, on the native backend only where that was asked for."""
        if self._engine.backend != "native":
            return TransformersBackend(model, vocabulary_size(tokenizer))
        from foredraft.backends.native.backend import NativeBackend  # numba takes a while, and not all need it
        from foredraft.backends.native.reading import weights_of_model

        weights = weights_of_model(model, self._engine.weights)
        size, engine = vocabulary_size(tokenizer), self._engine
        return NativeBackend(weights, size, threads=engine.threads, kv_format=engine.kv)

    def _native(self, files: ModelFiles, engine: EngineChoice) -> tuple[Backend, PreTrainedTokenizerBase]:
        from foredraft.backends.native.backend import NativeBackend
        from foredraft.backends.native.reading import read_native

        read = read_native(files.path, weights=engine.weights, cache=self._cache, notify=self._notify)
        size, kernels = vocabulary_size(read.tokenizer), self._cache / "kernels"
        backend = NativeBackend(read.weights, size, threads=engine.threads, kv_format=engine.kv, kernels=kernels)
        self._notify(f"Preparing {files.reference} (what must be compiled for this machine is kept)")
        backend.prefill(backend.new_cache(), [0])
        team = f"{backend.team.threads} thread{'s' if backend.team.threads > 1 else ''}"
        megabytes = read.weights.bytes_per_token / 1e6
        logger.info("Backend native for %s: %s, %.0f MB of weights a forward", files.reference, team, megabytes)
        return backend, read.tokenizer

    def costs(self, target: Backend, files: ModelFiles | None) -> Costs:
        """What forwards of the target cost here: kept from before, else measured now, which takes about a second.

        All drafters for a target share it: what one learns of the machine is true for the others.
        """
        from foredraft.calibration import costs_for

        if target not in self._costs:
            self._costs[target] = costs_for(target, files, self._cache, notify=self._notify)
        return self._costs[target]

    def drafter(
        self,
        choice: tuple[str, Any] | None,
        target: Backend,
        tokenizer: PreTrainedTokenizerBase | None,
        files: ModelFiles | None = None,
    ) -> Drafter | None:
        """What `parse_drafter` chose, ready to draft for `target`; a draft model is loaded and compared with it.

        `files` are the target's, if it has any: by them it is known whether its costs were measured before, and which
        heads come with it.
        """
        if choice is None:
            return None
        name, argument = choice
        if isinstance(argument, Drafter):
            return argument
        kind = DRAFTER_KINDS[name]
        if name in AHEAD:
            inner = self.drafter(argument, target, tokenizer, files)
            assert inner is not None
            return AHEAD[name](inner, threads=self._engine.draft_threads)
        if name in ("hybrid", "auto"):
            choices = argument or _usual_parts(target, files)
            parts = [part for each in choices if (part := self.drafter(each, target, tokenizer, files)) is not None]
            if name == "hybrid":
                return Hybrid(parts)
            return Auto(parts, self.costs(target, files), usual=not argument)
        if issubclass(kind, Trained):
            return kind.for_target(target, argument, files, self._notify)
        if name != DraftModel.name:
            return kind.for_target(target, argument)
        translation = None
        if isinstance(argument, str):
            draft, draft_tokenizer, _ = self.model(argument, self._engine.for_drafts)
            rows = draft.embedding_rows
            sizes = target.vocab_size, draft.vocab_size
            assert tokenizer is not None
            translation = translation_between(tokenizer, draft_tokenizer, sizes, rows)
        else:
            draft = TransformersBackend(argument)
            if draft.vocab_size < target.vocab_size:
                raise UnsupportedError(
                    f"The draft model has {draft.vocab_size} token ids and the target {target.vocab_size}: "
                    "use a draft model with the target's vocabulary."
                )
        return DraftModel(draft, target.vocab_size, stop_tokens(target, tokenizer), translation, target.device)


def _usual_parts(target: Backend, files: ModelFiles | None) -> list[tuple[str, str]]:
    """The parts of `auto` that nobody has to name: those that need nothing, and a head that comes with the model."""
    head = target.capabilities.features and Eagle3.comes_with(files)
    return [(part.name, "") for part in (*DEFAULT_PARTS, *((Eagle3,) if head else ()))]


def stop_tokens(backend: Backend, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's own and those of the model's generation settings."""
    own: Any = tokenizer.eos_token_id if tokenizer is not None else None
    return backend.stop_tokens | ({int(own)} if own is not None else set())


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that has a token."""
    return max(tokenizer.get_vocab().values()) + 1
