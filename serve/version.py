"""The version of what is running, for `--version`, `/version` and whoever writes a bug report.

Proof: tests/test_cli.py. Story: app.
"""

from __future__ import annotations


def version() -> str:
    """The installed distribution's version, or what a bare checkout says."""
    # Imported here: looking a distribution up costs more than parsing a command line does.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nanoserve")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"
