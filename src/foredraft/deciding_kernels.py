"""The compiled part of deciding: who drafts, what of it is worth verifying, and what is learned from what came of it.

The weights push all else out of the caches with every forward, so each Python object that is looked at between two of
them waits for memory, an array that is handed over most of all. Hence a round is two or three calls over arrays that
live across rounds, whose addresses lie in one (`STATE`): `join` makes one tree of what the asked parts drafted, and
says whose model to run for more, in which case it is called again, or how much of the tree is verified (`choose` says
it where other requests share the forward); `advance` learns from what came of it, reads the text that was emitted and
says who is asked next. Before the first round `begin` does so.

Sets of parts are numbers, bit p for part p. All that is compiled is in this one file, because numba renews what it
kept on disk only when the file itself changes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log2
from typing import Any

import numba
import numpy as np
from numba import extending, types
from numpy.typing import NDArray

from foredraft.compiled import entry, inner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Rows = NDArray[Any]
"""Of one of the kinds below."""
Row = Any

# Numbers of the records that a part has: of all rounds, and of those after a run of tokens that it had right.
CONTEXTS = 5
_RIGHT, _TOKENS, _AT = range(3)
_RECORDS = ("records", "f8", (CONTEXTS, 3))
# Sums over recent drafts of a part that runs a model: how many, their steps and seconds, squares and products of these.
_DRAFTS, _STEPS, _SECONDS, _SQUARES, _PRODUCTS = range(5)

ARM = np.dtype(
    [(name, "i8") for name in ("costly", "asked", "watched", "foreseen", "idle")]
    + [(name, "f8") for name in ("usual", "asking", "watching", "worth", "spent", "verified", "accepted")]
    + [("drafts", "f8", (5,)), ("beginning", "f8"), ("step", "f8")]
    + [_RECORDS],
    align=True,
)
"""A part across requests; `arms.py` documents the fields."""
TURN = np.dtype(
    [(name, "i8") for name in ("stops", "run", "idle", "wait", "rounds", "asks", "ran", "steps")]
    + [(name, "f8") for name in ("worth", "chance", "open", "took", "learned")]
    + [(name, "i8") for name in ("context", "offered", "awaited", "reached", "deepest")]
    + [_RECORDS],
    align=True,
)
"""A part within a request; `arms.py` documents the fields."""
NODE = np.dtype(
    [(name, "i4") for name in ("token", "parent", "depth", "context")]
    + [(name, "i8") for name in ("who", "set", "at", "right")]
    + [(name, "f8") for name in ("best", "prior", "score")],
    align=True,
)
"""A node of the joint tree: who drafted it, and with what it counts, where in the text it would stand, whether it came
true, the highest score that a part gave it, what to expect of it before anything was seen, and its calibrated path
probability."""
DRAFTED = np.dtype([("token", "i4"), ("parent", "i4"), ("score", "f8"), ("who", "i8"), ("best", "f8")], align=True)
"""A node as it is proposed."""
BOOK = np.dtype(
    [(name, "i8") for name in ("sequences", "drafting", "decided", "plain", "laden")]
    + [(name, "f8") for name in ("tokens", "seconds", "promised", "kept_promises", "price", "deciding")]
    + [(name, "f8") for name in ("accept_seconds", "node_seconds")],
    align=True,
)
"""What the controller knows of recent rounds; `controller.py` documents the fields."""

STATE = np.dtype(
    [(name, "i8") for name in ("arms", "turns", "book", "workload", "request", "offers", "nodes", "drafted")]
    + [(name, "i8") for name in ("seconds", "text", "path")]
    + [(name, "i8") for name in ("parts", "sets", "room", "rows", "trees", "held", "fresh", "length")],
    align=True,
)
"""Of one sequence, the addresses of arrays: `ARM` `[parts]` and `TURN` `[parts]`, `BOOK` `[1]`, tries of the workload
(0: none) and of the request `[sets, CONTEXTS, BINS, 2]`, `OFFER` `[parts, room]`, `NODE` `[MOST_HELD + parts * room]`
(`held` ones that may still come true, then `fresh` ones), `DRAFTED` `[room]`, seconds of forwards with 0, 1, … nodes
`[rows]`, the tokens that a round emitted, and the path that it accepted. `trees` says whether drafts may branch,
`length` how long the text is."""

BINS = 24  # of a node's raw score, two for each halving
_LEAST = 2.0 ** (-BINS / 2)  # what is below goes to the last bin
_OFFER = np.dtype([("token", "i4"), ("parent", "i4"), ("score", "f8")], align=True)  # `proposers.base.OFFER`
_UNSCORED = 0.6  # `estimates.UNSCORED`: what is imported, numba does not see change
_PRIOR_TRIES = 8.0  # how many tries an estimate is worth before acceptances are seen
_WORKLOAD_KEEPS, _REQUEST_KEEPS = 1.0 - 1.0 / 200.0, 1.0 - 1.0 / 45.0  # of older tries, at each new one
_WRONG, _IS_RIGHT, _UNKNOWN = range(3)
MOST_HELD = 1024  # nodes of which the text does not tell yet whether they came true

_DRAFTS_KEEP = 1.0 - 1.0 / 64.0  # of older drafts' sums, at each new one
_ASKS = 16.0  # over which a part's worth and its times are means
_TRIAL_SHARE, _COSTLY_SHARE = 0.006, 0.01  # of a plain step that re-trying a part may take; one that runs a model
_WATCH_SHARE = 0.001  # of a plain step that a part may learn in that is not asked
_FIRST_VALUES = 4
_TRIALS_ALIKE = 8  # useless trials after which they come half as often
_RAREST = 4.0  # times as seldom as their cost alone would have it
_FADES = 60.0  # rounds after which what a part had right has lost most of its weight
_USUAL_TOKENS = 8.0  # tokens that a wider record is worth: of all contexts, of other requests

_ROUNDS = 50.0  # over which the running rate is a mean, and promises are compared with what was kept of them
_FIRST = 3.0  # plain rounds that it begins with
_PROMISED, _KEPT = 10.0, 8.0  # of these to begin with: the best of many estimates are flattering ones
_LEAST_SHARE = 0.05  # of what follows a forward, for its nodes
_EXPLORES_EVERY, _PLAIN_AMONG = 64, 6  # rounds that draft; one of so many of these is plain


carray: Any = numba.carray  # type: ignore[attr-defined]
intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """The address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


