"""Search of the sublayers that a model's drafts can do without, on the user's own text (`foredraft tune-skip`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from torch import Tensor

from foredraft.backends.base import Backend, Query
from foredraft.errors import InvalidInputError
from foredraft.proposers.layer_skip import SkipSet
from foredraft.types import Draft

_LONGEST_TEXT = 512  # tokens that are compared at once
_PATIENCE = 8  # sets in a row that may be worse while the set grows

Sublayer = tuple[str, int]
"""`attention` or `mlp`, and the layer."""


def search_skip_set(
    target: Backend,
    texts: Sequence[Sequence[int]],
    *,
    steps: int = 200,
    seconds: float | None = None,
    seed: int = 0,
    notify: Callable[[str], None] = lambda _: None,
) -> SkipSet:
    """The sublayers to leave out: those with the best expected speedup, by agreement with the whole model on texts.

    Every sublayer is left out alone first; then one after the other stays out, beginning with what loses the least
    agreement for the weights it saves; then single changes in random order are kept where they help. Aim and method are
    those of SWIFT (Xia et al. 2024, arXiv 2410.06916), which searches at random. The speedup of the result may be below
    1: then leaving out sublayers does not pay with this model.

    Args:
        target: The backend of the target.
        texts: Token ids of what the model will be used on, best with its answers; some 500 or more in all.
        steps: Most sets to try, at least 1; each costs about one forward over the texts. Twice the layers are needed to
            try each sublayer once.
        seconds: Most time to take; `None` sets no limit.
        seed: Of the order in which sublayers are tried.
        notify: Told whenever a better set was found.

    Returns:
        The best set that leaves something out.

    Raises:
        UnsupportedError: Models of this type, or on this backend, cannot be taken apart.
        InvalidInputError: There is no text of two tokens, or no step is allowed.
    """
    model = target.sublayers()
    pieces = [list(text[i : i + _LONGEST_TEXT]) for text in texts for i in range(0, len(text), _LONGEST_TEXT)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces or steps < 1:
        raise InvalidInputError(
            f"The search was given {len(pieces)} texts of two or more tokens and {steps} steps: it needs one at least "
            "of both."
        )
    search = _Search(target, pieces, steps, monotonic() + seconds if seconds is not None else float("inf"), notify)
    sublayers: list[Sublayer] = [(kind, i) for kind in ("attention", "mlp") for i in range(model.layers)]
    dice = random.Random(seed)
    dice.shuffle(sublayers)
    with target.running():
        _grow(search, _rank(search, sublayers))
        _refine(search, sublayers, dice)
    return search.best


def _rank(search: _Search, sublayers: Sequence[Sublayer]) -> list[Sublayer]:
    """The sublayers, those first that lose the least agreement for what they save; untried ones are left out."""
    losses: list[tuple[float, Sublayer]] = []
    for sublayer in sublayers:
        alone = search.measure(_flip(search.none, sublayer))
        if alone is not None and alone.agreement is not None:
            losses.append(((1 - alone.agreement) / (1 - alone.share), sublayer))
    return [sublayer for _, sublayer in sorted(losses)]


def _grow(search: _Search, ranked: Sequence[Sublayer]) -> None:
    """Leave out one more and one more, until it has long been getting worse."""
    skips, top, worse = search.none, 0.0, 0
    for sublayer in ranked:
        found = search.measure(_flip(skips, sublayer))
        if found is None:
            continue
        skips = found
        top, worse = (found.speedup, 0) if found.speedup > top else (top, worse + 1)
        if worse == _PATIENCE:
            break


def _refine(search: _Search, sublayers: Sequence[Sublayer], dice: random.Random) -> None:
    """Change single sublayers of the best set, until no change helps."""
    before = None
    while before != search.best and not search.spent:
        before = search.best
        for sublayer in dice.sample(sublayers, len(sublayers)):
            search.measure(_flip(search.best, sublayer))


class _Search:
    """Measures sets against the whole model's next tokens within a budget, and remembers the best."""

    def __init__(
        self, target: Backend, texts: Sequence[Sequence[int]], steps: int, until: float, notify: Callable[[str], None]
    ) -> None:
        self._target = target
        self._texts = texts
        self._expected = [_next_tokens(target, text) for text in texts]
        self._model = target.sublayers()
        self._steps, self._until, self._notify = steps, until, notify
        self._tried: dict[SkipSet, SkipSet] = {}
        self.none = SkipSet(self._model.fingerprint)
        self.best = self.none

    @property
    def spent(self) -> bool:
        """Whether the budget is. The first set is always measured."""
        return bool(self._tried) and (len(self._tried) >= self._steps or monotonic() > self._until)

    def measure(self, skips: SkipSet) -> SkipSet | None:
        """The set with its agreement and share; `None` if the budget is spent, or the set is empty or too large."""
        skips = replace(self.none, attention=skips.attention, mlp=skips.mlp)
        if skips in self._tried:
            return self._tried[skips]
        if self.spent or skips == self.none or len(skips.attention) == self._model.layers:
            return None
        shallow = self._target.without(skips.attention, skips.mlp)
        right = [_next_tokens(shallow, text) == own for text, own in zip(self._texts, self._expected, strict=True)]
        total = sum(len(each) for each in right)
        found = replace(
            skips,
            agreement=sum(int(each.sum()) for each in right) / total,
            share=self._model.share_without(skips.attention, skips.mlp),
            tokens=total,
        )
        self._tried[skips] = found
        if self.best == self.none or found.speedup > self.best.speedup:
            self.best = found
            self._notify(
                f"Without {len(found.attention)} attention and {len(found.mlp)} MLP sublayers: agreement "
                f"{found.agreement:.3f}, {found.share:.1%} of the weights, expected speedup {found.speedup:.3f}"
            )
        return found


def _next_tokens(backend: Backend, text: Sequence[int]) -> Tensor:
    """`[n]` the likeliest token after each of the text's, from one forward over the text as a draft."""
    query = Query(backend.new_cache(), text[0], Draft.chain(text[1:]))
    return backend.forward([query])[0].argmax(-1)


def _flip(skips: SkipSet, sublayer: Sublayer) -> SkipSet:
    kind, layer = sublayer
    attention, mlp = set(skips.attention), set(skips.mlp)
    (attention if kind == "attention" else mlp).symmetric_difference_update({layer})
    return replace(skips, attention=tuple(sorted(attention)), mlp=tuple(sorted(mlp)))
