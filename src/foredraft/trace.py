"""What `foredraft trace` shows: every round of one answer, as views that its page draws without further thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from foredraft import pages
from foredraft.generation import Request
from foredraft.tree import children, depths
from foredraft.types import (
    Completion,
    Draft,
    Foresight,
    Origin,
    RoundDetail,
    RoundEvent,
    RoundStats,
    SamplingParams,
    TokenEvent,
)

if TYPE_CHECKING:
    from foredraft.api import Model, Prompt

_SIGNS = {"\n": "⏎", "\t": "⇥", **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", "\ufffd")}


class TokenView(NamedTuple):
    """An emitted token. `text` is what it added to the answer, `label` is how it is shown by itself."""

    id: int
    origin: Origin
    text: str
    label: str
    special: bool
    """Whether it has no text: what ended the answer, say."""


class NodeView(NamedTuple):
    """A box of the tree: the root, a drafted token, or the token that the target added."""

    label: str
    after: str
    """Label of the box it hangs on; empty for the root."""
    state: str
    """`root`, `accepted`, `rejected` (judged, and not kept), `unreached` (never judged), `correction` or `bonus`."""
    column: int
    row: int
    above: int
    """Row of the box it hangs on."""
    p: float | None = None
    """The target's probability of it after the node above."""
    q: float | None = None
    """The draft's own probability of it, if it was drawn."""
    estimate: float | None = None
    """The proposer's estimate that it is accepted if the node above is."""
    path_estimate: float | None = None
    """The proposer's estimate that the whole path down to it is: what it ranks nodes by."""
    who: str = ""
    """Who proposed it, where there are several."""


@dataclass(frozen=True)
class Figures:
    """Counts and milliseconds, of a round or of all up to it."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_accepted_length(self) -> float:
        """Tokens for each target forward."""
        return self.emitted / self.rounds


class RoundView(NamedTuple):
    """One round: its tree from left to right, the tokens it emitted, and what happened in a few sentences."""

    number: int
    summary: str
    nodes: list[NodeView]
    tokens: list[TokenView]
    figures: Figures
    so_far: Figures


class Trace(NamedTuple):
    """A whole answer, round by round. `model` and `prompt` are what the user gave."""

    model: str
    prompt: str
    completion: Completion
    rounds: list[RoundView]


def record(
    model: Model, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool | None = None, name: str = ""
) -> Trace:
    """Generate an answer, as `Model.stream` does, and note what each round looked at; `name` is the model's.

    Raises:
        InvalidInputError: The prompt is empty or too long.
    """
    request = Request(model.encode(prompt, chat=chat), params or SamplingParams(), detail=True)
    labels = Labels(model.tokenizer)
    rounds: list[RoundView] = []
    tokens: list[TokenView] = []
    so_far = Figures()
    for _, event in model.engine.run([request]):
        if isinstance(event, TokenEvent):
            special = labels.special(event.token)
            tokens.append(TokenView(event.token, event.origin, event.text, labels.of(event.token), special))
        elif isinstance(event, RoundEvent):
            detail, figures = event.detail, _figures(event.stats)
            assert detail is not None
            so_far = so_far + figures
            nodes = lay_out(detail, labels)
            summary = _summary(detail, labels) + _foreseen(event.stats.foresight)
            rounds.append(RoundView(len(rounds) + 1, summary, nodes, tokens, figures, so_far))
            tokens = []
        else:
            last = rounds[-1].tokens  # what was held back until the end is the last token's
            last[-1] = last[-1]._replace(text=last[-1].text + event.text)
            return Trace(name, prompt if isinstance(prompt, str) else "", event.completion, rounds)
    raise AssertionError("the engine ended without a completion")


def render(trace: Trace) -> str:
    """The page: one HTML file that needs nothing else. Everything the model or the user wrote is escaped."""
    return pages.render("trace.html", t=trace, stats=trace.completion.stats, percent=percent)


class Labels:
    """Tokens as a reader should see them: white space, control characters and turns of direction have signs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """A token by itself; an unfinished character is shown as its replacement."""
        if token not in self._known:
            raw = self._tokenizer.convert_ids_to_tokens([token])[0] or ""
            text = self.phrase([token])
            text = f" {text}" if raw.startswith("▁") and not text.startswith(" ") else text  # dropped at a beginning
            self._known[token] = text.replace(" ", "·") or f"#{token}"
        return self._known[token]

    def special(self, token: int) -> bool:
        """Whether the token has no text of its own."""
        return not self._tokenizer.decode([token], skip_special_tokens=True)

    def phrase(self, tokens: Sequence[int]) -> str:
        """Several tokens in a row, spaces as they are."""
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        return "".join(_SIGNS.get(c) or (chr(0x2400 + ord(c)) if c < " " else c) for c in text)


