"""The ways of drafting that a server has ready, and which of them a request gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foredraft.acceptance import RULES
from foredraft.api import Model
from foredraft.checks import is_integer, require
from foredraft.costs import Costs
from foredraft.engine import MOST_DRAFT_TOKENS, Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Setup
from foredraft.heads.files import bundled_heads
from foredraft.loading import Loader, check_memory, parse_drafter, stop_tokens
from foredraft.models import BUNDLED, ModelFiles, is_bundled
from foredraft.proposers.base import Drafter

PLAIN = "none"
NEED_NOTHING = (PLAIN, "auto", "ngram", "suffix", "recycling", "hybrid:suffix+recycling")
"""What every target can be drafted for with."""
_OFFERED = tuple(rule.name for rule in RULES.values() if not rule.lossy and not rule.greedy)


class Methods:
    """A loaded target, its drafters by name, and the engine settings of each with each rule.

    Drafters that learn are shared by all requests that ask for the same drafter and rule. Those of the default rule are
    loaded at once, those of other rules when they are first asked for.

    Args:
        loader: Loads the target and what drafts for it.
        reference: The target.
        default: Drafter of requests that do not say.
        others: Those that requests may ask for; `None` takes what needs nothing, and a head that comes with the target.
        rule: Rule of requests that do not say; `None` takes the one that fits.
        memory: Folder of what the default drafter learned in earlier runs.
        draft_tokens: Most nodes of the default drafter's drafts; `None` takes what suits it.

    Raises:
        ForedraftError: As `foredraft.load` does; a drafter that does not fit the target is told by name.
    """

    def __init__(
        self,
        loader: Loader,
        reference: str,
        *,
        default: str = "auto",
        others: Sequence[str] | None = None,
        rule: str | None = None,
        memory: Path | None = None,
        draft_tokens: int | None = None,
    ) -> None:
        self._draft_tokens = draft_tokens
        for name in (default, *(others or ())):
            parse_drafter(name)  # a wrong name is told before anything is loaded
        self._memory = check_memory(memory, parse_drafter(default)) if memory is not None else None
        self._loader = loader
        self.rule = self._known_rule(rule)
        target, tokenizer, files = loader.model(reference)
        self.model = Model(target, tokenizer, None, files=files)
        self.default = default
        if others is None:
            others = [*NEED_NOTHING, *(["eagle3"] if _has_head(files) else [])]
        self.drafters = tuple(dict.fromkeys((default, PLAIN, *others)))
        self.rules = _OFFERED
        self.costs: Costs = loader.costs(target, files)
        self._setups: dict[tuple[str, str | None], Setup] = {}
        self.renew()

    def renew(self) -> None:
        """Load all drafters anew: after a crash nobody knows what state they are in."""
        self._setups = {}
        for name in self.drafters:
            self._setup(name, self.rule)

    def setup(
        self,
        drafter: str | None = None,
        rule: str | None = None,
        draft_tokens: int | None = None,
        *,
        seeded: bool = False,
    ) -> Setup:
        """What a request runs with.

        Args:
            drafter: One of `drafters`; `None` takes the default.
            rule: One of `rules`; `None` takes the server's, or the one that fits.
            draft_tokens: Most nodes of a draft, 0 for plain decoding; `None` takes what suits the drafter.
            seeded: Whether the request has a seed of its own. Then its text must not depend on what else is in the
                batch, and where the rule is open it gets one that is exact for the seed.

        Raises:
            InvalidInputError: There is no such drafter or rule here, or too many nodes.
            UnsupportedError: Rule and drafter do not fit.
        """
        name = self.default if drafter is None else drafter
        if name not in self.drafters:
            known = ", ".join(self.drafters)
            raise InvalidInputError(f"This server has no drafter '{name}'; it has {known}.", field="drafter")
        chosen = self.rule if rule is None else self._known_rule(rule)
        good = draft_tokens is None or (is_integer(draft_tokens) and 0 <= draft_tokens <= MOST_DRAFT_TOKENS)
        require("draft_tokens", draft_tokens, good, f"an integer in [0, {MOST_DRAFT_TOKENS}]")
        setup = self._setup(name, chosen)
        if seeded and chosen is None and not setup.rule_for(greedy=False).keyed:
            setup = self._setup(name, "seed-exact")
        if draft_tokens == 0:
            return replace(setup, drafter=None, draft_tokens=0)
        if draft_tokens is not None and setup.drafter is not None:
            return replace(setup, draft_tokens=draft_tokens)
        return setup

    def save_memory(self) -> None:
        """Keep what the default drafter learned, if there is a memory."""
        drafter = self._setup(self.default, self.rule).drafter
        if self._memory is not None and drafter is not None:
            drafter.save(self._memory)

    def _setup(self, name: str, rule: str | None) -> Setup:
        if (name, rule) not in self._setups:
            target, tokenizer = self.model.backend, self.model.tokenizer
            ends = stop_tokens(target, tokenizer)
            drafter = self._drafter(name, rule)
            nodes = self._draft_tokens if name == self.default else None
            engine = Engine(
                target,
                drafter,
                tokenizer=tokenizer,
                stop_tokens=ends,
                draft_tokens=nodes,
                rule=rule,
                costs=self.costs,
            )
            self._setups[name, rule] = engine.setup
        return self._setups[name, rule]

    def _drafter(self, name: str, rule: str | None) -> Drafter | None:
        drafter = self._loader.drafter(parse_drafter(name), self.model.backend, self.model.tokenizer, self.model.files)
        if self._memory is not None and drafter is not None and (name, rule) == (self.default, self.rule):
            drafter.load(self._memory)
        return drafter

    def _known_rule(self, rule: str | None) -> str | None:
        if rule is None or rule in _OFFERED:
            return rule
        known = ", ".join(_OFFERED)
        why = "changes the text, which this server does not do" if rule in RULES and RULES[rule].lossy else "is unknown"
        if rule in RULES and RULES[rule].greedy:
            why = "is taken by itself at temperature 0"
        raise InvalidInputError(f"Rule '{rule}' {why}: leave it out, or take one of {known}.", field="rule")


def _has_head(files: ModelFiles) -> bool:
    """Whether an EAGLE-3 head comes with the package for this target."""
    return any(is_bundled(files, BUNDLED[name]) for name in bundled_heads("eagle3") if name in BUNDLED)
