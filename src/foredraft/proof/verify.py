"""The whole proof for one model, drafter and rule: enumerated laws, equality on real text, a sampled test."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import groupby
from typing import Any

from foredraft.acceptance import RULES, Rule
from foredraft.api import Model
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.models import ModelFiles, Notify, sha256_of
from foredraft.proof.audit import Equality, audit, sampled
from foredraft.proof.controls import CONTROLS, Control, stale_cache
from foredraft.proof.enumeration import Decide, Propose, ancestral_law, joint_law, total_variation
from foredraft.proof.statistics import FALSE_FAILURE, GTest
from foredraft.proof.toys import Case, cases_for, drawn_tree, toy_model
from foredraft.proposers.ssd import Ssd
from foredraft.types import SamplingParams

EXACT = 1e-9
"""Total variation that float64's rounding explains."""
_TOYS = 4  # for a wrong way of drawing: on a single toy it may be without effect

PROMPTS = (
    "List the months of the year, then list them again in reverse order.",
    "Write a short Python function that adds two numbers, then the same function with type hints.",
    "Explain in two sentences what a rainbow is.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Translate to French: good morning, good evening, good night.",
    "What is 12 times 12? Show each step.",
)


@dataclass(frozen=True)
class Enumerated:
    """Every branch of a rule on one kind of draft: the worst distance from the target's law over all toy cases."""

    rule: str
    kind: str
    cases: int
    total_variation: float

    @property
    def passed(self) -> bool:
        """Whether the law is exact."""
        return self.total_variation < EXACT


