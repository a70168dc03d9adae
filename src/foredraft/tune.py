"""What `foredraft tune` finds out: the costs of forwards here, and which cheap drafter pays for them on a few texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from foredraft.api import Model
from foredraft.calibration import calibrate, key_of
from foredraft.costs import Costs
from foredraft.loading import Loader, parse_drafter
from foredraft.models import Notify
from foredraft.proposers.base import Drafter
from foredraft.types import FinishEvent, RoundEvent, SamplingParams
from foredraft.watched import Round, Watched

CANDIDATES = ("ngram", "suffix", "recycling", "hybrid:suffix+recycling")
PROMPTS = (
    "What should I look at when I buy a used bicycle?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write this text again with British spelling, and change nothing else: The gray harbor was calm. Nobody on the "
    "harbor wall had a favorite color, but the theater in the center of town was gray as well, like the harbor.",
    "Rename `total` to `sum_of_items` and show the whole function again:\n\ndef price(items, tax):\n    total = 0\n"
    "    for item in items:\n        total += item.price * item.count\n    total *= 1 + tax\n    return total",
    "Solve step by step: a train of 12 cars has 48 seats in each car, and 511 seats are taken. How many are free?",
    "List the months of the year with the number of days of each.",
)
_WIDE, _WIDE_COSTS = 16, 2.0  # draft tokens to try where as many and the root cost no more plain steps than that


@dataclass(frozen=True)
class Trial:
    """How a drafter did on the texts, against plain decoding in the same run, and how it should do at its best."""

    drafter: str
    draft_tokens: int
    """Most nodes of a draft."""
    rounds: int
    tokens: int
    drafted: int
    accepted: int
    draft_ms: float
    """Of a draft and of learning from its verification, on average."""
    speedup: float
    """Measured: seconds of plain decoding for a token over its own, prefill left out."""
    best_draft_tokens: int
    """With so many it should be fastest, by what was accepted and what forwards cost."""
    expected: float
    """Its speedup then."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of the drafted tokens; `None` if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float:
        """Tokens for each target forward."""
        return self.tokens / self.rounds


@dataclass(frozen=True)
class Tuning:
    """All that was found out. `context` is the measured one that is nearest to the texts'."""

    costs: Costs
    context: int
    plain_tokens_per_second: float
    trials: list[Trial]
    confirmed: Trial | None
    """The best trial again, with its best number of draft tokens; `None` if none should pay."""

    @property
    def best(self) -> Trial | None:
        """The trial that should be fastest at its best."""
        return max(self.trials, key=lambda trial: trial.expected, default=None)

    @property
    def pays(self) -> bool:
        """Whether a drafter is to be recommended: it should pay, and did when it was tried again."""
        return self.confirmed is not None and self.confirmed.speedup > 1

    @property
    def recommendation(self) -> str:
        """What to do, with figures, in a sentence or two."""
        best, again = self.best, self.confirmed
        if best is None:
            return "No drafter was tried."
        setting = f"{best.drafter} with {best.best_draft_tokens} draft token{'s' * (best.best_draft_tokens != 1)}"
        if again is None:
            return f"None of these pays here: the best, {setting}, would run at {best.expected:.2f}x of plain decoding."
        figures = f"{best.expected:.2f}x of plain decoding by its costs, {again.speedup:.2f}x when timed"
        if again.speedup <= 1:
            return f"None of these surely pays here: the best, {setting}, runs at {figures}."
        rate = again.acceptance_rate or 0.0
        accepted = f"{rate:.0%} of its tokens are accepted, {again.mean_accepted_length:.2f} tokens come of a forward"
        return f"Use {setting}: {figures} ({accepted})."

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        best, curve = self.best, self.costs.curve
        pays = best is not None and self.pays
        return {
            "context": self.context,
            "curve": [
                {
                    "rows": n,
                    "ms": 1e3 * curve.seconds(n, self.context),
                    "v": curve.v(n, self.context),
                    "break_even": curve.break_even(n, self.context) if n > 1 else None,
                }
                for n in curve.rows
            ],
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "drafters": [_trial_dict(trial) for trial in self.trials],
            "confirmed": _trial_dict(self.confirmed) if self.confirmed is not None else None,
            "recommendation": {
                "drafter": best.drafter if best is not None and pays else "none",
                "draft_tokens": best.best_draft_tokens if best is not None and pays else 0,
                "sentence": self.recommendation,
            },
            "costs": self.costs.to_json(),
        }


