"""Other engines in the same run: each optional, each answering the same prompts, by its own public interface."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.bench.peers.base import Peer, PeerError, PeerOptions, PeerRequest
from foredraft.bench.peers.llama_cpp import LlamaCppPeer
from foredraft.bench.peers.openvino import OpenVinoPeer
from foredraft.bench.peers.process import ProcessPeer
from foredraft.bench.peers.transformers import TransformersPeer
from foredraft.bench.peers.url import UrlPeer
from foredraft.bench.records import Cell
from foredraft.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "PEERS",
    "Peer",
    "PeerError",
    "PeerOptions",
    "PeerRequest",
    "PeerSpec",
    "available",
    "open_peer",
    "parse_peer",
]

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (TransformersPeer, LlamaCppPeer, OpenVinoPeer, UrlPeer)}
"""By name."""

_FORMS = "NAME, NAME:DRAFTER, NAME:DRAFTER:TOKENS, transformers:assistant=REF or url:URL"


@dataclass(frozen=True)
class PeerSpec:
    """A peer, what it shall draft with, and the most tokens of a draft."""

    name: str
    drafter: str = "none"
    draft_tokens: int | None = None

    def cell(self, temperature: float = 0.0) -> Cell:
        """Its cell of a benchmark; `drafter` and `draft_tokens` are those of its requests."""
        return Cell(self.drafter, self.draft_tokens, temperature=temperature, engine=self.name)


def parse_peer(text: str) -> PeerSpec:
    """The peer that a name means, such as `llama.cpp`, `llama.cpp:prompt-lookup:4`, `transformers:assistant=REF:5`,
    `url:http://localhost:8000/v1`. Without a drafter it decodes plainly.

    Raises:
        InvalidInputError: It means none; the message has the nearest that does.
    """
    name, _, rest = text.partition(":")
    kind = _kind(name)
    if kind is UrlPeer:
        if not rest.startswith(("http://", "https://")):
            raise InvalidInputError(f"'{text}' names no server: write url:http://host:port/v1.")
        return PeerSpec(name, rest)
    drafter, _, tokens = rest.rpartition(":")
    if not tokens.isdecimal():
        drafter, tokens = rest, ""
    drafter = drafter or "none"
    if tokens and (int(tokens) < 1 or drafter == "none"):
        raise InvalidInputError(f"'{text}' cannot draft {tokens} tokens. A peer is {_FORMS}, TOKENS at least 1.")
    means, equals, reference = drafter.partition("=")
    if means not in kind.drafters:
        raise InvalidInputError(f"{name} has no drafter '{means}'.{_nearest(means, kind.drafters)}")
    if bool(reference) != (means == "assistant") or (equals and not reference):
        raise InvalidInputError(f"'{text}' must be {name}:assistant=REF with a draft model, or name none.")
    return PeerSpec(name, drafter, int(tokens) if tokens else None)


def available(name: str, options: PeerOptions | None = None) -> str | None:
    """Why a peer cannot be used here, with what to do about it; `None` if nothing is known to be in the way.

    Args:
        name: One of `PEERS`.
        options: What it would be started with; without, only its package is looked for.

    Raises:
        InvalidInputError: There is no such peer.
    """
    return _kind(name).missing(options)


def open_peer(name: str, options: PeerOptions, tokenizer: PreTrainedTokenizerBase | None = None) -> Peer:
    """A peer with its model loaded, in a process of its own, or at a URL; to be closed.

    Args:
        name: One of `PEERS`.
        options: What it is started with.
        tokenizer: The target's, for servers that do not tell token ids.

    Raises:
        PeerError: It cannot be started, with the reason.
        InvalidInputError: There is no such peer.
    """
    kind = _kind(name)
    if kind is UrlPeer:
        return UrlPeer(options, tokenizer)
    missing = kind.missing(options)
    if missing is not None:
        raise PeerError(f"{name}: {missing}")
    return ProcessPeer(kind, options)


def _kind(name: str) -> type[Peer]:
    if name not in PEERS:
        raise InvalidInputError(f"There is no peer '{name}'.{_nearest(name, PEERS)} A peer is {_FORMS}.")
    return PEERS[name]


def _nearest(name: str, known: object) -> str:
    assert isinstance(known, (dict, tuple))
    near = difflib.get_close_matches(name, known, n=1)
    return f"{f' Did you mean {near[0]!r}?' if near else ''} Known: {', '.join(known)}."
