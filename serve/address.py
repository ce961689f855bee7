"""Where a server listens, and how a client on this machine writes that down.

The socket is made before a model is read, so that a port in use is known at once. It knows sockets and no engine.

Proof: tests/test_boot.py. Story: app.
"""

from __future__ import annotations

import errno
import json
import socket

from serve.models import LoadedModel


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host`; port 0 takes a free one.

    Raises:
        OSError: the port is in use, or the host is not this machine's; the message names both options.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"--port: {port} is in use on {host}; name another, or 0 for a free one") from None
        raise OSError(f"--host {host}, --port {port}: {error.strerror or error}") from None


def base_url(listener: socket.socket) -> str:
    """`http://host:port` as a client on this machine would write it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def has_chat(loaded: LoadedModel) -> bool:
    """True when the model came with a chat template."""
    return loaded.tokenizer.chat_template is not None


def example(url: str, name: str, *, chat: bool) -> str:
    """A curl command that works as printed."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = {"messages": messages} if chat else {"prompt": "The sky is"}
    data = json.dumps({"model": name, **prompt, "max_tokens": 64})
    return (
        f"curl {url}/v1/{'chat/completions' if chat else 'completions'} -H 'content-type: application/json' -d '{data}'"
    )
