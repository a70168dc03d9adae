"""Heads over tiny targets, trained for a moment so that they are often, not always, right."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from foredraft.backends.base import Backend
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.heads.block import BlockShape
from foredraft.heads.parallel import MedusaHead, MTPHead, ParallelHead
from foredraft.heads.recurrent import Eagle3Head, EagleHead, RecurrentHead, SequentialMTPHead
from foredraft.proposers.base import Drafter
from foredraft.proposers.eagle import RecurrentDrafter
from foredraft.proposers.medusa import ParallelDrafter
from foredraft.train.features import Window, features_of, padded
from foredraft.train.loop import Objective
from foredraft.train.objectives import ParallelObjective, RecurrentObjective
from foredraft.types import FinishEvent, SamplingParams

Head = RecurrentHead | ParallelHead


def shape_over(target: Backend) -> BlockShape:
    return BlockShape(hidden=target.hidden_size, heads=4, kv_heads=2, head_dim=8, mlp=48)


def eagle3_over(target: Backend) -> Eagle3Head:
    """It drafts most of the vocabulary, not all."""
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 8 != 7])
    return Eagle3Head(shape_over(target), (0, 1, target.layers), ids)


def medusa_over(target: Backend) -> MedusaHead:
    head = MedusaHead(target.hidden_size, target.layers, 3, own_matrices=target.vocab_size)
    head.begin_as(target.head_rows(range(target.vocab_size)).cpu())
    return head


HEADS: dict[str, Callable[[Backend], Head]] = {
    "eagle3": eagle3_over,
    "eagle": lambda target: EagleHead(shape_over(target), target.layers),
    "mtp": lambda target: SequentialMTPHead(shape_over(target), target.layers),
    "medusa": medusa_over,
    "mtp-independent": lambda target: MTPHead(target.hidden_size, target.layers, 3),
    "mtp-cascaded": lambda target: MTPHead(target.hidden_size, target.layers, 3, form="cascaded"),
}
"""How each is made over a target, with the weights of the global generator."""

HEAD_DRAFTERS: dict[str, type[Drafter]] = {
    "eagle3": RecurrentDrafter,
    "eagle": RecurrentDrafter,
    "mtp": RecurrentDrafter,
    "medusa": ParallelDrafter,
    "mtp-independent": ParallelDrafter,
    "mtp-cascaded": ParallelDrafter,
}
"""What drafts with each."""


def head_over(target: Backend, name: str, seed: int = 0) -> Head:
    """A head with the weights that `seed` gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HEADS[name](target)


def drafter_with(head: Head, target: Backend) -> Drafter:
    return RecurrentDrafter(head, target) if isinstance(head, RecurrentHead) else ParallelDrafter(head, target)


def objective_over(head: Head, target: Backend, *, sharpness: float = 1.0) -> Objective:
    """What the head is trained for; of `sharpness` see `window_of`."""
    every = range(target.vocab_size)
    rows = target.head_rows(every if head.draft_ids is None else head.draft_ids.tolist()).cpu() * sharpness
    if isinstance(head, ParallelHead):
        return ParallelObjective(head, rows, [1.0] * head.depth)
    regression = 0.1 if head.kind == "eagle" else 0.0
    return RecurrentObjective(head, target.embed(every).cpu(), rows, steps=3, regression=regression)


def window_of(target: Backend, head: Head, ids: Sequence[int], *, sharpness: float = 1.0) -> Window:
    """What the head learns from a text, by the target's law at temperature 1 / `sharpness`."""
    states, totals = features_of(target, ids, head.feature_layers)
    if sharpness != 1:
        rows = target.head_rows(range(target.vocab_size)).cpu()
        totals = (states[:, -1].float() @ rows.T * sharpness).logsumexp(-1)
    return Window(torch.tensor(ids), states[:, :-1], states[:, -1], totals, 0)


def fit(model: nn.Module, losses: Callable[[], dict[str, Tensor]], steps: int, rate: float) -> dict[str, float]:
    """Train for some steps, the rate up and down once; the last losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    found: dict[str, Tensor] = {}
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        found = losses()
        found["loss"].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.eval()
    return {name: float(value.detach()) for name, value in found.items()}


def answers_of(target: Backend, count: int, tokens: int, temperature: float) -> list[list[int]]:
    """Texts of the target: prompts of 4 random tokens and so many more."""
    dice = torch.Generator().manual_seed(count)
    prompts = torch.randint(target.vocab_size, (count, 4), generator=dice).tolist()
    params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed) for seed in range(count)]
    answers: list[list[int]] = [[] for _ in prompts]
    for index, event in Engine(target).run([Request(p, s) for p, s in zip(prompts, params, strict=True)]):
        if isinstance(event, FinishEvent):
            answers[index] = [*prompts[index], *event.completion.ids]
    return answers


_trained: dict[tuple[str, str], Head] = {}
_texts: dict[str, list[list[int]]] = {}


def head_drafter(target: Backend, name: str) -> Drafter:
    """A drafter whose head was trained on a few short texts of the target; once a process for all equal targets."""
    rows = target.head_rows(range(target.vocab_size))
    key = hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest()
    if key not in _texts:
        _texts[key] = answers_of(target, 12, 24, temperature=0.5)
    if (key, name) not in _trained:
        head = head_over(target, name)
        task = objective_over(head, target, sharpness=2.0)
        batch = padded([window_of(target, head, ids, sharpness=2.0) for ids in _texts[key] if len(ids) > 8])
        fit(head, lambda: task.losses(batch), 50, 1e-2)
        _trained[key, name] = head
    return drafter_with(copy.deepcopy(_trained[key, name]).to(rows.device), target)
