"""What mkdocs calls: source pages are added, a page's words are replaced, and every link of the built site is followed.

A missing region, a missing block or a dead link ends the build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.pages import markup, regions, slim  # noqa: E402

ATTRIBUTE = re.compile(r'\s(?:href|src)="([^"]*)"')
ID = re.compile(r'\s(?:id|name)="([^"]*)"')


def on_config(config: Any) -> Any:
    """Forget what an earlier build of a serving process read."""
    regions.source.cache_clear()
    regions.parsed.cache_clear()
    return config


def on_files(files: Any, config: Any) -> Any:
    """One page for every source file, and the player that `nanoserve trace html` writes into its pages too."""
    from mkdocs.structure.files import File

    for path in regions.modules():
        page = markup.source_page(path, regions.source(path), regions.public_names(path))
        files.append(File.generated(config, f"source/{path.removesuffix('.py')}.md", content=page))
    for name in ("stepper.js", "stepper.css"):
        if (ROOT / "serve" / name).is_file():
            files.append(File.generated(config, f"assets/{name}", abs_src_path=str(ROOT / "serve" / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page's `[[...]]` replaced; the source pages hold code that is not to be touched."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return markup.render(markdown, depth=page.file.url.removeprefix("./").count("/"))


def on_post_build(config: Any) -> None:
    """Slim the theme, and raise when a page refers to nothing, or to another host for what it needs."""
    from mkdocs.exceptions import PluginError

    slim.slim_site(Path(config.site_dir))
    wrong = dead_links(Path(config.site_dir))
    if wrong:
        raise PluginError("dead links:\n" + "\n".join(wrong[:40]))


def dead_links(site: Path) -> list[str]:
    """`page: reference` for every internal href or src that leads nowhere, and every script or style from outside."""
    pages = {path: path.read_text("utf-8") for path in sorted(site.rglob("*.html"))}
    ids = {path: set(ID.findall(text)) for path, text in pages.items()}
    wrong = []
    for path, text in pages.items():
        base = site if path.name == "404.html" else path.parent
        for reference in set(ATTRIBUTE.findall(text)):
            if not _leads_somewhere(reference, path, base, site, ids):
                wrong.append(f"{path.relative_to(site)}: {reference}")
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>", text):
            if 'rel="canonical"' not in tag:
                wrong.append(f"{path.relative_to(site)}: {tag} asks another host")
    return wrong


def _leads_somewhere(reference: str, path: Path, base: Path, site: Path, ids: dict[Path, set[str]]) -> bool:
    url, fragment = urldefrag(reference)
    if re.match(r"[a-z]+:|//", url):
        return True  # another host: asked of nobody while building
    if not url:
        target = path
    else:
        plain = unquote(url.partition("?")[0])
        target = (site / plain.lstrip("/") if plain.startswith("/") else base / plain).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    return not fragment or target not in ids or unquote(fragment) in ids[target] or fragment in ("__codelineno-0-0",)
