"""What the pages of the site are made of: named regions of the source, blocks made by running engines, and their check.

`regions` finds code by name, `markup` turns a page's `[[...]]` lines into Markdown, `hook` is what mkdocs calls,
`made` and `faults` run the engines and write `docs/made/`, `drawing` draws. `python -m tests.pages` makes it all anew.

Proof: tests/test_docs.py.
"""
