"""The page at `/`: a chat with the model beside a live picture of the engine, in one document without outside requests.

Its parts lie in `serve/page/` and are joined once. The content security policy names the very styles and scripts by
their hashes and allows connections to this server alone, so the page cannot load or tell anything elsewhere, and a
text of the model cannot become a script. It holds nothing about this server, so it needs no key: the user enters one.

Proof: tests/test_playground.py. Story: app.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).resolve().parent / "page"
PARTS = ("page.css", "chat.js", "engine.js")


def playground(*, status: int = 200) -> Response:
    """The page; with status 401 for a browser that has no key yet."""
    body, policy = _document()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(body, status, headers, media_type="text/html")


@cache
def _document() -> tuple[str, str]:
    """The joined page, and its content security policy."""
    page = (FOLDER / "page.html").read_text("utf-8")
    hashes: dict[str, list[str]] = {"css": [], "js": []}
    for name in PARTS:
        part = (FOLDER / name).read_text("utf-8")
        page = page.replace(f"/* {name} */", part)
        digest = base64.b64encode(hashlib.sha256(part.encode("utf-8")).digest()).decode("ascii")
        hashes[name.rsplit(".", 1)[1]].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "style-src": " ".join(hashes["css"]),
        "script-src": " ".join(hashes["js"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in rules.items())
