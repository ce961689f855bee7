"""`python -m tests.pages [make | break NAME]`: make every block and drawing of the site anew, or show one fault."""

from __future__ import annotations

import argparse
import importlib.util

import torch

from tests.pages.regions import ROOT


def main() -> None:
    """Make everything, or put one page's fault in place and print what the gates say."""
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=(__doc__ or "").split(": ")[1])
    actions = parser.add_subparsers(dest="action")
    actions.add_parser("make", help="write docs/made and docs/figures anew (the default)")
    actions.add_parser("break", help="run a page's fault").add_argument("name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.action == "break":
        from tests.pages import faults

        if args.name not in faults.faults():
            parser.error(f"name: {args.name!r} is not one of {', '.join(faults.faults())}")
        print(faults.told(args.name))
        return
    make()


def make() -> None:
    """Write what changed, and say so."""
    from tests.pages.made import everything, folder

    texts = {folder() / name: text for name, text in everything().items()}
    for script in sorted((ROOT / "docs" / "figures").glob("*.py")):
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        texts[module.TARGET] = module.draw()
    for path, text in texts.items():
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    print(f"{len(texts)} blocks and drawings are as the engines make them")


if __name__ == "__main__":
    main()
