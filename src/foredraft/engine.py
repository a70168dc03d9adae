"""The loop: propose a draft, score it in one target forward, accept a path, keep exactly that path, learn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TypeVar

from foredraft.acceptance import RULES, Draws, Rule
from foredraft.backends.base import Backend, KVCache, Query
from foredraft.checks import is_integer, require
from foredraft.costs import Costs
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Generation, Request, Setup
from foredraft.proposers.base import Drafter, Verification
from foredraft.text import TextTokenizer
from foredraft.types import Draft, Event

MOST_DRAFT_TOKENS = 64
Key = TypeVar("Key", bound=Hashable)


class Engine:
    """Speculative decoding of any number of requests over one target.

    Args:
        backend: The target.
        drafter: What drafts; `None` is plain decoding, the same loop with empty drafts.
        tokenizer: For text and stop strings; without it the events carry no text.
        stop_tokens: Ids that end an answer.
        draft_tokens: Most nodes of a draft, in [0, 64]; 0 is plain decoding, `None` what suits the drafter.
        rule: Name of the acceptance rule; `None` takes the one that fits each request.
        costs: What the target's forwards cost, as measured: to be refined by every round, and compared with. `None`
            takes those by which the drafter decides, if it does.

    Raises:
        InvalidInputError: An argument is out of range.
        UnsupportedError: The drafter does not fit the rule or the backend; the message says what does.
    """

    def __init__(
        self,
        backend: Backend,
        drafter: Drafter | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        stop_tokens: Collection[int] = (),
        draft_tokens: int | None = None,
        rule: str | None = None,
        costs: Costs | None = None,
    ) -> None:
        if draft_tokens is None:
            draft_tokens = drafter.draft_tokens if drafter is not None else 0
        good = is_integer(draft_tokens) and 0 <= draft_tokens <= MOST_DRAFT_TOKENS
        require("draft_tokens", draft_tokens, good, f"an integer in [0, {MOST_DRAFT_TOKENS}]")
        if rule is not None and rule not in RULES:
            raise InvalidInputError(f"There is no acceptance rule '{rule}'; known: {', '.join(RULES)}.")
        if drafter is not None:
            chosen = RULES[rule] if rule is not None else None
            drafter.fit(trees=backend.capabilities.trees and (chosen is None or chosen.trees), rule=chosen)
            _refuse_misfits(drafter, backend, chosen)
        self.setup = Setup(
            backend=backend,
            drafter=drafter if draft_tokens else None,
            tokenizer=tokenizer,
            stop_tokens=stop_tokens,
            draft_tokens=draft_tokens,
            rule=RULES[rule] if rule is not None else None,
            costs=costs if costs is not None or drafter is None else drafter.costs,
        )

    def run(self, requests: Sequence[Request], at_once: int | None = None) -> Iterator[tuple[int, Event]]:
        """Events of all requests, each with the index of its request, until every one has ended.

        Args:
            requests: Prompts and how to continue them.
            at_once: Most of them in one forward; the next joins when one has ended. `None` runs all together.

        Raises:
            InvalidInputError: A request is not right; all are checked before the first one starts.
        """
        good = at_once is None or (is_integer(at_once) and at_once >= 1)
        require("at_once", at_once, good, "an integer >= 1, or None for all")
        waiting = deque(enumerate([Generation(request, self.setup) for request in requests]))
        places = at_once or len(waiting)
        running: dict[int, Generation] = {}
        try:
            with self.setup.backend.running():
                while waiting or running:
                    while waiting and len(running) < places:
                        index, generation = waiting.popleft()
                        generation.start()
                        running[index] = generation
                    yield from play_round(running)
                    running = {index: g for index, g in running.items() if g.finish_reason is None}
        finally:
            for generation in (*running.values(), *(generation for _, generation in waiting)):
                generation.close()


def play_round(
    running: Mapping[Key, Generation],
    most: int | None = None,
    guard: Callable[[Key], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Iterator[tuple[Key, Event]]:
    """One round of every running request. This is speculative decoding.

    Args:
        running: Requests over one backend; each may have a drafter and a rule of its own.
        most: Drafted nodes of the forward, of all requests together; `None` is no limit.
        guard: What is around each step that concerns one request alone. Whose step it lets fail is left out.

    Yields:
        The events of each request, with its key.
    """
    drafts: dict[Key, Draft] = {}
    for key, g in running.items():
        with guard(key):
            drafts[key] = g.propose(most, len(running))
    selected, drafts = _select(drafts, running, most), {}
    for key, draft in selected.items():
        with guard(key):
            running[key].verifying(draft)
            drafts[key] = draft

    started = perf_counter()
    queries = [Query(running[key].cache, running[key].tokens[-1], draft) for key, draft in drafts.items()]
    scored = _backend(running).forward(queries) if queries else []
    verify_seconds = perf_counter() - started
    _note(running, queries, verify_seconds)

    for (key, draft), query, logits in zip(drafts.items(), queries, scored, strict=True):
        with guard(key):
            g, started = running[key], perf_counter()
            p = g.score(draft, logits)
            verdict = g.rule.decide(draft, p, g.source.at(len(g.tokens)))
            verdict, events = g.emit(verdict)
            g.setup.backend.commit(g.cache, verdict.path[: len(verdict.tokens) - 1])  # the last is the next root
            accept_seconds = perf_counter() - started
            verification = Verification(draft, logits, query.root, accept_seconds)
            events += g.close_round(verification, verdict, verify_seconds, len(queries))
            yield from ((key, event) for event in events)


def _select(drafts: dict[Key, Draft], running: Mapping[Key, Generation], most: int | None) -> dict[Key, Draft]:
    """What is worth verifying, for all requests together: one forward serves them all."""
    drafters = {id(g.setup.drafter): g.setup.drafter for g in running.values() if g.setup.drafter is not None}
    for drafter in drafters.values():
        own = [key for key in drafts if running[key].setup.drafter is drafter]
        if own:
            others = [draft for key, draft in drafts.items() if running[key].setup.drafter is not drafter]
            context = _context([running[key].cache for key in own])
            selected = drafter.select([drafts[key] for key in own], context, others, most)
            drafts = {**drafts, **dict(zip(own, selected, strict=True))}
    return drafts


def _backend(running: Mapping[Key, Generation]) -> Backend:
    return next(iter(running.values())).setup.backend


def _note(running: Mapping[Key, Generation], queries: list[Query], seconds: float) -> None:
    """Refine the measured costs by this forward."""
    costs = next((g.setup.costs for g in running.values() if g.setup.costs is not None), None)
    if costs is not None and queries:
        rows = sum(len(query.draft) + 1 for query in queries)
        costs.note(rows, _context([query.cache for query in queries]), seconds, len(queries))


def _context(caches: Collection[KVCache]) -> int:
    """Tokens that are cached, of each sequence on average."""
    return sum(cache.length for cache in caches) // len(caches)


def _refuse_misfits(drafter: Drafter, backend: Backend, rule: Rule | None) -> None:
    if drafter.trees and not backend.capabilities.trees:
        raise UnsupportedError(
            f"Drafter '{drafter.name}' drafts trees, which backend '{backend.name}' cannot verify. "
            "Use a drafter of chains, such as 'ngram' or 'draft:REF'."
        )
    if rule is None or rule.greedy:
        return
    if (drafter.trees and not rule.trees) or drafter.draws > rule.draws:
        kind = ("trees" if drafter.trees else "chains") + ("" if drafter.draws is Draws.POINT else " of drawn tokens")
        fit = [r.name for r in RULES.values() if not r.lossy and r.draws >= drafter.draws and r.trees >= drafter.trees]
        raise UnsupportedError(
            f"Drafter '{drafter.name}' drafts {kind}, which rule '{rule.name}' does not accept. Use {' or '.join(fit)}."
        )