def tune(
    model: Model,
    *,
    prompts: Sequence[str] = PROMPTS,
    params: SamplingParams | None = None,
    seconds: float = 20.0,
    notify: Notify = lambda _: None,
) -> Tuning:
    """Measure forwards, then let every cheap drafter and plain decoding answer the prompts in turn.

    A drafter gets each prompt once, so none has an answer to copy from. Their rounds refine the costs.

    Args:
        model: What to tune; its own drafter plays no part.
        prompts: Texts like those it is for.
        params: Of each answer; the default is up to 64 tokens, greedily.
        seconds: For timing forwards.
        notify: Told what is going on.

    Raises:
        InvalidInputError: A prompt is empty or too long.
    """
    ids = [model.encode(prompt) for prompt in prompts]  # what is wrong with one is told before anything is measured
    costs = calibrate(model.backend, seconds=seconds, notify=notify)
    if model.files is not None:
        costs = replace(costs, about=key_of(model.backend, model.files))
    race = _Race(model, costs, ids, params or SamplingParams(max_tokens=64), notify)
    names = [name for name in CANDIDATES if _fits(model, name)]
    nodes = _WIDE if costs.curve.v(1 + _WIDE, race.context) <= _WIDE_COSTS else None
    trials = race.run(dict.fromkeys(names, nodes), "Trying the drafters")
    for trial in trials:
        costs.acceptance[trial.drafter] = trial.acceptance_rate or 0.0
    best = max(trials, key=lambda trial: trial.expected, default=None)
    confirmed = None
    if best is not None and best.expected > 1:
        confirmed = race.run({best.drafter: best.best_draft_tokens}, f"Timing {best.drafter} at its best")[0]
    nearest = min(costs.curve.contexts, key=lambda context: abs(context - race.context))
    return Tuning(costs, nearest, race.plain_tokens_per_second, trials, confirmed)


class _Run(NamedTuple):
    """An answer: its tokens, their seconds without the prefill, and those of each round's accepting."""

    tokens: int
    seconds: float
    accepting: list[float]


class _Race:
    """Plain decoding and drafters, prompt by prompt in turn, so that the machine's moods fall on all alike."""

    def __init__(
        self, model: Model, costs: Costs, prompts: list[list[int]], params: SamplingParams, notify: Notify
    ) -> None:
        self._model, self._costs, self._prompts, self._params = model, costs, prompts, params
        self._notify = notify
        self.context = round(fmean(map(len, prompts))) + params.max_tokens // 2
        self.plain_tokens_per_second = 0.0

    def run(self, nodes: dict[str, int | None], what: str) -> list[Trial]:
        """A trial of each drafter with at most so many nodes a draft; `None` is what suits the drafter."""
        watched = {name: Watched(_drafter(self._model, name)) for name in nodes}
        models = {name: self._with(drafter, nodes[name]) for name, drafter in watched.items()}
        for name in nodes:  # what must be compiled is compiled; a drafter that learns is not the one that is timed
            other = self._with(_drafter(self._model, name), nodes[name])
            _answer(other, self._prompts[0], SamplingParams(max_tokens=4))
        everyone = [("", self._model.plain()), *models.items()]
        runs: dict[str, list[_Run]] = {name: [] for name, _ in everyone}
        for turn, prompt in enumerate(self._prompts):
            self._notify(f"{what}: text {turn + 1} of {len(self._prompts)}")
            first = turn % len(everyone)
            for name, contender in everyone[first:] + everyone[:first]:
                runs[name].append(_answer(contender, prompt, self._params, self._costs))
        plain = runs.pop("")
        self.plain_tokens_per_second = 1 / _per_token(plain)
        return [self._trial(watched[name], models[name], plain, runs[name]) for name in nodes]

    def _with(self, drafter: Drafter, nodes: int | None) -> Model:
        return Model(self._model.backend, self._model.tokenizer, drafter, draft_tokens=nodes)

    def _trial(self, drafter: Watched, model: Model, plain: list[_Run], runs: list[_Run]) -> Trial:
        name, rounds, most = drafter.name, drafter.rounds, model.engine.setup.draft_tokens
        for r in rounds:
            self._costs.note_draft(name, r.nodes, r.seconds)
        accepting = median(_accepting(runs)), median(_accepting(plain))
        expected = {k: speedup_with(k, rounds, self._costs, name, accepting) for k in range(1, most + 1)}
        best = max(expected, key=lambda k: expected[k])
        return Trial(
            drafter=name,
            draft_tokens=most,
            rounds=len(rounds),
            tokens=sum(run.tokens for run in runs),
            drafted=sum(r.nodes for r in rounds),
            accepted=sum(len(r.ranks) for r in rounds),
            draft_ms=1e3 * self._costs.draft_seconds(name),
            speedup=_per_token(plain) / _per_token(runs),
            best_draft_tokens=best,
            expected=expected[best],
        )


