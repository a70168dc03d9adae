"""All that a hand-over is: what was measured, what it becomes, and where it will run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidInputError
from foredraft.handover.check import Parallel, check_config
from foredraft.handover.expected import BATCHES, Gain, Machine, gains, schedule_of
from foredraft.handover.facts import Facts, draft_facts_of
from foredraft.handover.keys import VERSIONS
from foredraft.handover.measured import Measured, Record
from foredraft.handover.translate import Translation, translate

PORT = 8000
_DEFAULT_TOKENS = 4  # where nothing was measured to choose by


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What vLLM is to be started with.

    Args:
        model: Folder or hub id, as vLLM loads it.
        name: What requests call it.
        translation: Of the drafter.
        draft_tokens: `num_speculative_tokens`.
        schedule: The same by batch size, if one number does not do for all.
        parallel: Over how many devices.
        version: Of vLLM.
        draft: Where the draft model or head lies for vLLM.
        gains: Expected, by batch size; empty where nothing was measured.
        machine: Where that holds.
        record: What was measured.
        measured: What of it was taken.
        gpu: The name of the card, if one was given.
    """

    model: str
    name: str
    translation: Translation
    draft_tokens: int
    parallel: Parallel
    schedule: Sequence[Sequence[int]] | None = None
    version: str = VERSIONS[-1]
    draft: str | None = None
    gains: Sequence[Gain] = ()
    machine: Machine | None = None
    record: Record | None = None
    measured: Measured | None = None
    gpu: str | None = None

    @property
    def config(self) -> dict[str, Any] | None:
        """For `--speculative-config`; `None` is plain decoding."""
        found = self.translation.config(self.draft_tokens, model=self.draft)
        if found is not None and self.schedule is not None:
            found["num_speculative_tokens_per_batch_size"] = [list(each) for each in self.schedule]
        return found

    def check(self, target: Facts | None = None) -> None:
        """Refuse it if vLLM would.

        Raises:
            InvalidInputError: See `check_config`.
            UnsupportedError: The head or draft model is for another target.
        """
        config = self.config
        if config is None:
            return
        draft = draft_facts_of(config)
        check_config(config, version=self.version, parallel=self.parallel, target=target, draft=draft)


def planned(
    model: str,
    record: Record | None,
    drafter: str | None,
    *,
    name: str | None = None,
    machine: Machine | None = None,
    batches: Sequence[int] = BATCHES,
    parallel: Parallel | None = None,
    version: str = VERSIONS[-1],
    draft_tokens: int | None = None,
    draft: str | None = None,
    gpu: str | None = None,
    schedule: bool = False,
) -> Handover:
    """Choose drafter and number of tokens.

    Args:
        model: As vLLM loads it.
        record: What was measured; without it `drafter` must be given.
        drafter: One of the record, or any; `None` takes the record's fastest.
        name: What requests call the model; `None` is the same as `model`.
        machine: Where gains are reckoned for.
        batches: Batch sizes to reckon with. The number of tokens is that of the smallest.
        parallel: Over how many devices.
        version: Of vLLM.
        draft_tokens: `None` takes the best by the record.
        draft: Where the draft model or head lies for vLLM; `None` where the drafter says.
        gpu: Name of the card.
        schedule: Whether to write the number of tokens by batch size.

    Raises:
        InvalidInputError: The record has no such drafter, or nothing says what to draft with.
    """
    if record is None and drafter is None:
        raise InvalidInputError("Nothing says what to draft with: give --from, what was measured, or --drafter.")
    measured = record.choose(drafter) if record is not None else None
    drafter = measured.drafter if measured is not None else drafter
    assert drafter is not None
    translation = translate(drafter)
    found: list[Gain] = []
    if measured is not None and machine is not None and translation.method:
        found = gains(measured, machine, batches, draft_tokens)
    tokens = draft_tokens or next((gain.draft_tokens for gain in found if gain.draft_tokens), 0)
    return Handover(
        model=model,
        name=name or model,
        translation=translation,
        draft_tokens=tokens or (measured.draft_tokens if measured is not None else _DEFAULT_TOKENS),
        schedule=schedule_of(found) if schedule else None,
        parallel=parallel or Parallel(),
        version=version,
        draft=draft,
        gains=found,
        machine=machine,
        record=record,
        measured=measured,
        gpu=gpu,
    )


def quoted(command: Sequence[str]) -> str:
    """A command for a shell, an option a line."""
    lines, current = [], ""
    for part in command:
        if part.startswith("--") and current:
            lines.append(current)
            current = shlex.quote(part)
        else:
            current = f"{current} {shlex.quote(part)}".strip()
    return " \\\n    ".join([*lines, current])


def options(values: Mapping[str, object]) -> list[str]:
    """Options of a command; those whose value is `None` or `False` are left out."""
    found: list[str] = []
    for name, value in values.items():
        if value is True:
            found.append(name)
        elif value is not None and value is not False:
            found += [name, str(value)]
    return found


def is_local(reference: str) -> bool:
    """Whether a model lies in a folder or file here, not on a hub."""
    return Path(reference).expanduser().exists()