# What lies at the addresses of a `STATE`.


@inner
def _arms(state: Row) -> Any:
    return carray(_pointer(state.arms), state.parts, ARM)


@inner
def _turns(state: Row) -> Any:
    return carray(_pointer(state.turns), state.parts, TURN)


@inner
def _book(state: Row) -> Any:
    return carray(_pointer(state.book), 1, BOOK)[0]


@inner
def _counts(state: Row, address: int) -> Any:
    return carray(_pointer(address), (state.sets, CONTEXTS, BINS, 2), np.float64)


@inner
def _offers(state: Row) -> Any:
    return carray(_pointer(state.offers), (state.parts, state.room), _OFFER)


@inner
def _nodes(state: Row) -> Any:
    return carray(_pointer(state.nodes), MOST_HELD + state.parts * state.room, NODE)


@inner
def _drafted(state: Row, count: int) -> Any:
    return carray(_pointer(state.drafted), count, DRAFTED)


@inner
def _forwards(state: Row) -> Any:
    return carray(_pointer(state.seconds), state.rows, np.float64)


# Estimates of nodes, from hits and tries `[sets of parts, contexts, bins, 2]`.


@inner
def _bin(raw: float) -> int:
    return min(int(-2.0 * log2(raw)), BINS - 1) if raw > _LEAST else BINS - 1


@inner
def _moved(counts: Floats, who: int, context: int, raw: float, estimate: float) -> float:
    at = _bin(raw)
    for level in range(0, context + 1, max(context, 1)):  # 0, and the context if it is another
        hits, tries = counts[who, level, at, 0], counts[who, level, at, 1]
        estimate = (hits + _PRIOR_TRIES * estimate) / (tries + _PRIOR_TRIES)
    return estimate


