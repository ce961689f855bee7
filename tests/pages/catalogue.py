"""The reference pages that are read off the code: the gates, the museum, the command line, the HTTP fields.

The gate catalogue says, from syntax trees alone, which function calls each gate and which test rejects it; the museum
page states what tests/test_museum.py proves of each exhibit. Nothing here runs an engine.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import html
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from reference.request import SEED_RANGE
from tests.museum.catalogue import ROOMS
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit
from tests.pages.regions import ROOT, find, modules, parsed

Calls = dict[str, list[tuple[str, str]]]  # check_* -> (path, dotted function)
SAID = {  # handlers whose docstring is their route
    "completions": "continue a prompt, or several; `stream: true` gives server-sent events",
    "chat_completions": "continue a conversation, rendered by the model's own template",
    "tokenize": "the token ids of a text or a conversation",
    "detokenize": "the text of token ids",
    "model": "that model, with its `max_model_len`; 404 for any other",
    "version": "the version that serves",
}
MEANS = {  # a field of a body, in words; a field without them fails the build
    "model": "the name that the server serves",
    "stream": "events as the answer comes, instead of one reply",
    "stream_options": "`include_usage`: a last chunk with the counts of tokens",
    "max_tokens": "tokens of the answer at most",
    "max_completion_tokens": "the newer name of `max_tokens`",
    "temperature": "0 takes the likeliest token; 1 draws as the model says",
    "top_p": "draw from the likeliest tokens that hold this share of the mass; above 0",
    "top_k": "draw from the k likeliest tokens; 0 or -1 for all",
    "min_p": "draw from tokens at least this share as likely as the likeliest",
    "n": "answers to each prompt, each with a seed of its own",
    "best_of": "compute so many and reply with the `n` likeliest; not with `stream`",
    "stop": "a text, or up to four, that ends the answer and is not part of it",
    "stop_token_ids": "token ids that end the answer, with `ignore_eos` too",
    "seed": "the same seed and prompt give the same tokens, whatever else runs",
    "presence_penalty": "taken once from the logit of each token of the answer",
    "frequency_penalty": "taken from it for each time that it stands there",
    "repetition_penalty": "divides the logit of each token of prompt and answer; 1 is off",
    "logit_bias": "added to the logits of these token ids",
    "min_tokens": "tokens before anything but the length may end the answer",
    "ignore_eos": "do not end where the model would",
    "user": "taken and not used",
    "metadata": "taken and not used",
    "response_format": "hold the answer to JSON, or to a schema",
    "structured_outputs": "hold the answer to a schema, a regex, a choice or a grammar",
    "priority": "who goes first among those that wait; lower is sooner",
    "cache_salt": "share prefixes only with requests of the same salt",
    "prefix_cache": "false neither looks a prompt up nor leaves it",
    "prompt": "a text or token ids, or several of either",
    "prompt_logprobs": "log-probabilities of the prompt's own tokens",
    "logprobs": "log-probabilities of the chosen token; completions: and of so many others",
    "top_logprobs": "and of so many of the likeliest",
    "echo": "begin the answer with its prompt",
    "messages": "the conversation, rendered by the model's own template",
    "tools": "functions that the model may call",
    "tool_choice": "whether it may, must, or must call a certain one",
    "parallel_tool_calls": "false: one call at most; the answer is held to it",
}
NOTICED = {LOCKSTEP: "the tokens only", HARMLESS: "nothing"}


def gates_page() -> str:
    """Every gate by subject: what must hold, the level, who calls it, which test and which exhibits show it fail."""
    callers, rejecters = _calls([p for p in modules() if not p.startswith("gates/")]), _rejecters()
    exhibits: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS.values():
        for exhibit in room:
            exhibits[exhibit.full].append(exhibit.name)
    lines = []
    for path in (p for p in modules() if p.startswith("gates/") and p != "gates/core.py"):
        lines += [f"## {path.removeprefix('gates/').removesuffix('.py')}", "", _intro(path), ""]
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
                name, level = _declared(node)
                doc = (ast.get_docstring(node) or "").split("\n\n")
                lines += [f"### `{name}` {{#{name.replace('.', '-')}}}", "", _text(doc[0]), ""]
                lines += [_text(more) + "\n" for more in doc[1:]]
                lines += [f"[[src {path} {node.name}]], {level}. Called by {_links(callers[node.name])}.", ""]
                lines += [f"Seen to fail in {_tests(rejecters[node.name])}.{_exhibits(exhibits[name])}", ""]
    return "\n".join(lines)


def museum_page() -> str:
    """Every exhibit: what was changed, where it was reported, and what notices it at each level of the gates."""
    lines = []
    for room, exhibits in ROOMS.items():
        lines += [f"## {room}", ""]
        for exhibit in exhibits:
            lines += [f"### {exhibit.name[0].upper()}{exhibit.name[1:]} {{#{slug(exhibit.name)}}}", ""]
            lines += [f"{exhibit.story} Reported in: {_thread(exhibit.thread)}.", ""]
            lines += diff(exhibit.edits)
            levels = ((level, getattr(exhibit, level)) for level in ("full", "cheap", "off"))
            lines += ["Noticed by: " + " · ".join(f"{level}: {_noticed(by)}" for level, by in levels), ""]
    return "\n".join(lines)


def diff(edits: Sequence[Edit]) -> list[str]:
    """Edits as one fenced diff of whole lines, each under the place where it is made."""
    lines = ["```diff"]
    for edit in edits:
        before, after = (text.split("\n") for text in _changed(edit))
        lines += [f"# {edit.place}"]
        for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            same = tag == "equal"
            lines += [(" " if same else "-") + line for line in before[a:b]]
            lines += [] if same else ["+" + line for line in after[c:d]]
    return [*lines, "```", ""]


def _changed(edit: Edit) -> tuple[str, str]:
    """The lines of the source that an edit changes, before and after, without the indentation that all of them have."""
    source = textwrap.dedent(inspect.getsource(edit.where))
    old, new = (text.removesuffix("\n") for text in (edit.old, edit.new))
    at = source.find(old)
    if at < 0:  # it stands there only when an edit before this one is made
        return old, new
    first, end = source.rfind("\n", 0, at) + 1, source.find("\n", at + len(old))
    before, after = source[first:end], source[first:at] + new + source[at + len(old) : end]
    margin = min(len(line) - len(line.lstrip()) for line in f"{before}\n{after}".split("\n") if line.strip())
    before, after = ("\n".join(line[margin:] for line in text.split("\n")) for text in (before, after))
    return before, after


def slug(name: str) -> str:
    """The anchor of an exhibit on the museum page."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def cli_page() -> str:
    """Every command with its arguments, from the parser itself."""
    from serve.cli import build_parser

    lines: list[str] = []
    for words, parser, about in _commands(build_parser(), ("nanoserve",)):
        lines += [f"## `{' '.join(words)}` {{#{'-'.join(words[1:])}}}", "", f"{about[0].upper()}{about[1:]}.", ""]
        for group in parser._action_groups:
            rows = [row for action in group._group_actions if (row := _argument(action))]
            named = (
                [f"**{str(group.title).capitalize()}**", ""]
                if group not in (parser._positionals, parser._optionals)
                else []
            )
            lines += [*named, "| argument | values | meaning |", "| --- | --- | --- |", *rows, ""] if rows else []
    return "\n".join(lines)


