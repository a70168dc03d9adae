"""The compiled part of deciding: who drafts, what of it is worth verifying, and what is learned from what came of it.

The weights push all else out of the caches with every forward, so each Python object that is looked at between two of
them waits for memory. Hence a round is three calls over few arrays that live across rounds: `join` makes one tree of
what the asked parts drafted, `cut` or `choose` says what of it is verified, `advance` learns from what came of it,
reads the text that was emitted and says who is asked next. Before the first round `begin` does so.

Sets of parts are numbers, bit p for part p. All that is compiled is in this one file, because numba renews what it
kept on disk only when the file itself changes.
"""

from __future__ import annotations

from math import exp, log2
from typing import Any

import numpy as np
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

ARM = np.dtype(
    [(name, "i8") for name in ("costly", "asked", "watched", "foreseen", "idle")]
    + [(name, "f8") for name in ("usual", "asking", "watching", "worth", "spent", "verified", "accepted")]
    + [_RECORDS],
    align=True,
)
"""A part across requests; `arms.py` documents the fields."""
TURN = np.dtype(
    [(name, "i8") for name in ("run", "idle", "wait", "rounds", "asks")]
    + [(name, "f8") for name in ("worth", "chance", "took", "learned")]
    + [(name, "i8") for name in ("context", "offered", "awaited", "reached", "deepest")]
    + [_RECORDS],
    align=True,
)
"""A part within a request; `arms.py` documents the fields."""
NODE = np.dtype(
    [(name, "i4") for name in ("token", "parent", "depth", "context")]
    + [(name, "i8") for name in ("who", "at", "right")]
    + [(name, "f8") for name in ("best", "prior", "score")],
    align=True,
)
"""A node of the joint tree: who drafted it, where in the text it would stand, whether it came true, the highest score
that a part gave it, what to expect of it before anything was seen, and its calibrated path probability."""
DRAFTED = np.dtype([("token", "i4"), ("parent", "i4"), ("score", "f8"), ("who", "i8"), ("best", "f8")], align=True)
"""A node as it is proposed."""
BOOK = np.dtype(
    [(name, "i8") for name in ("sequences", "drafting", "decided", "plain", "laden")]
    + [(name, "f8") for name in ("tokens", "seconds", "promised", "kept_promises", "price", "deciding")]
    + [(name, "f8") for name in ("accept_seconds", "node_seconds")],
    align=True,
)
"""What the controller knows of recent rounds; `controller.py` documents the fields."""

BINS = 24  # of a node's raw score, two for each halving
_LEAST = 2.0 ** (-BINS / 2)  # what is below goes to the last bin
_UNSCORED = 0.6  # `estimates.UNSCORED`: what is imported, numba does not see change
_PRIOR_TRIES = 8.0  # how many tries an estimate is worth before acceptances are seen
_WORKLOAD_KEEPS, _REQUEST_KEEPS = 1.0 - 1.0 / 200.0, 1.0 - 1.0 / 45.0  # of older tries, at each new one
_WRONG, _IS_RIGHT, _UNKNOWN = range(3)
MOST_HELD = 1024  # nodes of which the text does not tell yet whether they came true

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
    if arm.costly and not missed:
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
def _note_learned(arm: Row, turn: Row) -> None:
    arm.watched += 1
    arm.spent += turn.learned
    arm.watching = _robust_mean(arm.watching, turn.learned, arm.watched)
    turn.learned = -1.0


@inner
def _note_worth(arm: Row, turn: Row, gained: float, rate: float) -> None:
    turn.asks += 1
    turn.worth += (gained - turn.worth) / min(_ASKS, turn.asks + 2.0)
    arm.worth += (gained - arm.worth) / (4.0 * _ASKS)
    if gained >= rate * _seconds(arm):
        arm.idle = turn.idle = turn.wait = 0


