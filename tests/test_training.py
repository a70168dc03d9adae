"""Training: what is killed goes on to the same bits; features, vocabulary, schedule, log, and what is refused."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import InvalidInputError, ModelError
from foredraft.train.dialogues import Dialogue
from foredraft.train.features import FeatureFiles, batches, features_of, padded, write_features
from foredraft.train.fresh import feature_layers, new_head, objective_of, precision_of
from foredraft.train.loop import Progress, Schedule, Training
from foredraft.train.objectives import soft_cross_entropy
from foredraft.train.recipe import Recipe
from foredraft.train.vocabulary import choose_draft_ids, coverage
from tiny import tiny_llama

VOCABULARY = 64


def dialogues(count: int, seed: int = 0) -> list[Dialogue]:
    dice = random.Random(seed)
    return [
        Dialogue(tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(12, 50))), 5, 0.0) for _ in range(count)
    ]


@pytest.fixture(scope="module")
def target() -> TransformersBackend:
    return TransformersBackend(tiny_llama(1, layers=4))


class KilledError(Exception):
    """As if the process had ended here."""


def log_of(folder: Path) -> list[list[str]]:
    with (folder / "log.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))[1:]


def train(
    target: TransformersBackend, folder: Path, kills: list[int], recipe: Recipe
) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after runs in a folder that die at these steps, and a last one that does not; and how many ran."""
    folder.mkdir(exist_ok=True)
    text = [(d.ids, d.n_prompt) for d in dialogues(70)]
    files = write_features(target, text, feature_layers(recipe, target.layers), folder / "features", "tiny")
    stored = FeatureFiles(files, recipe.window)
    order = list(batches(stored.places, recipe.batch_tokens, recipe.seed, recipe.passes))
    runs = 0
    for kill in [*kills, None]:
        head = new_head(recipe, target, stored.counts(VOCABULARY))
        objective = objective_of(head, recipe, target)

        def watch(progress: Progress, kill: int | None = kill) -> None:
            if progress.step == kill:
                raise KilledError

        training = Training(
            objective,
            order,
            lambda places: padded([stored.read(place) for place in places]),
            recipe.schedule,
            folder,
            recipe.about,
            validate=lambda step: {"length": float(step)},
            watch=watch,
        )
        runs += 1
        try:
            training.run()
        except KilledError:
            continue
        assert training.figures == {"length": training.steps}
    return head.state_dict(), runs


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_a_run_that_is_killed_anywhere_ends_with_the_same_weights(
    kind: str, target: TransformersBackend, tmp_path: Path
) -> None:
    schedule = Schedule(save_every=1e-9, accumulate=2, validate_every=3)  # a checkpoint after every step
    recipe = Recipe(kind=kind, passes=2, batch_tokens=128, window=32, ahead=3, draft_vocab=40, schedule=schedule)
    whole, _ = train(target, tmp_path / "whole", [], recipe)
    pieces, runs = train(target, tmp_path / "pieces", [1, 4, 4, 9, 15], recipe)
    assert runs == 6
    assert all(torch.equal(weight, pieces[name]) for name, weight in whole.items())
    logs = [log_of(tmp_path / name) for name in ("whole", "pieces")]
    assert logs[0] == logs[1]
    assert {row[1] for row in logs[0]} >= {"loss", "loss_0", "loss_1", "rate", "tokens", "length"}


def test_a_checkpoint_between_saves_is_gone_back_to(target: TransformersBackend, tmp_path: Path) -> None:
    recipe = Recipe(
        kind="eagle3", passes=1, batch_tokens=128, window=32, draft_vocab=40, schedule=Schedule(save_every=1e9)
    )
    whole, _ = train(target, tmp_path / "whole", [], recipe)
    pieces, _ = train(target, tmp_path / "pieces", [3, 5], recipe)  # nothing was saved: each begins anew
    assert all(torch.equal(weight, pieces[name]) for name, weight in whole.items())


def test_another_recipe_does_not_go_on_in_the_folder(target: TransformersBackend, tmp_path: Path) -> None:
    recipe = Recipe(kind="eagle3", passes=1, batch_tokens=128, window=32, draft_vocab=40)
    train(target, tmp_path, [], recipe)
    other = Recipe(kind="eagle3", passes=1, batch_tokens=128, window=32, draft_vocab=40, seed=1)
    with pytest.raises(InvalidInputError, match=r"holds training of another kind: seed was 0, now it is 1"):
        train(target, tmp_path, [], other)
    often = replace(recipe, schedule=replace(recipe.schedule, validate_every=1, save_every=1.0))
    train(target, tmp_path, [], often)  # how often one looks makes no difference
    (tmp_path / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"Cannot read .*checkpoint.pt .* Remove it to train anew"):
        train(target, tmp_path, [], recipe)


def test_training_learns(target: TransformersBackend, tmp_path: Path) -> None:
    recipe = Recipe(
        kind="eagle3", passes=8, batch_tokens=256, window=64, draft_vocab=64, schedule=Schedule(learning_rate=3e-3)
    )
    train(target, tmp_path, [], recipe)
    rows = [row for row in log_of(tmp_path) if row[1] == "loss_0"]
    assert float(rows[-1][2]) < 0.9 * float(rows[0][2])


# Features