@dataclass(frozen=True)
class Certificate:
    """What was checked, on what, and how it came out."""

    created: str
    model: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, Any]
    control: str | None
    enumerated: tuple[Enumerated, ...]
    equality: tuple[Equality, ...]
    sampled: GTest | None
    server: dict[str, Any] | None = None
    """Of a server that was checked: what it is, its speed and acceptance, and foredraft's on the same prompts."""

    @property
    def passed(self) -> bool:
        """No law off, no difference unexplained, no improbable counts."""
        laws = all(row.passed for row in self.enumerated)
        texts = not any(row.defects for row in self.equality)
        return laws and texts and (self.sampled is None or self.sampled.passed)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the conclusion included."""
        record = asdict(self)
        record["sampled"] = self.sampled._asdict() if self.sampled is not None else None
        record["false_failure"] = FALSE_FAILURE
        record["passed"] = self.passed
        return record


def verify(
    model: Model,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 48,
    samples: int = 300,
    control: str | None = None,
    notify: Notify = lambda _: None,
) -> Certificate:
    """Check that the model says with its drafter and rule what it says without.

    Args:
        model: As `load` made it, with the drafter and rule to check.
        prompts: Texts for the equality audit.
        max_tokens: Tokens to generate for each.
        samples: Answers to draw in the sampled test; 0 leaves it out.
        control: Name of a mistake to make on purpose (`CONTROLS`): the certificate must then fail.
        notify: Told what begins.

    Raises:
        InvalidInputError: Unknown control, one that needs a drafter, or nothing to check.
    """
    if control is not None and control not in CONTROLS:
        raise InvalidInputError(f"There is no negative control '{control}'; known: {', '.join(CONTROLS)}.")
    if not prompts:
        raise InvalidInputError("There is no prompt to compare: give at least one.")
    if samples < 0:
        raise InvalidInputError(f"samples is {samples}, but must be an integer >= 0.")
    mistake = CONTROLS[control] if control is not None else None
    if mistake is not None and mistake.breaks_the_cache and model.engine.setup.drafter is None:
        raise InvalidInputError(f"Control '{control}' shows where drafts are rejected: it needs a drafter.")
    rule = model.engine.setup.rule_for(greedy=False)
    settings = _settings(rule, max_tokens)
    notify("Enumerating output laws")
    enumerated = tuple(_enumerate(rule, mistake))
    if mistake is None and isinstance(model.drafter, Ssd):
        enumerated += tuple(enumerate_ahead(rule))
    equality: tuple[Equality, ...] = ()
    outcome: GTest | None = None
    if mistake is None or mistake.breaks_the_cache:
        engine = model.engine if mistake is None else _with_stale_cache(model)
        ids = [model.encode(prompt) for prompt in prompts]
        equality = tuple(_audit(model, engine, ids, setting, notify) for setting in settings)
    if mistake is None and samples:
        notify(f"Drawing {samples} answers")
        outcome = sampled(model.engine, model.backend, model.encode("Say one word:"), samples)
    return Certificate(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=identity(model.files),
        versions=versions(),
        settings={
            "drafter": model.drafter.name if model.drafter is not None else "none",
            "rule": rule.name,
            "backend": model.backend.name,
            "machine": platform.machine(),
            "max_tokens": max_tokens,
            "prompts": list(prompts),
        },
        control=control,
        enumerated=enumerated,
        equality=equality,
        sampled=outcome,
    )


def _enumerate(rule: Rule, mistake: Control | None) -> Iterator[Enumerated]:
    if mistake is None:
        for each in dict.fromkeys((RULES["greedy"].name, rule.name)):
            yield from enumerate_rule(RULES[each])
    else:
        yield from enumerate_control(mistake)


def enumerate_ahead(rule: Rule) -> list[Enumerated]:
    """Two rounds, the second one drafted during the first: every branch of every course that the race may take."""
    if rule.name not in ("token", "block"):  # others are exact for the same reason; their trees have too many branches
        return []
    from foredraft.proof.ahead import ROUNDS, STEPS, distance

    rows = []
    for course in STEPS:
        distances = [distance(rule, toys, course) for toys in ROUNDS]
        rows.append(Enumerated(rule.name, f"drafted ahead, {course}", len(distances), max(distances)))
    return rows


def enumerate_rule(rule: Rule, decide: Decide | None = None) -> list[Enumerated]:
    """Every branch of the rule (or of `decide` in its place) on every kind of draft that the rule accepts."""
    rows = []
    for kind, group in groupby(sorted(cases_for(rule), key=lambda case: case.kind), key=lambda case: case.kind):
        distances = [_distance(decide or rule.decide, case.propose, case) for case in group]
        rows.append(Enumerated(rule.name, kind, len(distances), max(distances)))
    return rows


def enumerate_control(control: Control) -> list[Enumerated]:
    """The same with a mistake in the rule or in the drawing; nothing for a mistake that is elsewhere."""
    if control.rule is None:
        return []
    rule = RULES[control.rule]
    if control.children is None:
        return enumerate_rule(rule._replace(trees=False), control.decide)  # controls are written for chains
    distances = []
    for seed in range(0, 2 * _TOYS, 2):
        case = Case("", toy_model(4, seed), toy_model(4, seed + 1), control.widths, control.siblings)
        propose = drawn_tree(case.draft, control.widths, control.siblings, control.children)
        distances.append(_distance(rule.decide, propose, case))
    return [Enumerated(rule.name, control.mistake, len(distances), max(distances))]


def _distance(decide: Decide, propose: Propose, case: Case) -> float:
    length = len(case.widths) + 1
    law = joint_law(decide, propose, case.target, length)
    return total_variation(law, ancestral_law(case.target, length))


def _settings(rule: Rule, max_tokens: int) -> list[tuple[str, SamplingParams]]:
    """The settings whose output is a function of the prompt: greedy, and seeded sampling where the rule is keyed."""
    settings = [("greedy", SamplingParams(max_tokens=max_tokens))]
    if rule.keyed:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.95, repetition_penalty=1.1, seed=1)
        settings.append(("temperature 0.7, top-p 0.95, repetition penalty 1.1, seed 1", sampling))
    return settings


def _with_stale_cache(model: Model) -> Engine:
    setup = model.engine.setup
    stale = stale_cache(model.backend)
    rule = setup.rule.name if setup.rule is not None else None
    return Model(stale, model.tokenizer, model.drafter, draft_tokens=setup.draft_tokens, rule=rule).engine


def _audit(
    model: Model, engine: Engine, ids: Sequence[Sequence[int]], setting: tuple[str, SamplingParams], notify: Notify
) -> Equality:
    name, params = setting
    notify(f"Comparing with plain decoding: {name}")
    return audit(model.plain().engine, engine, model.backend, ids, params, name)


def versions() -> dict[str, str]:
    """Those that a certificate names."""
    packages = {package: version(package) for package in ("foredraft", "torch", "transformers")}
    return {"python": platform.python_version(), **packages}


def identity(files: ModelFiles | None) -> dict[str, str]:
    """What the user called the model, and sha256 over its weights' files."""
    if files is None:
        return {"reference": "a model in memory", "sha256": "not a file"}
    return {"reference": files.reference, "sha256": sha256_of(files.weights)}
