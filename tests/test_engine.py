"""The loop: an answer ends at one place in text, ids, counts and origins, and nothing depends on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foredraft.backends.base import Capabilities
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import MOST_DRAFT_TOKENS, Engine
from foredraft.errors import ForedraftError, InvalidInputError, UnsupportedError
from foredraft.generation import Request
from foredraft.proposers.base import Proposer, Verification
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Completion, Event, FinishEvent, RoundEvent, SamplingParams, TokenEvent, Verdict
from tiny import (
    DRAFTER_MAKERS,
    VOCABULARY,
    CountingBackend,
    Oracle,
    collect,
    complete,
    drafter_over,
    generate,
    rounds_of,
    tiny_llama,
    tokens_of,
)

PROMPT = [1, 2, 3]
DRAFTER_NAMES = ["none", *DRAFTER_MAKERS]
DRAFTS_DIFFER = ("suffix", "recycling", *(name for name in DRAFTER_NAMES if name.startswith(("auto", "ssd:"))))
"""Drafts, though not text, depend on what came before, or on the clock."""


def greedy(max_tokens: int = 40, **other: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **other)


def sampled(seed: int | None = 0, max_tokens: int = 30) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)


def run_one(engine: Engine, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> tuple[list[Event], Completion]:
    events = collect(engine, Request(prompt, params))[0]
    end = events[-1]
    assert isinstance(end, FinishEvent)
    return events, end.completion


def assert_consistent(events: list[Event], completion: Completion) -> None:
    """Everything that is told twice is told alike."""
    tokens, rounds = tokens_of(events), rounds_of(events)
    stats = completion.stats
    assert [event.token for event in tokens] == list(completion.ids)
    assert [event.origin for event in tokens] == list(completion.origins)
    pieces = [event.text for event in events if isinstance(event, TokenEvent | FinishEvent)]
    assert "".join(pieces) == completion.text
    assert stats.tokens == len(completion.ids) == sum(event.stats.emitted for event in rounds)
    assert stats.accepted == completion.origins.count("draft") == sum(event.stats.accepted for event in rounds)
    assert stats.drafted == sum(event.stats.drafted for event in rounds)
    assert stats.target_forwards == len(rounds)
    assert stats.mean_accepted_length == stats.tokens / stats.target_forwards
    assert stats.acceptance_rate == (stats.accepted / stats.drafted if stats.drafted else None)
    emitted = 0
    for event in events:  # the tokens of a round come before its figures
        if isinstance(event, TokenEvent):
            emitted += 1
        elif isinstance(event, RoundEvent):
            assert event.stats.emitted == emitted > 0
            emitted = 0


# Where an answer ends


@pytest.fixture(scope="module")
def plain_text(text_target: TransformersBackend, tokenizer: Any) -> Completion:
    """Forty greedy tokens, many of them invalid or part of a character."""
    return generate(Engine(text_target, tokenizer=tokenizer), PROMPT, greedy())


def oracle_engine(backend: TransformersBackend, known: Sequence[int], **other: Any) -> Engine:
    """Every token but each eighth is an accepted draft: whatever ends the answer does so inside an accepted run."""
    return Engine(backend, Oracle(PROMPT, known), draft_tokens=7, **other)


def test_an_oracle_is_believed(text_target: TransformersBackend, tokenizer: Any, plain_text: Completion) -> None:
    events, completion = run_one(oracle_engine(text_target, plain_text.ids, tokenizer=tokenizer), greedy())
    assert (completion.ids, completion.text) == (plain_text.ids, plain_text.text)
    assert completion.origins == ("draft",) * 7 + ("bonus",) + completion.origins[8:]
    assert (completion.stats.target_forwards, completion.stats.mean_accepted_length) == (5, 8.0)
    assert_consistent(events, completion)


def test_a_stop_token_ends_the_answer_inside_an_accepted_run(
    text_target: TransformersBackend, tokenizer: Any, plain_text: Completion
) -> None:
    places = set()
    for stop in set(plain_text.ids):
        first = plain_text.ids.index(stop)
        options: dict[str, Any] = {"tokenizer": tokenizer, "stop_tokens": [stop]}
        events, completion = run_one(oracle_engine(text_target, plain_text.ids, **options), greedy())
        assert completion.finish_reason == "stop_token"
        assert completion.ids == plain_text.ids[: first + 1]
        assert completion.text == tokenizer.decode(plain_text.ids[:first], skip_special_tokens=True)
        assert completion.text == generate(Engine(text_target, **options), PROMPT, greedy()).text
        assert completion.origins[-1] == ("bonus" if first % 8 == 7 else "draft")
        assert_consistent(events, completion)
        places.add(first % 8)
    assert places >= {0, 3, 6, 7}  # first, middle and last of the run, and the bonus


def test_ignore_eos_goes_on_past_stop_tokens(text_target: TransformersBackend, plain_text: Completion) -> None:
    engine = oracle_engine(text_target, plain_text.ids, stop_tokens=[plain_text.ids[2]])
    completion = generate(engine, PROMPT, greedy(ignore_eos=True))
    assert (completion.ids, completion.finish_reason) == (plain_text.ids, "length")


def test_a_stop_string_ends_the_answer_inside_an_accepted_run(
    text_target: TransformersBackend, tokenizer: Any, plain_text: Completion
) -> None:
    text = plain_text.text
    stops = {text[at : at + length] for at in range(2, len(text) - 4, 3) for length in (1, 2, 4)}
    ended = set()
    for stop in stops:
        events, completion = run_one(
            oracle_engine(text_target, plain_text.ids, tokenizer=tokenizer), greedy(stop=[stop, "never said"])
        )
        plain = generate(Engine(text_target, tokenizer=tokenizer), PROMPT, greedy(stop=stop))
        assert completion.text == plain.text == text[: text.index(stop)]
        assert completion.ids == plain.ids == plain_text.ids[: len(completion.ids)]
        assert completion.finish_reason == plain.finish_reason == "stop_string"
        assert_consistent(events, completion)
        ended.add(len(completion.ids) % 8)
    assert len(ended) >= 5


@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_the_length_limit_is_exact(
    text_target: TransformersBackend, tokenizer: Any, plain_text: Completion, max_tokens: int
) -> None:
    events, completion = run_one(
        oracle_engine(text_target, plain_text.ids, tokenizer=tokenizer), greedy(max_tokens=max_tokens)
    )
    assert completion.finish_reason == "length"
    assert completion.ids == plain_text.ids[:max_tokens]
    assert completion.text == tokenizer.decode(completion.ids, skip_special_tokens=True)
    assert completion.stats.drafted == completion.stats.accepted  # nothing was drafted that could not be used
    assert_consistent(events, completion)


def test_a_callers_own_test_ends_the_answer_inside_an_accepted_run(
    text_target: TransformersBackend, plain_text: Completion
) -> None:
    request = Request(PROMPT, greedy(), halt=lambda tokens: len(tokens) == len(PROMPT) + 3)
    completion = complete(oracle_engine(text_target, plain_text.ids), request)[0]
    assert (completion.ids, completion.finish_reason) == (plain_text.ids[:3], "halted")
    assert completion.origins == ("draft",) * 3


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_the_context_limit_ends_the_answer_with_length(name: str) -> None:
    short = TransformersBackend(tiny_llama(seed=1, context=32))
    completion = generate(Engine(short, drafter_over(short, name)), PROMPT, greedy(max_tokens=1000))
    assert completion.finish_reason == "length"
    assert len(PROMPT) + len(completion.ids) == 32
    one_more = generate(Engine(short, drafter_over(short, name)), list(range(31)), greedy(max_tokens=1000))
    assert len(one_more.ids) == 1


# Counts and events


@pytest.mark.parametrize("params", [greedy(), sampled()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_target_forwards_and_drafts_are_counted_as_they_happen(
    target: TransformersBackend, name: str, params: SamplingParams
) -> None:
    counting = CountingBackend(target)
    events, completion = run_one(Engine(counting, drafter_over(target, name)), params, prompt=[5, 6] * 8)
    assert completion.stats.target_forwards == counting.forwards
    assert completion.stats.drafted == sum(len(draft) for draft in counting.drafts)
    kind = name.partition("-")[0]  # all forms of `mtp` are called so
    assert (completion.stats.drafter, completion.stats.backend) == (kind, "transformers")
    assert_consistent(events, completion)


def test_draft_forwards_are_counted_as_they_happen(target: TransformersBackend) -> None:
    drafter: Any = drafter_over(target, "draft")
    counting = drafter.backend = CountingBackend(drafter.backend)
    completion = generate(Engine(target, drafter), PROMPT, sampled())
    assert completion.stats.draft_forwards == counting.forwards == completion.stats.drafted


@pytest.mark.parametrize("params", [greedy(), sampled()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_pieces_joined_are_the_text(
    text_target: TransformersBackend, tokenizer: Any, name: str, params: SamplingParams
) -> None:
    engine = Engine(text_target, drafter_over(text_target, name), tokenizer=tokenizer)
    events, completion = run_one(engine, params)
    assert completion.text == tokenizer.decode(completion.ids, skip_special_tokens=True)
    assert_consistent(events, completion)


def test_a_wrong_draft_costs_nothing_but_a_correction(target: TransformersBackend) -> None:
    plain = generate(Engine(target), PROMPT, greedy(max_tokens=16))
    known = [(i + (n in (2, 8))) % VOCABULARY for n, i in enumerate(plain.ids)]
    events, completion = run_one(Engine(target, Oracle(PROMPT, known), draft_tokens=3), greedy(max_tokens=16))
    assert completion.ids == plain.ids
    rounds = ["ddc", "dddb", "dc", "dddb", "ddb"]
    assert "".join(origin[0] for origin in completion.origins) == "".join(rounds)
    assert [event.stats.emitted for event in rounds_of(events)] == [len(round_) for round_ in rounds]
    assert_consistent(events, completion)


@pytest.mark.parametrize("name", DRAFTER_NAMES)
@pytest.mark.parametrize("params", [greedy(1), sampled(max_tokens=1)], ids=["greedy", "sampled"])
def test_one_token_is_one_plain_forward(target: TransformersBackend, name: str, params: SamplingParams) -> None:
    events, completion = run_one(Engine(target, drafter_over(target, name)), params, prompt=[5, 6] * 8)
    assert [type(event) for event in events] == [TokenEvent, RoundEvent, FinishEvent]
    assert completion.origins == ("bonus",)
    stats = completion.stats
    assert (stats.tokens, stats.target_forwards, stats.draft_forwards, stats.drafted) == (1, 1, 0, 0)
    assert (stats.acceptance_rate, stats.tpot_ms) == (None, None)


@pytest.mark.parametrize("params", [greedy(), sampled()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTER_MAKERS)
def test_no_draft_tokens_is_plain_decoding(target: TransformersBackend, name: str, params: SamplingParams) -> None:
    plain = generate(Engine(target), PROMPT, params)
    completion = generate(Engine(target, drafter_over(target, name), draft_tokens=0), PROMPT, params)
    assert completion.ids == plain.ids
    assert completion.stats.target_forwards == len(completion.ids)
    assert (completion.stats.draft_forwards, completion.stats.drafted, completion.stats.drafter) == (0, 0, "none")
    assert set(completion.origins) == {"bonus"}


@pytest.mark.parametrize("draft_tokens", [1, 2, MOST_DRAFT_TOKENS])
def test_drafts_are_no_longer_than_asked(target: TransformersBackend, draft_tokens: int) -> None:
    counting = CountingBackend(target)
    generate(Engine(counting, drafter_over(target, "draft"), draft_tokens=draft_tokens), PROMPT, greedy(80))
    assert max(len(draft) for draft in counting.drafts) == draft_tokens


def test_times_are_told_and_add_up(target: TransformersBackend) -> None:
    stats = generate(Engine(target, drafter_over(target, "draft")), PROMPT, greedy()).stats
    assert 0 < stats.ttft_ms <= 1e3 * stats.seconds
    assert stats.draft_seconds + stats.verify_seconds + stats.accept_seconds <= stats.seconds
    assert stats.tpot_ms == pytest.approx((1e3 * stats.seconds - stats.ttft_ms) / (stats.tokens - 1))
    assert stats.tokens_per_second == pytest.approx(stats.tokens / stats.seconds)


class Watching(Oracle):
    """Keeps what its proposer observed."""

    def __init__(self, prompt: Sequence[int], known: Sequence[int]) -> None:
        super().__init__(prompt, known)
        self.seen: list[tuple[Verification, Verdict]] = []

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        proposer = super().proposer(law, source)
        proposer.observe = lambda *seen: self.seen.append(seen)  # type: ignore[method-assign]
        return proposer


def test_a_proposer_sees_what_became_of_its_draft(target: TransformersBackend) -> None:
    plain = generate(Engine(target), PROMPT, greedy(max_tokens=9))
    known = [(i + (n == 2)) % VOCABULARY for n, i in enumerate(plain.ids)]
    drafter = Watching(PROMPT, known)
    generate(Engine(target, drafter, draft_tokens=4), PROMPT, greedy(max_tokens=9))
    assert [list(verification.draft.tokens) for verification, _ in drafter.seen] == [known[:4], known[3:7], []]
    expected = [
        Verdict((0, 1), plain.ids[:3], rejected=True),
        Verdict((0, 1, 2, 3), plain.ids[3:8], rejected=False),
        Verdict((), plain.ids[8:], rejected=False),
    ]
    assert [verdict for _, verdict in drafter.seen] == expected
    for verification, _ in drafter.seen:
        rows = len(verification.draft) + 1
        assert verification.logits.shape == (rows, VOCABULARY)


def test_what_was_cut_off_was_not_rejected_either(target: TransformersBackend) -> None:
    plain = generate(Engine(target), PROMPT, greedy(max_tokens=9))
    known = [(i + (n == 2)) % VOCABULARY for n, i in enumerate(plain.ids)]
    drafter = Watching(PROMPT, known)
    generate(Engine(target, drafter, draft_tokens=4, stop_tokens=[plain.ids[1]]), PROMPT, greedy(max_tokens=9))
    assert [verdict for _, verdict in drafter.seen] == [Verdict((0, 1), plain.ids[:2], rejected=False)]


# Seeds and neighbours


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_a_seed_reproduces_and_another_does_not(target: TransformersBackend, name: str) -> None:
    engine = Engine(target, drafter_over(target, name))
    first, again, other = (generate(engine, PROMPT, sampled(seed)) for seed in (4, 4, 5))
    assert first.ids == again.ids
    assert first.origins == again.origins or name in DRAFTS_DIFFER
    assert first.ids != other.ids  # thirty tokens alike by chance: less than 1e-9


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_a_fresh_seed_is_told_and_reproduces(target: TransformersBackend, name: str) -> None:
    engine = Engine(target, drafter_over(target, name))
    first, second = (generate(engine, PROMPT, sampled(seed=None)) for _ in range(2))
    assert first.settings.seed is not None and first.settings.seed != second.settings.seed  # alike: 2**-63
    assert generate(engine, PROMPT, first.settings).ids == first.ids
    assert first.settings.max_tokens == 30 and first.settings.temperature == 1.0


def test_the_global_generator_is_left_alone(target: TransformersBackend) -> None:
    before = torch.get_rng_state()
    generate(Engine(target, drafter_over(target, "draft")), PROMPT, sampled())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_neighbours_do_not_change_an_answer(target: TransformersBackend, name: str) -> None:
    engine = Engine(target, drafter_over(target, name), stop_tokens=[9, 17])
    requests = [
        Request(PROMPT, sampled(seed=1)),
        Request([5, 6] * 10, sampled(seed=1, max_tokens=7)),
        Request(PROMPT, greedy()),
        Request([9], SamplingParams(max_tokens=50, temperature=0.7, top_k=8, seed=2)),
        Request(PROMPT, sampled(seed=1)),
    ]
    together = complete(engine, *requests)
    for request, completion in zip(requests, together, strict=True):
        alone = complete(engine, request)[0]
        assert (completion.ids, completion.finish_reason) == (alone.ids, alone.finish_reason)
        if name not in DRAFTS_DIFFER:
            assert completion.origins == alone.origins
            assert completion.stats.target_forwards == alone.stats.target_forwards
    assert together[0].ids == together[4].ids


def test_requests_of_a_round_share_a_forward(target: TransformersBackend) -> None:
    counting = CountingBackend(target)
    complete(Engine(counting), Request(PROMPT, greedy(5)), Request(PROMPT, greedy(9)))
    assert (counting.forwards, counting.scored) == (9, 14)


def test_no_requests_no_events(target: TransformersBackend) -> None:
    assert list(Engine(target).run([])) == []


# Warnings and errors


def test_zero_acceptance_over_many_rounds_is_a_warning(target: TransformersBackend) -> None:
    plain = generate(Engine(target), PROMPT, greedy())
    wrong = [(i + 1) % VOCABULARY for i in plain.ids]
    completion = generate(Engine(target, Oracle(PROMPT, wrong)), PROMPT, greedy())
    assert completion.ids == plain.ids and completion.stats.acceptance_rate == 0
    (warning,) = completion.warnings
    assert f"None of {completion.stats.drafted} drafted tokens was accepted in" in warning
    assert "Likely causes: the oracle was told something wrong." in warning


def test_no_warning_after_few_rounds_or_any_acceptance(target: TransformersBackend) -> None:
    plain = generate(Engine(target), PROMPT, greedy())
    wrong = [(i + 1) % VOCABULARY for i in plain.ids]
    assert generate(Engine(target, Oracle(PROMPT, wrong)), PROMPT, greedy(10)).warnings == ()
    once_right = [*plain.ids[:1], *wrong[1:]]
    assert generate(Engine(target, Oracle(PROMPT, once_right)), PROMPT, greedy()).warnings == ()
    assert plain.warnings == ()


BAD_PROMPTS: list[tuple[list[int], str]] = [
    ([], "The prompt is empty"),
    (list(range(16)), "The prompt has 16 tokens, but the model's context is 16 and one more must fit"),
    ([1] * 40, "The prompt has 40 tokens"),
    ([1, VOCABULARY], f"Token id {VOCABULARY} in the prompt is outside the vocabulary, whose ids are 0 to 63"),
    ([1, -1], "Token id -1 in the prompt"),
]


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS, ids=[says for _, says in BAD_PROMPTS])
def test_a_bad_request_is_refused_before_any_starts(prompt: list[int], says: str) -> None:
    counting = CountingBackend(TransformersBackend(tiny_llama(seed=1, context=16)))
    engine = Engine(counting)
    with pytest.raises(InvalidInputError, match=says):
        next(engine.run([Request(PROMPT, greedy()), Request(prompt, greedy())]))
    assert counting.forwards == 0 and counting.prefilled == 0


def test_stop_strings_need_a_tokenizer(target: TransformersBackend) -> None:
    with pytest.raises(InvalidInputError, match="Stop strings and bad words need a tokenizer"):
        generate(Engine(target), PROMPT, greedy(stop="end"))


def test_a_rule_that_does_not_fit_the_request_is_refused(target: TransformersBackend) -> None:
    with pytest.raises(InvalidInputError, match="Rule 'greedy' fits temperature 0 only"):
        generate(Engine(target, rule="greedy"), PROMPT, sampled())


def test_rule_token_at_temperature_zero_is_greedy(target: TransformersBackend) -> None:
    drafter = drafter_over(target, "draft")
    assert generate(Engine(target, drafter, rule="token"), PROMPT, greedy()).ids == (
        generate(Engine(target), PROMPT, greedy()).ids
    )


@pytest.mark.parametrize("draft_tokens", [-1, MOST_DRAFT_TOKENS + 1, 2.5, True])
def test_draft_tokens_out_of_range_are_refused(target: TransformersBackend, draft_tokens: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"draft_tokens is {draft_tokens}, but must be an integer in"):
        Engine(target, draft_tokens=draft_tokens)


def test_an_unknown_rule_is_refused(target: TransformersBackend) -> None:
    with pytest.raises(ForedraftError, match="There is no acceptance rule 'blck'; known: greedy, token"):
        Engine(target, rule="blck")


def test_drafts_that_branch_are_refused_where_they_cannot_be_verified(
    target: TransformersBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Oracle(PROMPT, [])
    drafter.trees = True
    monkeypatch.setattr(target, "capabilities", Capabilities(trees=False))
    with pytest.raises(UnsupportedError, match="'oracle' drafts trees, which backend 'transformers' cannot verify"):
        Engine(target, drafter)
