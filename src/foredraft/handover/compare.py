"""A server's greedy answers against plain decoding here, and its figures against what foredraft has."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from foredraft.api import Model
from foredraft.bench.peers.base import PeerError, PeerOptions, PeerRequest
from foredraft.bench.peers.url import UNKNOWN, Known, UrlPeer
from foredraft.bench.records import Turn
from foredraft.errors import InvalidInputError
from foredraft.models import Notify
from foredraft.proof.audit import Difference, Equality, explain
from foredraft.proof.verify import PROMPTS, Certificate, identity, versions
from foredraft.types import SamplingParams

_CANDIDATES = 5  # log-probabilities that a server is asked for


@dataclass(frozen=True)
class _Sums:
    """Of all answers of one side."""

    tokens: int = 0
    seconds: float = 0.0
    later_tokens: int = 0
    later_seconds: float = 0.0
    drafted: int | None = 0
    accepted: int | None = 0
    forwards: int | None = 0

    def plus(self, turn: Turn) -> _Sums:
        """With one answer more; what an answer does not tell, the sum does not."""
        return _Sums(
            self.tokens + turn.tokens,
            self.seconds + turn.seconds,
            self.later_tokens + turn.tokens - 1,
            self.later_seconds + turn.seconds - turn.ttft,
            _sum(self.drafted, turn.drafted),
            _sum(self.accepted, turn.accepted),
            _sum(self.forwards, turn.target_forwards),
        )

    def figures(self) -> dict[str, float | None]:
        """By name; `None` is not known."""
        return {
            "tokens": self.tokens,
            "tokens/s": self.tokens / self.seconds if self.seconds else None,
            "TPOT, ms": 1e3 * self.later_seconds / self.later_tokens if self.later_tokens else None,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance rate": self.accepted / self.drafted if self.drafted and self.accepted is not None else None,
            "mean accepted length": self.tokens / self.forwards if self.forwards else None,
        }


def verify_served(
    model: Model,
    url: str,
    *,
    drafting: Model | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 48,
    api_key: str | None = None,
    notify: Notify = lambda _: None,
) -> Certificate:
    """Ask a server the prompts' token ids one by one, greedily, and compare each answer with plain decoding here.

    A difference is a near-tie if the two tokens' scores differ by less than they drift with the shape of a forward, or
    by less than the server's own scores, asked for that token alone, are off from ours. Else it is a defect.

    Args:
        model: The same weights as the server's.
        url: Of its API, such as `http://localhost:8000/v1`.
        drafting: The same model with a drafter: its acceptance is the prediction.
        prompts: Texts.
        max_tokens: Of each answer.
        api_key: For the server.
        notify: Told what begins.

    Raises:
        PeerError: It cannot be reached, or does not answer as OpenAI's API has it.
        InvalidInputError: There is no prompt.
    """
    if not prompts:
        raise InvalidInputError("There is no prompt to compare: give at least one.")
    peer = UrlPeer(PeerOptions(api_key=api_key), model.tokenizer)
    params = SamplingParams(max_tokens=max_tokens)
    plain, there, here, predicted = model.plain(), _Sums(), _Sums(), _Sums()
    differences, answers = [], []
    for number, prompt in enumerate(prompts):
        notify(f"Comparing answers: prompt {number + 1} of {len(prompts)}")
        ids = model.encode(prompt)
        turn = peer.answer(PeerRequest(tuple(ids), (), url, None, max_tokens, 0.0, 0))
        answers.append(list(turn.ids))
        expected = plain.generate(ids, params)
        there, here = there.plus(turn), here.plus(Turn.of(len(ids), expected))
        if drafting is not None:
            predicted = predicted.plus(Turn.of(len(ids), drafting.generate(ids, params)))
        if turn.ids != expected.ids:
            found = explain(model.backend, number, ids, expected.ids, turn.ids, params)
            differences.append(_settled(found, peer.known(url), ids, expected.ids))
    kind = peer.conditions().get(url, "unknown server")
    setting = "greedy, the server against plain decoding here"
    return Certificate(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=identity(model.files),
        versions=versions(),
        settings={
            "drafter": drafting.drafter.name if drafting is not None and drafting.drafter is not None else "none",
            "rule": "greedy",
            "backend": model.backend.name,
            "machine": platform.machine(),
            "max_tokens": max_tokens,
            "prompts": list(prompts),
        },
        control=None,
        enumerated=(),
        equality=(Equality(setting, len(prompts), here.tokens, tuple(differences)),),
        sampled=None,
        server={
            **_told(url, kind, there, here, predicted if drafting is not None else None),
            "answers": answers,
        },
    )


def _sum(total: int | None, count: int | None) -> int | None:
    return total + count if total is not None and count is not None else None


def _settled(found: Difference, known: Known, prompt: Sequence[int], plain: Sequence[int]) -> Difference:
    """A difference that our own drift does not explain, in the light of the server's scores at that place.

    The server is asked for one token after the same beginning, so that nothing is drafted. If it then prefers the token
    that it wrote, or holds the two closer to each other than its scores are off from ours, its arithmetic is the cause.
    """
    if found.verdict == "near-tie" or UNKNOWN in (found.plain_token, found.other_token) or found.plain_token < 0:
        return found
    told = _scores(known, [*prompt, *plain[: found.position]])
    ours, theirs = found.plain_candidates, {token: told.get(token) for token in (found.plain_token, found.other_token)}
    a, b = theirs[found.plain_token], theirs[found.other_token]
    if a is None or b is None:
        return found
    off = max(abs(score - ours[token]) for token, score in theirs.items() if score is not None and token in ours)
    close = abs(a - b) <= 2 * off and found.gap <= 2 * off
    return replace(found, drift=max(found.drift, off), verdict="near-tie") if close else found


def _scores(known: Known, ids: Sequence[int]) -> dict[int, float]:
    """A server's log-probabilities of the likeliest next tokens, by id; nothing where it does not tell ids."""
    body = {
        "model": known.model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": _CANDIDATES,
        "return_tokens_as_token_ids": True,
        "stream": True,
    }
    found: dict[int, float] = {}
    try:
        for event in known.server.stream(f"{known.server.base}/completions", body, 60.0):
            for choice in event.get("choices") or ():
                for table in (choice.get("logprobs") or {}).get("top_logprobs") or ():
                    for name, score in (table or {}).items():
                        token = str(name).removeprefix("token_id:")
                        if token.isdecimal() and token != name:
                            found[int(token)] = float(score)
    except (PeerError, TypeError, ValueError, AttributeError):
        return {}
    return found


def _told(url: str, kind: str, there: _Sums, plain: _Sums, predicted: _Sums | None) -> dict[str, Any]:
    """Figures of both sides, and the lines that people are shown: acceptance beside the prediction, and speed."""
    figures = {"there": there.figures(), "plain": plain.figures()}
    if predicted is not None:
        figures["predicted"] = predicted.figures()
    rows = [{"name": "server", "there": kind, "here": "plain decoding" if predicted is None else "with the drafter"}]
    for name, value in figures["there"].items():
        ours = figures.get("predicted", figures["plain"])[name]
        rows.append({"name": name, "there": _shown(value), "here": _shown(ours)})
    if predicted is not None:
        rows.append({"name": "plain tokens/s", "there": "–", "here": _shown(figures["plain"]["tokens/s"])})
    return {"url": url, "kind": kind, "figures": figures, "rows": rows}


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