@entry
def trial(arms: Rows, turns: Rows, part: int, plain: float, cost: float) -> bool:
    """Whether it is time to try again what does not pay at the moment."""
    return _trial(arms[part], turns[part], plain, cost)


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
            _count(workload, _WORKLOAD_KEEPS, node.who, node.context, node.best, right == _IS_RIGHT)
            _count(request, _REQUEST_KEEPS, node.who, node.context, node.best, right == _IS_RIGHT)


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
def _begin(
    arms: Rows, turns: Rows, book: Row, workload: Floats, request: Floats, nodes: Rows, held: int, fresh: int,
    plain: float, start: int, text: Ints
) -> tuple[int, int]:  # fmt: skip
    _judge(nodes, held, fresh, start, text, workload, request)
    _tell(arms, turns, nodes[held : held + fresh], len(text))
    rate, deciding, asked = _rate(book, plain), book.deciding / len(turns), 0
    for p in range(len(turns)):
        arm, turn = arms[p], turns[p]
        turn.rounds += 1
        turn.offered = 0
        turn.context = _context_after(turn.run)
        turn.chance = _share(turn.records, turn.context, _share(arm.records, turn.context, arm.usual))
        if not arm.costly and _due(arm, turn, rate, plain, deciding):
            asked |= 1 << p
    return asked, _hold(nodes, held + fresh)


@entry
def begin(
    arms: Rows, turns: Rows, books: Rows, workload: Floats, request: Floats, nodes: Rows, held: int, fresh: int,
    plain: float, start: int, text: Ints
) -> tuple[int, int]:  # fmt: skip
    """Begin a round, with the text from `start` on as news.

    Returns which parts to ask for a draft now, and how many nodes are held from now on.
    """
    return _begin(arms, turns, books[0], workload, request, nodes, held, fresh, plain, start, text)


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


@entry
def join(
    offers: Rows, turns: Rows, asked: int, workload: Floats, request: Floats, nodes: Rows, start: int,
    drafted: Rows, trees: bool
) -> tuple[int, int]:  # fmt: skip
    """Make one tree of the offers of the asked parts, in `nodes`, and of its likeliest nodes a draft, in `drafted`.

    The likeliest come first, and parents before their children, as no path is likelier than its beginning. Without
    `trees` it is the best child of the best child … Returns the nodes of the tree and of the draft.
    """
    total = _merge(offers, turns, nodes, start)
    scores = np.empty(total)
    for i in range(total):
        node = nodes[i]
        found = node.prior
        if len(workload):
            found = _moved(workload, node.who, node.context, node.best, found)
        found = _moved(request, node.who, node.context, node.best, found)
        scores[i] = node.score = min(nodes[node.parent].score if node.parent >= 0 else 1.0, found)
    place = np.full(total, -1)
    size, last = 0, -1
    for i in _falling(scores):
        node = nodes[i]
        if size < len(drafted) and (trees or node.parent == last):
            chosen = drafted[size]
            chosen.token, chosen.score, chosen.who, chosen.best = node.token, node.score, node.who, node.best
            chosen.parent = place[node.parent] if node.parent >= 0 else -1
            place[i] = size
            size, last = size + 1, i
    for p in range(len(turns)):
        turns[p].awaited = asked >> p & 1
    return total, size


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


@entry
def cut(books: Rows, seconds: Floats, drafted: Rows, draft_seconds: float) -> int:
    """How many nodes are worth verifying of the one draft of a round, which is counted; see `choose`."""
    scores = np.empty(len(drafted))
    for i in range(len(drafted)):
        scores[i] = drafted[i].score
    books[0].sequences = 1
    count, _ = _decide(books[0], seconds, scores, 0, draft_seconds)
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
            _note_worth(arm, turn, gains[p], running)
        elif turn.rounds % max(1, round(arm.watching / (_WATCH_SHARE * plain))) == 0:
            watching |= 1 << p
    _learn(book, emitted, promised, len(path), len(drafted), accept_seconds)
    return watching


@entry
def advance(
    arms: Rows, turns: Rows, books: Rows, workload: Floats, request: Floats, nodes: Rows, held: int, fresh: int,
    plain: float, start: int, text: Ints, drafted: Rows, path: Ints, asked: int, deciding: float,
    accept_seconds: float
) -> tuple[int, int, int]:  # fmt: skip
    """Learn from a round, and `begin` the next one with the `text` that it emitted.

    `drafted` is what was verified, `deciding` what it took to join the asked parts' drafts. Returns first which parts
    that only watched may learn, as seldom as takes a small share of a step.
    """
    watching = _settle(arms, turns, books[0], plain, drafted, path, asked, len(text), deciding, accept_seconds)
    following, held = _begin(arms, turns, books[0], workload, request, nodes, held, fresh, plain, start, text)
    return watching, following, held
