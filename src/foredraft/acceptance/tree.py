"""Acceptance rules for a tree of drafted tokens. A chain is a tree without branches.

Node i's row of p is row i + 1, the root's row 0. `draft.q[i]` is the law that node i was drawn from given the siblings
drawn before it, or `None` for a point mass; all ways of drawing siblings differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foredraft.acceptance.chain import acceptance, remainder, residual
from foredraft.randomness import RandomSource
from foredraft.sampling import finite_argmax
from foredraft.tree import children
from foredraft.types import Draft, Verdict


def greedy(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Every lossless rule where all rows are one-hot, of which the argmax is all that counts: follow it while a node
    names it. Takes no chance.
    """
    return _walk(draft, lambda row, depth: finite_argmax(p[row]))


def walk(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Draw the target's own token; descend if it is a child, else emit it and stop.

    Optimal where children are a deterministic function of the context, since the token then is all chance there is.
    From a source keyed by position the drawn tokens do not depend on the draft at all, whatever drew it.
    """
    return _walk(draft, lambda row, depth: source.draw(p[row], depth))


def _walk(draft: Draft, choose: Callable[[int, int], int]) -> Verdict:
    below = children(draft)
    path: list[int] = []
    tokens: list[int] = []
    row = 0
    while True:
        tokens.append(choose(row, len(path)))
        match = _named(draft, below[row], tokens[-1])
        if match is None:
            return Verdict(tuple(path), tuple(tokens), rejected=bool(below[row]))
        path.append(match)
        row = match + 1


def recursive(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Recursive rejection sampling (SpecInfer, arXiv 2305.09781; Sequoia, 2402.12374), for any tree.

    Each child is tried in the order it was drawn: accepted with `min(1, P(x) / Q(x))` for the law Q that drew it, else
    P becomes the normalised residual `(P - Q)+`. If none is accepted, the correction is drawn from what P is then.
    """
    below = children(draft)
    path: list[int] = []
    while True:
        row = _row(path)
        law = p[row]
        for child in below[row]:
            if source.coin(acceptance(*_masses(draft, child, law))):
                path.append(child)
                break
            law = residual(draft, child, law)
            law = law / law.sum()
        else:
            return _verdict(draft, path, source.draw(law), rejected=bool(below[row]))


def hu(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Greedy multi-draft (Hu et al. 2025, arXiv 2502.18779), and a sampled trunk with deterministic side branches.

    At most one child of a node was drawn, and it stands first; the others are point masses. It is accepted with
    `min(1, p(x) / q(x))`; else `y` is drawn from the residual, and if y is one of the others the walk goes on from it.
    Equals `recursive` in law at the cost of one draw a node.
    """
    return _hu_from(draft, p, source, [])


def block(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444) of a drafted chain, which may have side branches.

    With `P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))` the first i tokens are taken with the probability that makes the
    block as a whole follow p, and the longest success wins; what comes next is drawn from `(P_i p - q)+`. In
    expectation never fewer tokens than token by token. Point masses beside or after the chain are walked as in `hu`.
    """
    below = children(draft)
    trunk = _drawn_chain(draft, below)
    longest, weight, weights = 0, 1.0, [1.0]
    for i, node in enumerate(trunk, start=1):
        weight = acceptance(*_masses(draft, node, p[_row(trunk[: i - 1])]), weight)
        weights.append(weight)
        if i < len(trunk):
            taken = _share(float(remainder(draft, trunk[i], p[node + 1], weight).sum()), weight)
        else:
            taken = weight
        if source.coin(taken):
            longest = i
    path = trunk[:longest]
    if longest == len(trunk):
        return _hu_from(draft, p, source, path)
    y = source.draw(residual(draft, trunk[longest], p[_row(path)], weights[longest]))
    beside = _named(draft, below[_row(path)][1:], y)  # a correction that lands on a side branch costs no forward
    if beside is None:
        return _verdict(draft, path, y, rejected=True)
    return _hu_from(draft, p, source, [*path, beside])


def traversal(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Traversal verification (arXiv 2505.12398): leaves first, for any tree; on a chain it is block verification.

    A node is reached with weight `a`, the root with 1; each child is tried with weight `min(1, a P(x) / Q(x))`. After a
    failure P and a become what is left: `R = (a P - Q)+` with mass S, `P = R / S`, `a = S / (S + 1 - a)`. When all
    children have failed the node itself is accepted with probability a, and the next token is drawn from P.
    """
    below = children(draft)

    def visit(path: list[int], weight: float) -> Verdict | None:
        row = _row(path)
        law = p[row]
        for child in below[row]:
            found = visit([*path, child], acceptance(*_masses(draft, child, law), weight))
            if found is not None:
                return found
            left = remainder(draft, child, law, weight)
            mass = float(left.sum())
            law = left / mass if mass > 0 else law
            weight = _share(mass, weight)
        if not source.coin(weight):
            return None
        return _verdict(draft, path, source.draw(law), rejected=bool(below[row]))

    verdict = visit([], 1.0)
    assert verdict is not None, "the root has weight 1"
    return verdict


def _hu_from(draft: Draft, p: Tensor, source: RandomSource, path: list[int]) -> Verdict:
    below = children(draft)
    while True:
        row = _row(path)
        law, points = p[row], below[row]
        if points and draft.q[points[0]] is not None:
            drawn, *points = points
            if source.coin(acceptance(*_masses(draft, drawn, law))):
                path = [*path, drawn]
                continue
            law = residual(draft, drawn, law)
        y = source.draw(law)
        match = _named(draft, points, y)
        if match is None:
            return _verdict(draft, path, y, rejected=bool(below[row]))
        path = [*path, match]


def _named(draft: Draft, nodes: list[int], token: int) -> int | None:
    """The first of the nodes that has this token."""
    return next((node for node in nodes if draft.tokens[node] == token), None)


def _drawn_chain(draft: Draft, below: list[list[int]]) -> list[int]:
    """The nodes from the root down that were drawn from a q; each is the first child of the one before."""
    trunk: list[int] = []
    while (first := below[_row(trunk)][:1]) and draft.q[first[0]] is not None:
        trunk += first
    return trunk


def _share(mass: float, weight: float) -> float:
    """S / (S + 1 - a): exactly 1 for a = 1, which is also the limit where both vanish."""
    lost = 1.0 - weight
    return mass / (mass + lost) if lost > 0 else 1.0


def _row(path: list[int]) -> int:
    """The row of p after the last node of a path; 0 for the root."""
    return path[-1] + 1 if path else 0


def _masses(draft: Draft, node: int, law: Tensor) -> tuple[float, float]:
    """What the law at hand and the law that drew the node give to its token."""
    x, q = draft.tokens[node], draft.q[node]
    return float(law[x]), 1.0 if q is None else float(q[x])


def _verdict(draft: Draft, path: list[int], y: int, *, rejected: bool) -> Verdict:
    return Verdict(tuple(path), (*(draft.tokens[node] for node in path), y), rejected)
