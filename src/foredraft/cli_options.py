"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from foredraft.errors import InvalidInputError

T = TypeVar("T")

ModelArgument = Annotated[str, typer.Argument(help="Bundled name, folder, .gguf file, or hub id (org/name).")]
PromptArgument = Annotated[str, typer.Argument(help="The prompt, or - to read it from standard input.")]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="What drafts: none, ngram[:MIN-MAX], suffix[:SETTINGS], recycling, lookahead, draft:REF, early_exit:L, "
        "layer_skip[:FILE], self_quant, eagle3[:REF], eagle:REF, mtp[:REF], medusa:REF, hybrid:A+B, auto[:A+B], "
        "ssd:DRAFTER, saguaro:DRAFTER. REF is a model, or a trained head; hybrid and auto join others, as in "
        "auto:suffix+draft:REF; auto measures what forwards cost, and drafts only what pays; ssd has another drafter "
        "draft the next round while the target verifies this one."
    ),
]
DraftTokensOption = Annotated[
    int | None, typer.Option(help="Most tokens to draft a round, 0 to 64; the default suits the drafter.")
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        help="Acceptance rule: seed-exact, block, token; for trees also walk, recursive, hu, traversal. The default "
        "suits the drafter."
    ),
]
SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="vLLM's JSON, or a file that holds it: taken as drafter, draft tokens and rule.",
    ),
]
NoChatOption = Annotated[bool, typer.Option("--no-chat", help="Continue the prompt as it is, without chat template.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
DtypeOption = Annotated[
    str, typer.Option(help="For transformers: auto (float32 on a CPU), float32, bfloat16 or float16.")
]
BackendOption = Annotated[
    str,
    typer.Option(help="auto, native (the fast one, on a CPU) or transformers. -v says what auto took, and why."),
]
WeightsOption = Annotated[
    str, typer.Option(help="For native: auto (as stored), f32, bf16 or q8 (8 bits; changes the model a little).")
]
KvOption = Annotated[str, typer.Option(help="For native: keys and values in f32, or bf16 (half the memory).")]
ThreadsOption = Annotated[int | None, typer.Option(help="For native; the default is the number of physical cores.")]
DraftThreadsOption = Annotated[
    int | None, typer.Option(help="For native: of what drafts, for ssd beside --threads of the target.")
]
DraftDeviceOption = Annotated[str | None, typer.Option(help="Of draft models, if not that of the target.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is loaded and what it takes.")]


def listed(text: str) -> list[str]:
    """The parts of an option that is a list with commas between."""
    return [part.strip() for part in text.split(",") if part.strip()]


def number(kind: Callable[[str], T], text: str, name: str) -> T:
    """A part of such a list as a number.

    Raises:
        InvalidInputError: It is none; the message names the option.
    """
    try:
        return kind(text)
    except ValueError:
        raise InvalidInputError(f"{name} has '{text}', but must be numbers with commas between.") from None


def configured(
    config: str | None, drafter: str, draft_tokens: int | None, rule: str | None
) -> tuple[str, int | None, str | None]:
    """Drafter, draft tokens and rule: as the options say, or as vLLM's JSON does in their place.

    Raises:
        InvalidInputError: Both say something, or the JSON is wrong.
        UnsupportedError: A key of it has no counterpart here.
    """
    if config is None:
        return drafter, draft_tokens, rule
    for name, given in (
        ("--drafter", drafter != "auto"),
        ("--draft-tokens", draft_tokens is not None),
        ("--rule", rule),
    ):
        if given:
            raise InvalidInputError(f"--speculative-config says what drafts, and how: leave {name} out.")
    from foredraft.handover.incoming import incoming  # imports torch

    found = incoming(config)
    return found.drafter, found.draft_tokens, found.rule