def test_features_come_back_as_they_were_computed(target: TransformersBackend, tmp_path: Path) -> None:
    text = [(d.ids, d.n_prompt) for d in dialogues(3)]
    stored = FeatureFiles(write_features(target, text, (1, 2, 3), tmp_path, "tiny"), 20)
    assert stored.tokens == sum(place.length for place in stored.places)
    whole = [features_of(target, ids, (1, 2, 3)) for ids, _ in text]
    seen = 0
    for place in stored.places:
        window = stored.read(place)
        text_index = next(i for i in range(3) if place.start < sum(len(ids) for ids, _ in text[: i + 1]))
        first = place.start - sum(len(ids) for ids, _ in text[:text_index])
        states, totals = whole[text_index]
        assert window.ids.tolist() == list(text[text_index][0][first : first + place.length])
        assert torch.equal(window.features, states[first : first + place.length, :3])
        assert torch.equal(window.states, states[first : first + place.length, 3])
        assert torch.equal(window.log_total, totals[first : first + place.length])
        assert window.answer == 5 - first
        seen += place.length
    assert seen > 0.8 * sum(len(ids) for ids, _ in text)


def test_features_that_are_there_are_not_computed_again(target: TransformersBackend, tmp_path: Path) -> None:
    text = [(d.ids, d.n_prompt) for d in dialogues(70)]
    files = write_features(target, text, (1, 2, 3), tmp_path, "tiny")
    assert len(files) == 2
    marks = [file.stat().st_mtime_ns for file in files]
    files[1].write_bytes(files[1].read_bytes()[:-10])  # torn
    write_features(target, text, (1, 2, 3), tmp_path, "tiny")
    assert files[0].stat().st_mtime_ns == marks[0]
    assert len(load_file(files[1])["ids"]) == sum(len(ids) for ids, _ in text[64:])
    arrays = load_file(files[0])
    save_file(arrays, files[0], metadata={"key": "another"})
    marks = [file.stat().st_mtime_ns for file in files]
    write_features(target, text, (1, 2, 3), tmp_path, "tiny")
    assert files[0].stat().st_mtime_ns != marks[0]
    assert files[1].stat().st_mtime_ns == marks[1]


def test_batches_hold_every_window_once_a_pass_in_an_order_of_the_seed(
    target: TransformersBackend, tmp_path: Path
) -> None:
    text = [(d.ids, d.n_prompt) for d in dialogues(40)]
    stored = FeatureFiles(write_features(target, text, (1,), tmp_path, "tiny"), 20)
    found = list(batches(stored.places, 100, seed=1, passes=2))
    assert sorted(place for batch in found for place in batch) == sorted(2 * stored.places)
    assert all(len(batch) * max(place.length for place in batch) <= 100 for batch in found)
    assert found == list(batches(stored.places, 100, seed=1, passes=2))
    assert found != list(batches(stored.places, 100, seed=2, passes=2))
    assert found[: len(found) // 2] != found[len(found) // 2 :]


# Parts


def test_soft_cross_entropy_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    p = 0.7 * torch.softmax(torch.randn(20, 9, generator=generator, dtype=torch.float64), -1)
    rows = torch.randint(20, (50,), generator=generator)
    loss, totals = soft_cross_entropy(logits, p, rows)
    assert torch.allclose(totals, logits.logsumexp(-1))
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    found, logits.grad = logits.grad, None
    wanted = torch.nn.functional.cross_entropy(logits, p[rows], reduction="sum")
    (3 * wanted).backward()  # type: ignore[no-untyped-call]
    assert found is not None and logits.grad is not None
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()))
    assert torch.allclose(found, logits.grad)


def test_the_draft_vocabulary_is_what_is_frequent_here_and_then_what_is_frequent_anywhere() -> None:
    counts = torch.zeros(1000, dtype=torch.int64)
    counts[[900, 950]] = 50
    counts[980] = 1
    ids = choose_draft_ids(counts, 10)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 900, 950, 980]
    assert coverage(counts, ids[:-1]) == pytest.approx(100 / 101)
    assert choose_draft_ids(counts, 5000).tolist() == list(range(1000))
    with pytest.raises(InvalidInputError, match="draft_vocab"):
        choose_draft_ids(counts, 0)


def test_the_learning_rate_rises_and_falls() -> None:
    schedule = Schedule(learning_rate=1.0, warmup=0.1)
    rates = [schedule.rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.01 <= rates[-1] < 0.02


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "eagle4"}, "kind .*eagle3, eagle, medusa, mtp, draft"),
        ({"kind": "eagle3", "passes": 0}, "passes"),
        ({"kind": "eagle3", "window": 4096}, "window is 4096, but a batch has 2048 tokens"),
        ({"kind": "eagle3", "ahead": 0}, "ahead"),
        ({"kind": "mtp", "form": "twisted"}, "form"),
    ],
)
def test_bad_recipes_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Recipe(**given)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_is_mixed_precision_and_learns(tmp_path: Path) -> None:
    target = TransformersBackend(tiny_llama(1, layers=4).to("cuda"))
    recipe = Recipe(
        kind="eagle3", passes=8, batch_tokens=256, window=64, draft_vocab=64, schedule=Schedule(learning_rate=3e-3)
    )
    text = [(d.ids, d.n_prompt) for d in dialogues(70)]
    stored = FeatureFiles(write_features(target, text, (1, 2, 3), tmp_path / "features", "tiny"), recipe.window)
    head = new_head(recipe, target, stored.counts(VOCABULARY))
    objective = objective_of(head, recipe, target)
    order = list(batches(stored.places, recipe.batch_tokens, recipe.seed, recipe.passes))
    Training(
        objective,
        order,
        lambda places: padded([stored.read(place) for place in places]).to(torch.device("cuda")),
        recipe.schedule,
        tmp_path,
        recipe.about,
        precision=precision_of(recipe, target),
    ).run()
    assert precision_of(recipe, target) is torch.bfloat16 and next(head.parameters()).dtype is torch.float32
    losses = [float(row[2]) for row in log_of(tmp_path) if row[1] == "loss_0"]
    assert losses[-1] < 0.9 * losses[0]
