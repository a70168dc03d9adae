"""The server's page at `/`: one static file, and the policy that keeps it from loading or running anything else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def page() -> str:
    """The page as HTML. It needs no other file, and asks nobody but the server that it came from."""
    return (files("foredraft.serve") / "page" / "index.html").read_text(encoding="utf-8")


@cache
def policy() -> str:
    """The page's `Content-Security-Policy`: its style and script, by their hashes, and requests to its own server."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes('script')}",
            f"style-src {_hashes('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(element: str) -> str:
    """What the page has in elements of this name, as sources of a policy."""
    found = re.findall(rf"<{element}>(.*?)</{element}>", page(), re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