def http_page() -> str:
    """The routes, and the fields of both bodies, those refused by name among them, from the code that serves them."""
    from serve.openapi import RANGES
    from serve.protocol import ChatBody, CompletionBody, SamplingBody

    lines = ["## Routes", "", "| route | what it does |", "| --- | --- |", *_routes(), ""]
    shared = set(SamplingBody.model_fields)
    for title, body, fields in (
        ("Fields of both", SamplingBody, shared),
        ("Only completions", CompletionBody, set(CompletionBody.model_fields) - shared),
        ("Only chat", ChatBody, set(ChatBody.model_fields) - shared),
    ):
        schema = body.model_json_schema()["properties"]
        lines += [f"## {title}", "", "| field | type | range | what it asks for |", "| --- | --- | --- | --- |"]
        for name in (name for name in body.model_fields if name in fields):
            lines.append(f"| `{name}` | {_type(schema[name])} | {_range(RANGES.get(name))} | {MEANS[name]} |")
        refused = ", ".join(f"`{name}`" for name in sorted(getattr(body, "not_supported", {})))
        lines += ["", f"Known and refused by name: {refused}." if refused else "", ""]
    return "\n".join(lines)


def _intro(path: str) -> str:
    return _text((ast.get_docstring(parsed(path)) or "").split("\n\n")[0])


