"""The target without some of its attention and MLP sublayers drafts a chain; `skip_search` finds which ones."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft.backends.base import Backend
from foredraft.backends.sublayers import Sublayers
from foredraft.errors import InvalidInputError, ModelError
from foredraft.pages import whole_file
from foredraft.proposers.draft_model import DraftModel

_KIND, _VERSION = "skip set", 1
_LONGEST_DRAFT = 16


@dataclass(frozen=True)
class SkipSet:
    """Which sublayers of a model are left out of its drafts.

    Args:
        model: Fingerprint of the model that it was made for (`Sublayers.fingerprint`).
        attention: Layers without their attention, ascending.
        mlp: Layers without their MLP, ascending.
        agreement: Share of next tokens on which draft and target agreed, in [0, 1]; `None` if not measured.
        share: Bytes of weights that are read for a drafted token, as a share of the target's, in (0, 1].
        tokens: How many next tokens were compared.
    """

    model: str
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    agreement: float | None = None
    share: float = 1.0
    tokens: int = 0

    @property
    def speedup(self) -> float:
        """`expected_speedup` at its best draft length: what the search looks for. 1 if nothing was measured."""
        return _best_draft(self.agreement, self.share)[0] if self.agreement is not None else 1.0

    @property
    def draft_tokens(self) -> int:
        """The draft length at which the speedup is expected."""
        return _best_draft(self.agreement, self.share)[1] if self.agreement is not None else LayerSkip.draft_tokens

    def write(self, file: Path) -> None:
        """Write the file that `layer_skip:FILE` loads, whole or not at all.

        Raises:
            ModelError: It cannot be written there.
        """
        record = {"foredraft": _KIND, "version": _VERSION, **asdict(self)}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as write:
                write(json.dumps(record, indent=1) + "\n")
        except (OSError, InvalidInputError) as error:
            raise ModelError(f"Cannot write the skip set {file} ({error}): choose another place.") from error

    @classmethod
    def read(cls, file: Path, model: Sublayers) -> SkipSet:
        """The skip set of a file, if it was made for this model.

        Raises:
            ModelError: The file cannot be read, is no skip set or of another version, or was made for another model.
        """
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot read the skip set {file} ({error}). {_REMEDY}") from error
        if not isinstance(record, dict) or (record.pop("foredraft", None), record.pop("version", None)) != _HEADER:
            raise ModelError(f"{file} is not a {_KIND} of version {_VERSION}. {_REMEDY}")
        own = model.fingerprint
        if record.get("model") != own:
            raise ModelError(f"{file} was made for the model {record.get('model')}, and this one is {own}. {_REMEDY}")
        try:
            found = cls(**{**record, "attention": tuple(record["attention"]), "mlp": tuple(record["mlp"])})
            _check(model, found)
        except (TypeError, KeyError, InvalidInputError) as error:
            raise ModelError(f"The skip set {file} is damaged ({error}). {_REMEDY}") from error
        return found


_HEADER = (_KIND, _VERSION)
_REMEDY = "Make one for this model with 'foredraft tune-skip'."


class LayerSkip(DraftModel):
    """Drafts with the target less some sublayers (Draft & Verify, Zhang et al. 2023, arXiv 2309.08168).

    The weights are the target's own, the KV cache is not.

    Args:
        target: The backend of the target.
        skips: What to leave out; `None` takes `default_skip_set`.
        stop_tokens: Drafting ends after one of these.

    Raises:
        UnsupportedError: Models of this type, or on this backend, cannot be taken apart.
        InvalidInputError: The set names layers that are not there, or leaves no attention.
    """

    name = "layer_skip"
    usage = "layer_skip[:FILE]"
    draft_tokens = 2
    when_nothing_is_accepted = "the model cannot do without these sublayers: search others with 'foredraft tune-skip'"

    def __init__(self, target: Backend, skips: SkipSet | None = None, stop_tokens: Collection[int] = ()) -> None:
        model = target.sublayers()
        self.skips = skips or default_skip_set(model)
        _check(model, self.skips)
        shallow = target.without(self.skips.attention, self.skips.mlp)
        super().__init__(shallow, target.vocab_size, stop_tokens)
        self.draft_tokens = self.skips.draft_tokens

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> LayerSkip:
        """With the skip set of a file, or the default one."""
        skips = SkipSet.read(Path(argument), target.sublayers()) if argument else None
        return cls(target, skips, target.stop_tokens)


def default_skip_set(model: Sublayers) -> SkipSet:
    """Attention of every other layer in the middle half: what large models miss least; nothing is measured."""
    count = model.layers
    first = max(1, count // 4)
    attention = tuple(range(first, max(count - first, min(count, 2)), 2))
    return SkipSet(model.fingerprint, attention, (), share=model.share_without(attention, ()))


def expected_speedup(agreement: float, share: float, draft_tokens: int) -> float:
    """Tokens a round over its cost in target forwards: E[L] / (K c + 1), E[L] = 1 + a + ... + a^K.

    A draft step is taken to cost its `share` of the target's weights, verification of the whole chain one plain step.
    """
    return sum(agreement**k for k in range(draft_tokens + 1)) / (draft_tokens * share + 1)


def _best_draft(agreement: float, share: float) -> tuple[float, int]:
    return max((expected_speedup(agreement, share, k), k) for k in range(1, _LONGEST_DRAFT + 1))


def _check(model: Sublayers, skips: SkipSet) -> None:
    """Raise `InvalidInputError` for a set that does not fit the model, or figures that cannot be."""
    count = model.layers
    for name, figure in (("agreement", skips.agreement), ("share", skips.share)):
        if figure is not None and not (isinstance(figure, (int, float)) and 0 <= figure <= 1):
            raise InvalidInputError(f"Skip set: {name} is {figure!r}, but must be a number in [0, 1]")
    for name in ("attention", "mlp"):
        strange = [i for i in getattr(skips, name) if type(i) is not int or not 0 <= i < count]
        if strange:
            raise InvalidInputError(f"Skip set: {name} names layer {strange[0]}, but there are layers 0 to {count - 1}")
    if not skips.attention and not skips.mlp:
        raise InvalidInputError("Skip set: nothing is left out, so drafts would cost what the target does")
    if len(set(skips.attention)) == count:
        raise InvalidInputError("Skip set: no attention is left, and at least one layer must keep it")