@inner
def _count(counts: Floats, keep: float, who: int, context: int, raw: float, right: bool) -> None:
    at = _bin(raw)
    for level in range(0, context + 1, max(context, 1)):
        counts[who, level, at, 0] = counts[who, level, at, 0] * keep + right
        counts[who, level, at, 1] = counts[who, level, at, 1] * keep + 1.0


@entry
def estimate(counts: Floats, who: int, context: int, raw: float, prior: float) -> float:
    """The acceptance to expect of a node, moved from the prior as far as its like have come true; see `Calibration`."""
    return _moved(counts, who, context, raw, prior)


@entry
def count(counts: Floats, keep: float, who: int, context: int, raw: float, right: bool) -> None:
    """Count one node of which is known whether it came true."""
    _count(counts, keep, who, context, raw, right)


@entry
def count_verified(counts: Floats, drafted: Rows, path: Ints) -> None:
    """Count the nodes of a draft, which were verified; all counts keep their weight."""
    for i in range(len(drafted)):
        _count(counts, 1.0, drafted[i].who, 0, drafted[i].best, _has(path, i))


@inner
def _has(numbers: Ints, wanted: int) -> bool:
    for number in numbers:  # noqa: SIM110  (numba compiles no generators)
        if number == wanted:
            return True
    return False


# Parts.


@inner
def _robust_mean(mean: float, value: float, count: float) -> float:
    """The running mean with one more value; one far off, by an interruption, counts as three times the mean.

    Of the first values it is the smallest: these may have waited for something to be compiled.
    """
    if count <= _FIRST_VALUES:
        return min(mean, value) if mean > 0 else value
    return mean + (min(value, 3.0 * mean) - mean) / min(_ASKS, count)


@inner
def _context_after(run: int) -> int:
    """What the tokens in a row that a part had right say about its next ones: one of 1 to 4."""
    return 1 + (run > 0) + (run > 2) + (run > 7)


@inner
def _share(records: Floats, context: int, usual: float) -> float:
    for key in (0, context):
        usual = (records[key, _RIGHT] + _USUAL_TOKENS * usual) / (records[key, _TOKENS] + _USUAL_TOKENS)
    return usual


@inner
def _note_record(records: Floats, context: int, right: int, missed: bool, now: int) -> None:
    for key in (0, context):
        fade = exp(-max(now - records[key, _AT], 0.0) / _FADES)
        records[key, _RIGHT] = records[key, _RIGHT] * fade + right
        records[key, _TOKENS] = records[key, _TOKENS] * fade + right + missed
        records[key, _AT] = now


@inner
def _note_text(arm: Row, turn: Row, foreseen: int, missed: bool) -> None:
    """The text went on: the part had so many tokens right, and then was wrong, or its draft ended."""
    arm.foreseen += foreseen
    context = _context_after(turn.run)
    _note_record(arm.records, context, foreseen, missed, turn.rounds)
    _note_record(turn.records, context, foreseen, missed, turn.rounds)
    turn.run = 0 if missed else turn.run + foreseen
    if arm.costly and not turn.stops and not missed:
        turn.wait = 0  # if this was a trial, try again at once: a model is right by more than chance


