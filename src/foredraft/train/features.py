"""What the target's layers make of a text, kept in files and read back a window at a time, for heads to learn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.proposers.files import write_arrays

SHARD = 64
"""Dialogues of a file."""
_PIECE = 512  # tokens whose logits are looked at together
_MIXED = 256  # windows that are sorted by length together
_SHORTEST = 8  # tokens of a window


class Window(NamedTuple):
    """A piece of a dialogue, of n tokens.

    `features` are `[n, layers, H]` of the layers that the head reads, `states` `[n, H]` what the target's final norm
    gives out, both in bfloat16; `log_total` `[n]` is the logarithm of the sum of the exponentials of all logits after
    each token, in float32. `answer` is where the answer begins, which may be before or after the window.
    """

    ids: Tensor
    features: Tensor
    states: Tensor
    log_total: Tensor
    answer: int

    def to(self, device: torch.device) -> Window:
        """The same on a device."""
        ids, features, states, log_total = (part.to(device) for part in self[:4])
        return Window(ids, features, states, log_total, self.answer)


class Place(NamedTuple):
    """Where a window lies: its file, its first token there, and its length."""

    file: int
    start: int
    length: int
    answer: int


def features_of(target: Backend, ids: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """States `[n, layers + 1, H]` of the tokens of a text, the final norm's last, and log totals `[n]`."""
    cache = target.new_cache()
    features = cache.keep_features([*layers, target.layers])
    target.prefill(cache, ids)
    states = features.take()[1]
    assert states is not None
    totals = [target.head(part).logsumexp(-1) for part in torch.split(states[:, -1], _PIECE)]
    return states.to("cpu", torch.bfloat16), torch.cat(totals).to("cpu")


def write_features(
    target: Backend,
    dialogues: Sequence[tuple[Sequence[int], int]],
    layers: Sequence[int],
    folder: Path,
    key: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Compute features of dialogues, given as ids and the place where the answer begins; a file for every 64 of them.

    A file that is there already is kept if it was made of the same dialogues with the same `key` (which names the
    target and its weights), so that a run that was killed goes on where it was.

    Raises:
        ModelError: The folder cannot be written.
    """
    files = []
    for first in range(0, len(dialogues), SHARD):
        part = dialogues[first : first + SHARD]
        file = folder / f"features-{first // SHARD:05d}.safetensors"
        about = {"key": key, "layers": json.dumps(list(layers)), "dialogues": digest_of(part)}
        if not _is_of(file, about):
            _write(file, about, part, [features_of(target, ids, layers) for ids, _ in part])
        files.append(file)
        progress(first + len(part), len(dialogues))
    return files


def digest_of(dialogues: Sequence[tuple[Sequence[int], int]]) -> str:
    """What tells these dialogues from others."""
    return hashlib.sha256(json.dumps([[list(ids), answer] for ids, answer in dialogues]).encode()).hexdigest()


def _is_of(file: Path, about: dict[str, str]) -> bool:
    try:
        with safe_open(file, framework="pt") as stored:
            return bool(stored.metadata() == about)
    except (OSError, SafetensorError):  # there is none, or it is torn
        return False


def _write(
    file: Path, about: dict[str, str], part: Sequence[tuple[Sequence[int], int]], found: Sequence[tuple[Tensor, Tensor]]
) -> None:
    arrays = {
        "ids": torch.tensor([token for ids, _ in part for token in ids], dtype=torch.int32),
        "lengths": torch.tensor([len(ids) for ids, _ in part]),
        "answers": torch.tensor([answer for _, answer in part]),
        "states": torch.cat([states for states, _ in found]),
        "totals": torch.cat([totals for _, totals in found]),
    }
    write_arrays(file, arrays, about, what="features")


class FeatureFiles:
    """The files of `write_features`, cut into windows.

    Args:
        files: In order.
        window: Most tokens of a piece. Shorter ones than 8 tokens are left out.
    """

    def __init__(self, files: Sequence[Path], window: int) -> None:
        self.places: list[Place] = []
        self._open: list[Any] = [safe_open(file, framework="pt") for file in files]  # mapped until they are forgotten
        for index, stored in enumerate(self._open):
            start = 0
            lengths, answers = stored.get_tensor("lengths").tolist(), stored.get_tensor("answers").tolist()
            for length, answer in zip(lengths, answers, strict=True):
                self.places += [
                    Place(index, start + first, min(window, length - first), answer - first)
                    for first in range(0, length, window)
                    if length - first >= _SHORTEST
                ]
                start += length

    @property
    def tokens(self) -> int:
        """Of all windows."""
        return sum(place.length for place in self.places)

    def read(self, place: Place) -> Window:
        """The window that lies there; only that is read from the file."""
        stored, rows = self._open[place.file], slice(place.start, place.start + place.length)
        states = stored.get_slice("states")[rows]
        ids, totals = stored.get_slice("ids")[rows].long(), stored.get_slice("totals")[rows]
        return Window(ids, states[:, :-1], states[:, -1], totals, place.answer)

    def counts(self, vocabulary: int) -> Tensor:
        """`[vocabulary]` how often each token occurs."""
        found = torch.zeros(vocabulary, dtype=torch.int64)
        for stored in self._open:
            found += torch.bincount(stored.get_tensor("ids").long(), minlength=vocabulary)
        return found


def batches(places: Sequence[Place], tokens: int, seed: int, passes: int) -> Iterator[list[Place]]:
    """Windows of about one length, so many tokens at a time, each once a pass, in an order that `seed` gives."""
    for index in range(passes):
        yield from batches_of_pass(places, tokens, seed, index)


def batches_of_pass(places: Sequence[Place], tokens: int, seed: int, index: int) -> list[list[Place]]:
    """Those of one pass."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    order = torch.randperm(len(places), generator=generator).tolist()
    found: list[list[Place]] = []
    for first in range(0, len(order), _MIXED):
        group: list[Place] = []
        for place in sorted((places[i] for i in order[first : first + _MIXED]), key=lambda place: place.length):
            if group and (len(group) + 1) * place.length > tokens:
                found.append(group)
                group = []
            group.append(place)
        found.append(group)
    mixed = torch.randperm(len(found), generator=generator).tolist()
    return [found[i] for i in mixed]


def padded(windows: Sequence[Window]) -> Window:
    """Windows side by side, `[B, n, …]`; `log_total` of what only pads is infinite, so that its probabilities are 0."""

    def stack(parts: Sequence[Tensor], value: float = 0.0) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=value)

    return Window(
        stack([w.ids for w in windows]),
        stack([w.features for w in windows]),
        stack([w.states for w in windows]),
        stack([w.log_total for w in windows], float("inf")),
        0,
    )
