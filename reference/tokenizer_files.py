"""A tokenizer as files: `tokenizer.json` and what stands beside it, as transformers lays it out.

Reads `tokenizer_config.json`, `special_tokens_map.json` and the chat templates (`chat_template.jinja` wins over
the config, named ones lie in `additional_chat_templates/`), and writes the same files. It knows names and
JSON, nothing of encoding.

Proof: tests/test_tokenizer.py. Story: tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The backend, its named special tokens (text), and its chat templates by name."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer_dir(folder: Path) -> TokenizerFiles:
    """Read a model folder's tokenizer.

    Raises:
        FileNotFoundError: no `tokenizer.json` there.
        ValueError: a file is broken; the message begins with its path.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a model folder holds a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: {error}") from error
    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path)
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    try:
        special = {name: _content(name, named[name]) for name in SPECIAL_NAMES if named.get(name)}
        _add_listed_tokens(backend, config.get("added_tokens_decoder") or {})
        _mark_special(backend, special)
        return TokenizerFiles(backend, special, _read_templates(folder, config))
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from error


def write_tokenizer_dir(
    folder: Path,
    backend: tokenizers.Tokenizer,
    special_tokens: Mapping[str, str],
    chat_templates: Mapping[str, str],
) -> None:
    """Write the files `read_tokenizer_dir` reads; the folder is made when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", "utf-8")
    for name, source in chat_templates.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.encode())  # bytes: line ends are part of a template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: {type(read).__name__} is not an object")
    return read


def _content(name: str, token: Any) -> str:
    """A special token is its text, or an object that holds its text."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{name}: {token!r} is not a text or an object with one as content")
    return text


def _add_listed_tokens(backend: tokenizers.Tokenizer, listed: Any) -> None:
    """Add the tokens that only `tokenizer_config.json` lists, which must get the ids it gives them."""
    if not isinstance(listed, dict) or not all(index.isdecimal() for index in listed):
        raise ValueError("added_tokens_decoder: not an object that maps token ids to tokens")
    for index, token in sorted(((int(index), token) for index, token in listed.items()), key=lambda pair: pair[0]):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"added_tokens_decoder: id {index} is {token!r}, not an object with a text as content")
        if backend.token_to_id(token["content"]) is not None:
            continue
        try:
            backend.add_tokens([AddedToken(**token)])
        except (TypeError, ValueError) as error:
            raise ValueError(f"added_tokens_decoder: id {index} is {token!r}: {error}") from None
        became = backend.token_to_id(token["content"])
        if became != index:
            raise ValueError(f"added_tokens_decoder: {token['content']!r} is listed as id {index} and became {became}")


def _mark_special(backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """A named special token is matched whole and skipped in answers, even where `tokenizer.json` does not say so."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in special.values():
        if token not in added and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, normalized=False)])


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    written = config.get("chat_template") or {}
    if isinstance(written, str):
        written = {"default": written}
    elif isinstance(written, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in written if isinstance(entry, dict)]
        if len(pairs) < len(written) or not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ValueError("chat_template: a list, but not one of objects with name and template")
        written = dict(pairs)
    elif not isinstance(written, dict) or not all(isinstance(text, str) for text in written.values()):
        raise ValueError(f"chat_template: {type(written).__name__} is not a text or a list of named ones")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    read = {name: _read_text(path) for name, path in files.items()}
    return read or dict(written)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # bytes: line ends are part of a template
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8: {error}") from None