def speedup_with(most: int, rounds: Sequence[Round], costs: Costs, name: str, accepting: tuple[float, float]) -> float:
    """What a drafter's rounds would have gained if each had verified only the likeliest `most` of its nodes.

    Args:
        most: Nodes of a draft.
        rounds: The rounds as they were; those after a smaller draft are taken to be alike.
        costs: Of forwards, and of this drafter's drafts.
        name: The drafter's.
        accepting: Seconds of what is neither forward nor draft, in its rounds and in those of plain decoding.

    Returns:
        Tokens a second over those of plain decoding.
    """
    tokens, seconds, plain = 0, 0.0, 0.0
    for r in rounds:
        nodes = min(r.nodes, most)
        forwards = costs.curve.all_seconds(1 + nodes, r.context)
        tokens += 1 + sum(rank < most for rank in r.ranks)
        seconds += float(forwards[nodes]) + costs.draft_seconds(name, nodes) + accepting[0]
        plain += float(forwards[0]) + accepting[1]
    return plain / len(rounds) * tokens / seconds


def _drafter(model: Model, name: str) -> Drafter:
    drafter = Loader().drafter(parse_drafter(name), model.backend, model.tokenizer, model.files)
    assert drafter is not None
    return drafter


def _fits(model: Model, name: str) -> bool:
    return model.backend.capabilities.trees or not _drafter(model, name).trees


def _answer(model: Model, prompt: list[int], params: SamplingParams, costs: Costs | None = None) -> _Run:
    """One answer; its forwards refine the costs."""
    cached, first = len(prompt) - 1, 0.0
    accepting: list[float] = []
    for event in model.stream(prompt, params):
        if isinstance(event, RoundEvent):
            r = event.stats
            if not accepting:
                first = r.draft_seconds + r.verify_seconds + r.accept_seconds
            if costs is not None:
                costs.note(1 + r.drafted, cached, r.verify_seconds)
            cached += r.emitted
            accepting.append(r.accept_seconds)
        elif isinstance(event, FinishEvent):
            stats = event.completion.stats
            return _Run(stats.tokens, stats.seconds - stats.ttft_ms / 1e3 + first, accepting)
    raise AssertionError("the engine ended without a completion")


def _per_token(runs: Iterable[_Run]) -> float:
    runs = list(runs)
    return sum(run.seconds for run in runs) / sum(run.tokens for run in runs)


def _accepting(runs: Iterable[_Run]) -> list[float]:
    return [seconds for run in runs for seconds in run.accepting]


def _trial_dict(trial: Trial) -> dict[str, Any]:
    figures = {"acceptance_rate": trial.acceptance_rate, "mean_accepted_length": trial.mean_accepted_length}
    return {**vars(trial), **figures}