def percent(share: float) -> str:
    """A probability in at most five characters."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.0995 else f"{share:.0%}"


def lay_out(detail: RoundDetail, labels: Labels) -> list[NodeView]:
    """The round's boxes by depth from left to right, parents first; what was emitted runs along the first row.

    Box 0 is the root, box i + 1 node i of the draft, and the last one the target's own token, if there is one.
    """
    draft, verdict = detail.draft, detail.verdict
    kept = {node + 1 for node in verdict.path}
    tail = verdict.path[-1] + 1 if verdict.path else 0
    tokens = [detail.root, *draft.tokens]
    columns = depths(draft)
    above = [0, *(parent + 1 for parent in draft.parents)]
    below = [sorted((node + 1 for node in nodes), key=lambda box: box not in kept) for nodes in children(draft)]
    if detail.p_drawn is not None:
        below[tail].insert(0, len(tokens))
        tokens.append(verdict.tokens[-1])
        columns.append(columns[tail] + 1)
        above.append(tail)
        below.append([])
    rows, p = _rows(below, columns), (None, *detail.p, detail.p_drawn)
    boxes = []
    for box in sorted(range(len(tokens)), key=lambda box: (rows[box], columns[box])):
        label, after = labels.of(tokens[box]), labels.of(tokens[above[box]]) if box else ""
        state = "root" if box == 0 else _state(box - 1, detail) if box <= len(draft) else verdict.origins[-1]
        view = NodeView(label, after, state, columns[box], rows[box], rows[above[box]], p[box])
        boxes.append(_with_scores(view, box - 1, draft) if 0 < box <= len(draft) else view)
    return boxes


def _rows(below: Sequence[Sequence[int]], columns: Sequence[int]) -> list[int]:
    """A row for each box: first children beside their parents, the others as high as no line need cross another."""
    rows = [0] * len(columns)
    taken = [-1] * (max(columns) + 1)  # the last row in use in each column

    def place(box: int) -> None:
        line = [box]
        while below[line[-1]]:
            line.append(below[line[-1]][0])
        row = 1 + max(taken[columns[b]] for b in line)
        for b in line:
            rows[b] = taken[columns[b]] = row
        for b in reversed(line):
            for child in below[b][1:]:
                place(child)

    place(0)
    return rows


def _state(node: int, detail: RoundDetail) -> str:
    path, parent = detail.verdict.path, detail.draft.parents[node]
    if node in path:
        return "accepted"
    judged = parent == -1 or parent in path
    ended = detail.p_drawn is None and parent == path[-1]  # what follows the end of the answer never happened
    return "rejected" if judged and not ended else "unreached"


def _with_scores(view: NodeView, node: int, draft: Draft) -> NodeView:
    """The view with what its proposer thought of it."""
    if (q := draft.q[node]) is not None:
        view = view._replace(q=float(q[draft.tokens[node]]))
    if draft.scores:
        above = draft.scores[draft.parents[node]] if draft.parents[node] >= 0 else 1.0
        estimate = draft.scores[node] / above if above > 0 else 0.0
        view = view._replace(estimate=estimate, path_estimate=draft.scores[node])
    return view._replace(who=draft.proposers[node]) if draft.proposers else view


def _figures(r: RoundStats) -> Figures:
    times = (r.draft_seconds, r.verify_seconds, r.accept_seconds)
    return Figures(1, r.drafted, r.accepted, r.emitted, *(1e3 * seconds for seconds in times))


def _foreseen(found: Foresight | None) -> str:
    """What was drafted meanwhile, in words."""
    if found is None or not found.branches:
        return ""
    many = f"{found.branches} ways" if found.branches > 1 else "one way"
    came = {
        "hit": "and this was one of them: the next draft is there already",
        "late": "and this would have been one, but its draft had not begun",
        "miss": "and this was none of them",
    }[found.found]
    return f" Meanwhile the drafter drafted for {many} in which this could end, {came}."


def _summary(detail: RoundDetail, labels: Labels) -> str:
    """The round in words."""
    draft, path, emitted = detail.draft, detail.verdict.path, detail.verdict.tokens
    phrases = (labels.phrase(part).strip(" ") or "·" for part in (emitted[: len(path)], emitted[len(path) :]))
    kept, added = (f"“\u2068{phrase}\u2069”" for phrase in phrases)  # isolated: it may run from right to left
    if not len(draft):
        return f"Nothing was drafted. The target wrote {added} by itself: one token for one forward."
    single = len(draft) == 1
    shape = "" if single else " in a chain" if draft.is_chain else f" in a tree {max(depths(draft))} deep"
    drafted = f"The drafter proposed {'1 token' if single else f'{len(draft)} tokens'}{shape}."
    scored = f"The target scored {'it' if single else 'them all'} in one forward"
    scored += f" and accepted {len(path)}: {kept}." if path else " and accepted none."
    if detail.p_drawn is None:
        end = "There the answer ended."
    elif detail.verdict.rejected:
        end = f"No draft was right {'from there on' if path else 'here'}, so it wrote its correction {added}."
    else:
        end = f"Nothing was drafted beyond, so it added {added} as a bonus."
    return f"{drafted} {scored} {end} {len(emitted)} token{'s' * (len(emitted) > 1)} for one forward."
