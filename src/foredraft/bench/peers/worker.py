"""The process that a peer lives in: `python -m foredraft.bench.peers.worker`, driven by `ProcessPeer`.

It reads a JSON object a line from stdin and writes one a line to stdout. First comes `{"peer": NAME, "options": {…}}`,
to which it says `{"ready": CONDITIONS}`; then requests, `{"request": {…}}`, to which it says `{"turn": {…},
"peak_memory": BYTES}`. Whatever fails is `{"error": WHY}`; at the first line that is also the end.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, BinaryIO

from foredraft.bench.peers import PEERS, memory
from foredraft.bench.peers.base import Peer, PeerOptions, PeerRequest
from foredraft.errors import ForedraftError


def main() -> None:
    """Serve the parent until it closes our stdin."""
    serve(*_private_channels())


def _private_channels() -> tuple[BinaryIO, BinaryIO]:
    """Where requests come from and replies go. What libraries print, in C too, goes to stderr; they read nothing."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Start the peer that the first line asks for, then answer line by line until there are no more."""

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        first = json.loads(requests.readline())
        peer = PEERS[first["peer"]](PeerOptions(**first["options"]))
        ready = peer.conditions()
    except Exception as error:
        reply({"error": _reason(error)})
        return
    reply({"ready": ready})
    for line in requests:
        try:
            reply(_answer(peer, json.loads(line)))
        except Exception as error:
            reply({"error": _reason(error)})


def _answer(peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
    request = PeerRequest(**message["request"])
    memory.reset_peak()
    turn = peer.answer(request)
    return {"turn": asdict(turn), "peak_memory": memory.peak()}


def _reason(error: Exception) -> str:
    """One line. Of an engine's own errors the kind too: their messages alone often say little."""
    if isinstance(error, ForedraftError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {str(error).strip() or 'without a message'}".splitlines()[0]


if __name__ == "__main__":
    main()