def _text(doc: str) -> str:
    return html.escape(" ".join(doc.split()), quote=False).replace("*", "\\*").replace("[", "\\[")


def _declared(node: ast.FunctionDef) -> tuple[str, str]:
    call = next(d for d in node.decorator_list if isinstance(d, ast.Call))
    assert isinstance(call.args[0], ast.Constant)
    levels = [k.value.id for k in call.keywords if isinstance(k.value, ast.Name)]
    return str(call.args[0].value), "at full" if levels == ["FULL"] else "at cheap"


def _calls(paths: list[str]) -> Calls:
    found: Calls = defaultdict(list)
    for path in paths:
        for function, node in _functions(parsed(path)):
            names = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            for name in sorted(n for n in names if n.startswith("check_")):
                found[name].append((path, function))
    return found


def _rejecters() -> Calls:
    found: Calls = defaultdict(list)
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for function, node in _functions(parsed(name)):
            if function.startswith("test_gate_rejects_"):
                used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                used |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                for gate in sorted(n for n in used if n.startswith("check_")):
                    found[gate].append((name, function))
    return found


def _functions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            inner = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            found += [(f"{node.name}.{child.name}", child) for child in inner]
    return found


def _links(calls: list[tuple[str, str]]) -> str:
    return ", ".join(f"[[src {path} {name}]] in `{path}`" for path, name in calls)


def _tests(calls: list[tuple[str, str]]) -> str:
    by_file: dict[str, list[str]] = defaultdict(list)
    for path, name in calls:
        by_file[path].append(f"`{name}`")
    return "; ".join(f"{', '.join(names[:3])} (`{path}`)" for path, names in by_file.items())


def _exhibits(names: list[str]) -> str:
    if not names:
        return ""
    return " In the museum: " + ", ".join(f"[{name}](museum.md#{slug(name)})" for name in names) + "."


def _routes() -> list[str]:
    """A line for every `app.get("/path", ...)(api.handler)` of the application, with the handler's first sentence."""
    found = []
    for node in ast.walk(parsed("serve/app.py")):
        made = node.func if isinstance(node, ast.Call) else None
        if not (isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and isinstance(node, ast.Call)):
            continue
        path, handler = made.args[0], node.args[0]
        if isinstance(path, ast.Constant) and isinstance(handler, ast.Attribute):
            doc = ast.get_docstring(find("serve/app.py", f"Api.{handler.attr}")) or ""  # type: ignore[arg-type]
            about = _text(doc.split("\n\n")[0]).partition("`: ")[2] or SAID.get(handler.attr, "")
            found.append(f"| `{made.func.attr.upper()} {path.value}` | {about.replace('|', ',')} |")
    return found


def _thread(thread: str) -> str:
    """A thread as a link; a file of an engine stays a name."""
    repository, mark, number = thread.partition("#")
    return f"[`{thread}`](https://github.com/{repository}/issues/{number})" if mark else f"`{thread}`"


def _noticed(by: str) -> str:
    return NOTICED.get(by) or (f"[[gate {by}]]" if "." in by else f"`{by}`")


def _commands(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> list[Any]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                inner = _commands(child, (*words, name))
                found += inner or [((*words, name), child, about.get(name, ""))]
    return found


def _argument(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction):
        return ""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    values = " ".join(action.choices) if action.choices else action.metavar or ("" if action.nargs == 0 else "value")
    return f"| {names} | {f'`{values}`' if values else ''} | {html.escape(action.help or '', quote=False)} |"


def _range(bounds: tuple[float, float | None] | None) -> str:
    if bounds is None:
        return ""
    if bounds == SEED_RANGE:
        return "any int64"
    low, high = (f"{bound:,}" if bound is not None else "" for bound in bounds)
    return f"{low} to {high}" if high else f"from {low}"


def _type(schema: dict[str, Any]) -> str:
    kinds = [_one(option) for option in schema.get("anyOf", [schema])]
    return " or ".join(kind for kind in kinds if kind != "null")


def _one(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[-1]}`"
    if schema.get("type") == "array":
        return f"list of {_one(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
