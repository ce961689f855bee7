"""The rules of the house as tests: import direction, one word in every place, gates used and seen to fail, sizes.

Nothing here imports an engine; it reads the source as text and as syntax trees.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gates", "reference", "fast", "serve")
CONTRACT = {"config", "request", "weights", "tokenizer"}
# Only the command line of `serve` names an engine; the app receives one.
NAMES_AN_ENGINE = {"serve/cli.py", "serve/boot.py"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 400, 60, 100


def tracked() -> list[str]:
    """Files under version control, or every file of the four packages in an unpacked archive."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]


def sources(*folders: str) -> list[Path]:
    """Tracked Python files below the named top-level folders."""
    return [ROOT / n for n in tracked() if n.endswith(".py") and n.split("/")[0] in folders]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Every imported module of a file as a dotted name, `from a import b` as `a.b`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def gate_functions() -> dict[str, Path]:
    """Every `check_*` of the gates package and the file it lives in."""
    return {f.name: p for p in sources("gates") for f in functions(p) if f.name.startswith("check_")}


# ---- import direction -------------------------------------------------------------------------------------------


def test_gates_import_no_sibling_and_only_torch():
    allowed = {"torch", "gates", "__future__"} | set(__import__("sys").stdlib_module_names)
    wrong = [(name_of(p), m) for p in sources("gates") for m in imports(p) if m.split(".")[0] not in allowed]
    assert not wrong


def test_reference_imports_only_gates_of_its_siblings():
    wrong = [(name_of(p), m) for p in sources("reference") for m in imports(p) if m.split(".")[0] in ("fast", "serve")]
    assert not wrong


def test_fast_takes_only_the_contract_from_reference():
    taken = [(name_of(p), m.split(".")) for p in sources("fast") for m in imports(p) if m.split(".")[0] == "reference"]
    wrong = [(where, ".".join(m)) for where, m in taken if len(m) < 2 or m[1] not in CONTRACT]
    assert not wrong
    assert not [(name_of(p), m) for p in sources("fast") for m in imports(p) if m.split(".")[0] == "serve"]


def test_only_the_command_line_names_an_engine():
    wrong = []
    for path in sources("serve"):
        for module in imports(path):
            top, _, rest = module.partition(".")
            names_one = top == "fast" or (top == "reference" and rest.split(".")[0] in ("engine", "model", "batch"))
            if names_one and name_of(path) not in NAMES_AN_ENGINE:
                wrong.append((name_of(path), module))
    assert not wrong


# ---- one word in every place ------------------------------------------------------------------------------------


def subjects(package: str) -> set[str]:
    return {p.stem for p in sources(package) if p.stem not in ("__init__", "__main__")}


def test_a_gate_file_names_a_subject_that_has_a_module_and_a_test():
    modules = subjects("fast") | subjects("reference") | subjects("serve")
    tests = {p.stem for p in sources("tests")}
    for word in subjects("gates") - {"core"}:
        assert word in modules, f"gates/{word}.py: no engine or server module of that name"
        assert f"test_{word}" in tests, f"gates/{word}.py: no tests/test_{word}.py"


def test_a_bench_or_a_page_names_a_module():
    modules = subjects("fast") | subjects("reference") | subjects("serve")
    for path in sources("tests"):
        if path.stem.startswith("bench_"):
            assert path.stem.removeprefix("bench_") in modules, name_of(path)
    for page in (ROOT / "docs").glob("days/day*-*.md"):
        assert page.stem.partition("-")[2] in modules | {
            "wiring",
            "coverage",
            "invariance",
            "kernels",
            "lockstep",
            "prefix",
        }, page.name


def test_module_docstrings_point_at_files_that_exist():
    for path in sources(*PACKAGES):
        text = ast.get_docstring(parsed(path)) or ""
        assert text, f"{name_of(path)}: no module docstring"
        if path.stem not in ("__init__", "__main__"):
            assert "Proof: " in text, f"{name_of(path)}: no `Proof: tests/...` pointer"
        for pointed in re.findall(r"tests/[\w/]+\.py", text):
            assert (ROOT / pointed).is_file(), f"{name_of(path)} points at {pointed}, which does not exist"
        for pointed in re.findall(r"\bgates\.(\w+)", text.split("Gates: ")[-1] if "Gates: " in text else ""):
            assert (ROOT / "gates" / f"{pointed}.py").is_file(), f"{name_of(path)} points at gates.{pointed}"


# ---- gates are used, and seen to fail ---------------------------------------------------------------------------


def called_names(paths: list[Path]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                target = node.func
                found.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return found


def test_every_gate_is_called_by_an_engine_or_the_server():
    called = called_names(sources("reference", "fast", "serve"))
    assert not sorted(set(gate_functions()) - called)


def test_every_gate_is_rejected_by_a_test():
    rejected: set[str] = set()
    for path in sources("tests"):
        for function in functions(path):
            if function.name.startswith("test_gate_rejects_"):
                rejected |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
                rejected |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    assert not sorted(set(gate_functions()) - rejected)


# ---- sizes and words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources(*PACKAGES, "tests"), ids=name_of)
def test_files_and_functions_stay_small(path: Path):
    lines = path.read_text("utf-8").count("\n")
    limit = MAX_FILE_LINES if path.parts[-2] != "tests" else 2 * MAX_FILE_LINES
    assert lines <= limit, f"{name_of(path)}: {lines} lines; a noun is missing"
    most = MAX_KERNEL_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES
    for function in functions(path):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= most, f"{name_of(path)}:{function.lineno} {function.name}: {length} lines"


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
def test_public_things_are_documented_and_annotated(path: Path):
    tree = parsed(path)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}:{node.lineno} {node.name}: no docstring"
            methods = node.body if isinstance(node, ast.ClassDef) else []
            for method in methods:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    assert ast.get_docstring(method), f"{name_of(path)}:{method.lineno} {node.name}.{method.name}"


def test_there_is_no_module_called_utils():
    vague = re.compile(r"^(utils?|helpers?|common|misc|base)$")
    assert not [name_of(p) for p in sources(*PACKAGES) if vague.match(p.stem)]


# ---- the README's tree ------------------------------------------------------------------------------------------

TREE = re.compile(r"<!-- tree -->\n```\n(.*?)```\n<!-- /tree -->", re.S)


def rendered_tree() -> str:
    """What the README shows between its tree marks: every package with its modules, in the tracked files."""
    lines = []
    for package in ("reference", "fast", "gates", "serve"):
        words = sorted(p.relative_to(ROOT / package).with_suffix("").as_posix() for p in sources(package))
        words = [w for w in words if w.split("/")[-1] not in ("__init__", "__main__")]
        line = f"{package + '/':<11}"
        for word in words:
            if len(line) + len(word) + 1 > 100:
                lines.append(line.rstrip())
                line = " " * 11
            line += word + " "
        lines.append(line.rstrip())
    top = sorted({n.split("/")[0] + ("/" if "/" in n else "") for n in tracked()} - {f"{p}/" for p in PACKAGES})
    lines.append("           " + " ".join(t for t in top if not t.startswith(".")))
    return "\n".join(lines) + "\n"


def test_the_readme_shows_the_tracked_files():
    shown = TREE.search((ROOT / "README.md").read_text("utf-8"))
    assert shown, "README.md has no <!-- tree --> block"
    assert shown.group(1) == rendered_tree(), "README.md: run `python -m tests.test_tidy` to write the tree anew"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    block = f"<!-- tree -->\n```\n{rendered_tree()}```\n<!-- /tree -->"
    readme.write_text(TREE.sub(lambda _: block, readme.read_text("utf-8")), "utf-8")