@inner
def _trial(arm: Row, turn: Row, plain: float, cost: float) -> bool:
    if turn.wait > 0:
        turn.wait -= 1
        return False
    often = max(1.0, cost / ((_COSTLY_SHARE if arm.costly else _TRIAL_SHARE) * plain))
    turn.wait = round(often * min(_RAREST, 2.0 ** (turn.idle // _TRIALS_ALIKE))) - 1
    turn.idle += 1
    arm.idle = turn.idle
    return True


@inner
def _seconds(arm: Row) -> Any:
    """What asking it takes."""
    return arm.asking + arm.watching


@inner
def _due(arm: Row, turn: Row, rate: float, plain: float, deciding: float) -> bool:
    cost = _seconds(arm) + deciding
    return turn.worth >= rate * cost or _trial(arm, turn, plain, cost)


@inner
def _note_asked(arm: Row, turn: Row) -> None:
    arm.asked += 1
    arm.spent += turn.took
    arm.asking = _robust_mean(arm.asking, turn.took, arm.asked)


@inner
def _note_run(arm: Row, turn: Row) -> None:
    """Learn what a draft takes to begin and what each step of it takes, by least squares.

    Only from drafts round by round: after a while there was more to catch up with. What is far too slow was
    interrupted; if all before was, by the compiler perhaps, it is forgotten.
    """
    sums, steps, usual = arm.drafts, float(turn.steps), arm.beginning + turn.steps * arm.step
    if turn.ran and turn.rounds == turn.ran + 1 and steps > 0.0:
        seconds = min(turn.took, 3.0 * usual) if usual > 0.0 else turn.took
        keep = _DRAFTS_KEEP if usual < 3.0 * seconds else 0.0
        for i, value in enumerate((1.0, steps, seconds, steps * steps, steps * seconds)):
            sums[i] = sums[i] * keep + value
        mean, spread = sums[_STEPS] / sums[_DRAFTS], sums[_SQUARES] - sums[_STEPS] ** 2 / sums[_DRAFTS]
        arm.step = most = sums[_SECONDS] / sums[_STEPS]
        if spread > 0.1:  # else nothing tells the two apart: as for a draft model, all goes to the steps
            slope = (sums[_PRODUCTS] - mean * sums[_SECONDS]) / spread
            arm.step = min(max(slope, 0.0), most)
        arm.beginning = (most - arm.step) * mean
    turn.ran = turn.rounds


@inner
def _note_learned(arm: Row, turn: Row) -> None:
    arm.watched += 1
    arm.spent += turn.learned
    arm.watching = _robust_mean(arm.watching, turn.learned, arm.watched)
    turn.learned = -1.0


@inner
def _note_worth(arm: Row, turn: Row, gained: float, rate: float) -> None:
    """`worth` is what a part gains where the others leave all of the next token open."""
    turn.asks += 1
    turn.worth += (gained - turn.open * turn.worth) / min(_ASKS, turn.asks + 2.0)
    arm.worth += (gained - turn.open * arm.worth) / (4.0 * _ASKS)
    if gained >= rate * _seconds(arm):
        arm.idle = turn.idle = turn.wait = 0


# The round: reading what the text says about earlier drafts, and whom to ask.


@inner
def _judge(nodes: Rows, held: int, fresh: int, start: int, text: Ints, workload: Floats, request: Floats) -> None:
    """Find out which nodes came true, as far as the text from `start` goes, and count them."""
    for i in range(held + fresh):
        node = nodes[i]
        if i >= held and node.parent >= 0:
            node.parent += held  # among the fresh ones they are counted from the first of these
        right = _IS_RIGHT if node.parent < 0 else nodes[node.parent].right
        if right == _IS_RIGHT:
            ahead = node.at - start
            right = _UNKNOWN if ahead >= len(text) else int(text[ahead] == node.token)
        node.right = right
        if right != _UNKNOWN:
            _count(workload, _WORKLOAD_KEEPS, node.set, node.context, node.best, right == _IS_RIGHT)
            _count(request, _REQUEST_KEEPS, node.set, node.context, node.best, right == _IS_RIGHT)


@inner
def _tell(arms: Rows, turns: Rows, nodes: Rows, known: int) -> None:
    """Tell each part that drafted last how many tokens it had right, and whether it then was wrong."""
    for p in range(len(turns)):
        turns[p].reached = turns[p].deepest = 0
    for i in range(len(nodes)):
        for p in range(len(turns)):
            if nodes[i].who >> p & 1:
                turns[p].deepest = max(turns[p].deepest, nodes[i].depth)
                if nodes[i].right == _IS_RIGHT:
                    turns[p].reached = max(turns[p].reached, nodes[i].depth)
    for p in range(len(turns)):
        turn = turns[p]
        if turn.awaited:
            missed = turn.reached < known and (turn.deepest > turn.reached or turn.deepest == 0)
            _note_text(arms[p], turn, turn.reached, missed)
            turn.awaited = 0


@inner
def _hold(nodes: Rows, total: int) -> int:
    """Move the nodes that may still come true to the front. Those for which there is no room teach nothing."""
    place = np.full(total, -1)  # below a node that came true they hang from the text itself
    held = 0
    for i in range(total):
        if nodes[i].right == _UNKNOWN and held < MOST_HELD:
            place[i] = held
            parent = nodes[i].parent
            nodes[held] = nodes[i]
            nodes[held].parent = -1 if parent < 0 else place[parent]
            held += 1
    return held


@inner
def _trust(book: Row) -> Any:
    return min(1.0, (book.kept_promises + _KEPT) / (book.promised + _PROMISED))


@inner
def _after(book: Row, nodes: int) -> Any:
    """Seconds that follow a forward over so many nodes."""
    return book.sequences * book.accept_seconds + nodes * book.node_seconds


@inner
def _rate(book: Row, plain: float) -> Any:
    step = plain + _after(book, 0)
    running = (book.tokens + _FIRST * book.sequences) / (book.seconds + _FIRST * step)
    return max(book.sequences / step, running)


@inner
def _begin(state: Row, arms: Rows, turns: Rows, book: Row, nodes: Rows, plain: float, text: Ints) -> int:
    workload, request = _counts(state, state.workload), _counts(state, state.request)
    _judge(nodes, state.held, state.fresh, state.length, text, workload, request)
    _tell(arms, turns, nodes[state.held : state.held + state.fresh], len(text))
    rate, deciding, asked = _rate(book, plain), book.deciding / len(turns), 0
    for p in range(len(turns)):
        arm, turn = arms[p], turns[p]
        turn.rounds += 1
        turn.offered = 0
        turn.context = _context_after(turn.run)
        turn.chance = _share(turn.records, turn.context, _share(arm.records, turn.context, arm.usual))
        if not arm.costly and _due(arm, turn, rate, plain, deciding):
            asked |= 1 << p
    state.held, state.fresh = _hold(nodes, state.held + state.fresh), 0
    state.length += len(text)
    return asked


@entry
def begin(states: Rows, text: Ints) -> int:
    """Begin a round, with this text as news. Returns which parts to ask for a draft now."""
    state = states[0]
    return _begin(state, _arms(state), _turns(state), _book(state), _nodes(state), _forwards(state)[0], text)


@inner
def _falling(scores: Floats) -> Ints:
    """Their numbers, the highest first and of equals the first."""
    order = np.empty(len(scores), dtype=np.int64)
    for i in range(len(scores)):
        at = i
        while at > 0 and scores[order[at - 1]] < scores[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    return order


# Whom to run a model for, and how long.


@inner
def _run_length(
    arm: Row, turn: Row, book: Row, rate: float, seconds: Floats, base: int, covered: Floats
) -> tuple[int, float]:
    """How many tokens a part should draft beside the first `base` nodes, and what they gain."""
    gain, best, length, chance, trust = -rate * arm.beginning, 0.0, 0, 1.0, _trust(book)
    for number in range(1, min(len(covered), len(seconds) - 1 - base) + 1):
        chance *= turn.chance
        extra = seconds[base + number] - seconds[base + number - 1] + arm.step + book.node_seconds
        gain += trust * max(chance - covered[number - 1], 0.0) - rate * extra
        if gain > best:
            best, length = gain, number
    return length, best


@inner
def _whom_to_run(
    arms: Rows, turns: Rows, book: Row, seconds: Floats, nodes: Rows, order: Ints, most: int
) -> tuple[int, int, float]:
    rate, trust = _rate(book, seconds[0]), _trust(book)
    base, sure, highest = 0, 0.0, 0.0
    for number in range(1, min(len(order), len(seconds) - 2) + 1):
        extra = seconds[number] - seconds[number - 1] + book.node_seconds
        sure += trust * nodes[order[number - 1]].score - rate * extra
        if sure > highest:
            base, highest = number, sure
    covered = np.zeros(most)
    for i in order[:base]:
        if nodes[i].depth <= most:
            covered[nodes[i].depth - 1] += nodes[i].score
    part, length, best = -1, 0, 0.0
    for p in range(len(arms)):
        arm, turn = arms[p], turns[p]
        if not arm.costly:
            continue
        if turn.stops:
            turn.open = max(1.0 - covered[0], 0.0)
            tokens, gain = most, turn.open * turn.worth - rate * (arm.beginning + arm.step)
        else:
            tokens, gain = _run_length(arm, turn, book, rate, seconds, base, covered)
        if arm.asked == 0:
            tokens = min(tokens, 1)
        if gain > best:
            part, length, best = p, tokens, gain
        elif length == 0 and _trial(arm, turn, seconds[0], arm.beginning + arm.step):
            part, length = p, 1
    if length <= 1:
        return part, length, np.inf
    last = len(seconds) - 1
    first, last = min(base + 1, last), min(base + 4, last)  # the first row may cost more than others
    row = (seconds[last] - seconds[first]) / max(last - first, 1) + book.node_seconds
    return part, length, rate * (arms[part].step + row) / (trust * _UNSCORED)


# What of it is verified.


@inner
def _best_ratio(book: Row, seconds: Floats, scores: Floats, base: int, draft_seconds: float) -> tuple[int, float]:
    """With how many of the likeliest nodes this round has its best ratio of tokens to seconds, and that ratio."""
    tokens, best, count, trust = float(book.sequences), 0.0, 0, _trust(book)
    for number in range(len(scores) + 1):
        if number > 0:
            tokens += trust * scores[number - 1]
        taken = seconds[base + number] + _after(book, base + number) + draft_seconds
        if tokens / taken > best:
            best, count = tokens / taken, number
    return count, best


@inner
def _explored(book: Row, count: int, most: int) -> int:
    """Now and then a node more or less: of forwards that never happen nothing is learned about their cost."""
    book.drafting += count > 0
    if count == 0 or book.drafting % _EXPLORES_EVERY:
        return count
    turn = book.drafting // _EXPLORES_EVERY
    if turn % _PLAIN_AMONG == 0:
        return 0
    return max(1, count - 1) if turn % 2 else min(count + 1, most)


@inner
def _decide(book: Row, seconds: Floats, scores: Floats, base: int, draft_seconds: float) -> tuple[int, float]:
    """How many of the likeliest nodes are verified beside `base` others, and what those gain that pay.

    Seconds are counted as the curve has them, not as measured: a stalled round says nothing about the next one.
    """
    count, rate = _best_ratio(book, seconds, scores, base, draft_seconds)
    cost = rate * (seconds[base + count] - seconds[base] + count * book.node_seconds)
    book.price = cost / count if count else 0.0
    gain = _trust(book) * scores[:count].sum() - cost
    count = _explored(book, count, len(scores))
    fade, nodes = 1.0 - 1.0 / _ROUNDS, base + count
    book.tokens *= fade
    book.seconds = book.seconds * fade + seconds[nodes] + _after(book, nodes) + draft_seconds
    return count, gain


@inner
def _cut(book: Row, seconds: Floats, drafted: Rows, draft_seconds: float) -> int:
    """How many nodes are worth verifying of the one draft of a round, which is counted; see `choose`."""
    scores = np.empty(len(drafted))
    for i in range(len(drafted)):
        scores[i] = drafted[i].score
    book.sequences = 1
    count, _ = _decide(book, seconds, scores, 0, draft_seconds)
    return count


@entry
def choose(books: Rows, seconds: Floats, scores: Floats, sizes: Ints, draft_seconds: float, most: int) -> Any:
    """How many nodes of each draft are worth verifying, and count the round.

    Args:
        books: One, of the controller.
        seconds: Of a forward with 0, 1, … nodes.
        scores: Of the drafts that may be cut, one after the other, each falling.
        sizes: Nodes of each draft, negative if it must stay whole; then how many are kept of it.
        draft_seconds: What drafting took.
        most: Nodes that may be verified.

    Returns the tokens that these promise over a plain step, less what their verification costs.
    """
    book, drafts = books[0], len(sizes)
    book.sequences = drafts
    base = -np.minimum(sizes, 0).sum()
    whose = np.empty(len(scores), dtype=np.int64)
    at = 0
    for draft in range(drafts):
        for _ in range(sizes[draft]):
            whose[at] = draft
            at += 1
    order = _falling(scores)[: max(most - base, 0)]
    count, gain = _decide(book, seconds, scores[order], base, draft_seconds)
    for draft in range(drafts):
        sizes[draft] = max(-sizes[draft], 0)
    for i in order[:count]:
        sizes[whose[i]] += 1
    return gain


# One tree of several drafts.


@inner
def _merge(offers: Rows, turns: Rows, nodes: Rows, start: int) -> int:
    """The union of what was offered by prefix, parents before children, earlier parts' nodes first."""
    total = 0
    place = np.empty(offers.shape[1], dtype=np.int64)
    for p in range(len(turns)):
        chance, context = turns[p].chance, turns[p].context
        for i in range(turns[p].offered):
            offer = offers[p, i]
            parent = place[offer.parent] if offer.parent >= 0 else -1
            at = 0
            while at < total and (nodes[at].parent != parent or nodes[at].token != offer.token):
                at += 1
            place[i] = at
            node = nodes[at]
            if at == total:
                total += 1
                node.token, node.parent, node.context, node.who = offer.token, parent, context, 0
                node.depth = nodes[parent].depth + 1 if parent >= 0 else 1
                node.at = start + node.depth - 1
                node.best = node.prior = 0.0
            if node.who >> p & 1 == 0:
                node.who |= 1 << p
                node.context = max(node.context, context)
                scored = offer.score >= 0.0
                node.best = max(node.best, offer.score if scored else _UNSCORED**node.depth)
                node.prior = max(node.prior, offer.score if scored else chance**node.depth)
    return total


@entry
def join(
    states: Rows, asked: int, budget: int, deepest: int, alone: bool, draft_seconds: float
) -> tuple[int, int, int, float]:
    """Make one tree of the offers of the asked parts, in the fresh nodes, and of its likeliest nodes a draft.

    The likeliest come first, and parents before their children, as no path is likelier than its beginning. Without
    trees it is the best child of the best child … Returns the nodes of the draft; and, if `deepest` is not 0, which
    part should run its model for how many tokens at most beside that (-1 and 0 if none should), and the least path
    probability below which it need not go on. If none should, and the draft is `alone` in its round, it is cut to
    what pays.
    """
    state = states[0]
    turns, nodes, drafted = _turns(state), _nodes(state)[state.held :], _drafted(state, budget)
    total, beside = _merge(_offers(state), turns, nodes, state.length), 0
    for p in range(len(turns)):
        if asked >> p & 1 and turns[p].stops:
            beside = 1 << len(turns)  # what a head left out is less likely than if it had not been asked
    scores, workload, request = np.empty(total), _counts(state, state.workload), _counts(state, state.request)
    for i in range(total):
        node = nodes[i]
        node.set, found = node.who + beside, node.prior
        if state.workload:
            found = _moved(workload, node.set, node.context, node.best, found)
        found = _moved(request, node.set, node.context, node.best, found)
        scores[i] = node.score = min(nodes[node.parent].score if node.parent >= 0 else 1.0, found)
    place = np.full(total, -1)
    size, last = 0, -1
    order = _falling(scores)
    for i in order:
        node = nodes[i]
        if size < len(drafted) and (state.trees or node.parent == last):
            chosen = drafted[size]
            chosen.token, chosen.score, chosen.who, chosen.best = node.token, node.score, node.who, node.best
            chosen.parent = place[node.parent] if node.parent >= 0 else -1
            place[i] = size
            size, last = size + 1, i
    state.fresh = total
    for p in range(len(turns)):
        turns[p].awaited = asked >> p & 1
    part, length, least = -1, 0, 0.0
    if deepest > 0 or alone:
        book, seconds = _book(state), _forwards(state)
        if deepest > 0:
            part, length, least = _whom_to_run(_arms(state), turns, book, seconds, nodes, order, deepest)
        if alone and length == 0:
            size = _cut(book, seconds, drafted[:size], draft_seconds)
    return size, part, length, least


# What came of it.


@inner
def _note_accepting(book: Row, nodes: int, seconds: float) -> None:
    """What follows a forward takes some time for the round, and some for each node."""
    if nodes == 0:
        book.plain += 1
        book.accept_seconds = _robust_mean(book.accept_seconds, seconds, book.plain)
    else:
        book.laden += 1
        for_nodes = max(seconds - book.accept_seconds, _LEAST_SHARE * seconds)
        book.node_seconds = _robust_mean(book.node_seconds, for_nodes / nodes, book.laden)


@inner
def _learn(book: Row, tokens: int, promised: float, accepted: int, nodes: int, accept_seconds: float) -> None:
    fade = 1.0 - 1.0 / _ROUNDS
    book.tokens += tokens
    book.promised = book.promised * fade + promised
    book.kept_promises = book.kept_promises * fade + accepted
    _note_accepting(book, nodes, accept_seconds)


@entry
def learn(books: Rows, tokens: int, promised: float, accepted: int, nodes: int, accept_seconds: float) -> None:
    """See `Controller.learn`."""
    _learn(books[0], tokens, promised, accepted, nodes, accept_seconds)


@entry
def rate(books: Rows, plain: float) -> Any:
    """See `Controller.rate`."""
    return _rate(books[0], plain)


@entry
def trust(books: Rows) -> Any:
    """See `Controller.trust`."""
    return _trust(books[0])


@inner
def _share_out(arms: Rows, drafted: Rows, path: Ints, price: float, gains: Floats) -> float:
    """Credit the parts with the verified nodes, each in part where several drafted it; returns what all promised.

    What such a node gains is the gain of the quickest of them: without the others it would be there, too.
    """
    promised = 0.0
    for i in range(len(drafted)):
        node, right = drafted[i], _has(path, i)
        promised += node.score
        names, quickest = 0, -1
        for p in range(len(arms)):
            if node.who >> p & 1:
                names += 1
                if quickest < 0 or _seconds(arms[p]) < _seconds(arms[quickest]):
                    quickest = p
        gains[quickest] += node.score - price
        for p in range(len(arms)):
            if node.who >> p & 1:
                arms[p].verified += 1.0 / names
                arms[p].accepted += right / names
    return promised


@inner
def _settle(
    arms: Rows, turns: Rows, book: Row, plain: float, drafted: Rows, path: Ints, asked: int, emitted: int,
    deciding: float, accept_seconds: float
) -> int:  # fmt: skip
    gains, watching = np.zeros(len(arms)), 0
    if asked:
        book.decided += 1
        book.deciding = _robust_mean(book.deciding, deciding, book.decided)
    promised = _share_out(arms, drafted, path, book.price, gains)
    running = _rate(book, plain)
    for p in range(len(arms)):
        arm, turn = arms[p], turns[p]
        if turn.learned >= 0.0:
            _note_learned(arm, turn)
        if asked >> p & 1:
            _note_asked(arm, turn)
            if arm.costly:
                _note_run(arm, turn)
            _note_worth(arm, turn, gains[p], running)
        elif turn.rounds % max(1, round(arm.watching / (_WATCH_SHARE * plain))) == 0:
            watching |= 1 << p
    _learn(book, emitted, promised, len(path), len(drafted), accept_seconds)
    return watching


@entry
def advance(
    states: Rows, emitted: int, drafted: int, accepted: int, asked: int, deciding: float, accept_seconds: float
) -> tuple[int, int]:
    """Learn from a round, and `begin` the next one with the tokens that it emitted.

    `drafted` nodes were verified, `deciding` is what it took to join the asked parts' drafts. Returns first which parts
    that only watched may learn, as seldom as takes a small share of a step.
    """
    state = states[0]
    arms, turns, book, nodes, plain = _arms(state), _turns(state), _book(state), _nodes(state), _forwards(state)[0]
    text, path = carray(_pointer(state.text), emitted, np.int64), carray(_pointer(state.path), accepted, np.int64)
    verified = _drafted(state, drafted)
    watching = _settle(arms, turns, book, plain, verified, path, asked, emitted, deciding, accept_seconds)
    return watching, _begin(state, arms, turns, book, nodes, plain, text)
