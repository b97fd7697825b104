"""MkDocs hooks that make links to files outside docs/, which work on the git host, work on the site too.

A linked file of the repository becomes a page below `source/`: Markdown unchanged, other text as a
listing, a folder as a list of its files. Links are rewritten only in the rendered output. Links to missing
files are left unchanged, and MkDocs warns about them.

The index of the search is also written as a script, which pages can load where they are opened from disk. The site map
is removed: it needs the address of the site, which differs from place to place, and is empty without it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, SOURCE = "docs/", "source/"
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Files outside docs/ that are in the navigation, even if no page links to them."""

_LINK = re.compile(r"(\]\(\s*)([^)\s]+)([^)]*\))")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".sbatch": "bash"}
_SHOWN = {".md", *_LANGUAGES}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that is linked, directly or indirectly."""
    for place in outside([f"{DOCS}{file.src_uri}" for file in files.documentation_pages()]):
        made = File.generated(config, uri_of(place), content=_content(place), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(made)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page to the site's locations."""
    uri = page.file.src_uri
    place = uri.removeprefix(SOURCE) if uri.startswith(SOURCE) else f"{DOCS}{uri}"
    if not (ROOT / place).is_file():
        return markdown  # a listing: what looks like a link there is code

    def rewrite(target: str) -> str:
        path, sharp, anchor = target.partition("#")
        there = resolve(place, path)
        if there is None or not (ROOT / there).exists():
            return target
        return posixpath.relpath(uri_of(there), posixpath.dirname(uri) or ".") + sharp + anchor

    return rewrite_links(markdown, rewrite)


@event_priority(-100)  # after the plugin that writes the index
def on_post_build(*, config: MkDocsConfig) -> None:
    """Write the search index as a script, which is all that a page on disk may load, and remove the empty site map."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")
    for name in ("sitemap.xml", "sitemap.xml.gz"):
        (Path(config.site_dir) / name).unlink(missing_ok=True)


def outside(pages: list[str]) -> list[str]:
    """Return the files and folders outside docs/ that `pages` link to, directly or indirectly."""
    found = list(ALWAYS)
    waiting = [*pages, *ALWAYS]
    for place in waiting:  # grows while it is walked
        for there in _targets(place):
            if not there.startswith(DOCS) and there not in found and (ROOT / there).exists():
                found.append(there)
                waiting.append(there)
    return found


def uri_of(place: str) -> str:
    """Return the site URI of the repository file at `place`."""
    if place.startswith(DOCS):
        return place.removeprefix(DOCS)
    if (ROOT / place).is_dir():
        return f"{SOURCE}{place}/index.md"
    return f"{SOURCE}{place}" if place.endswith(".md") else f"{SOURCE}{place}.md"


def resolve(place: str, path: str) -> str | None:
    """Resolve the link `path` in the file at `place` to a repository path; None for external links and anchors."""
    if not path or ":" in path or path.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), path))


def rewrite_links(text: str, rewrite: Callable[[str], str]) -> str:
    """Apply `rewrite` to the target of each link and picture in `text`, except in fenced blocks."""
    lines, fenced = [], False
    for line in text.splitlines():
        fence = _FENCE.match(line) is not None
        fenced = fenced != fence
        plain = fence or fenced
        lines.append(line if plain else _LINK.sub(lambda match: match[1] + rewrite(match[2]) + match[3], line))
    return "\n".join(lines) + "\n"


def _targets(place: str) -> list[str]:
    """Return the link targets of the file or folder at `place`."""
    if (ROOT / place).is_dir():
        return [f"{place}/{name}" for name in _files(place)]
    if not place.endswith(".md") or not (ROOT / place).is_file():
        return []
    found: list[str] = []

    def look(target: str) -> str:
        there = resolve(place, target.partition("#")[0])
        found.extend([there] if there is not None else [])
        return target

    rewrite_links((ROOT / place).read_text(encoding="utf-8"), look)
    return found


def _files(place: str) -> list[str]:
    """Return the text files in a folder, as relative paths."""
    inside = [path.relative_to(ROOT / place) for path in sorted((ROOT / place).rglob("*")) if path.suffix in _SHOWN]
    return [path.as_posix() for path in inside if not any(part.startswith((".", "_")) for part in path.parts[:-1])]


def _content(place: str) -> str:
    if (ROOT / place).is_dir():
        links = [
            f"- [{name}]({posixpath.relpath(uri_of(f'{place}/{name}'), f'{SOURCE}{place}')})" for name in _files(place)
        ]
        return f"# `{place}/`\n\n" + "\n".join(links) + "\n"
    text = (ROOT / place).read_text(encoding="utf-8")
    return text if place.endswith(".md") else _listing(place, text)


def _listing(place: str, text: str) -> str:
    language = _LANGUAGES.get(Path(place).suffix, "text")
    head = f"---\ntitle: {Path(place).name}\nsearch:\n  exclude: true\n---\n"
    return f"{head}\n# `{place}`\n\n````{language}\n{text}\n````\n"
