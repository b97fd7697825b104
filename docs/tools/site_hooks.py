"""MkDocs hooks: links that lead out of docs/, which the git host follows, work in the site too.

A file of the repository that a page links to becomes a page below `source/`: Markdown as it is, other text as a
listing, a folder as a list of its files. Links are rewritten in what is rendered, never in the files. What is linked
and is not there is left as it is, which MkDocs warns of.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, SOURCE = "docs/", "source/"
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Files outside docs/ that the navigation has, whether a page links to them or not."""

_LINK = re.compile(r"(\]\(\s*)([^)\s]+)([^)]*\))")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".sbatch": "bash"}
_SHOWN = {".md", *_LANGUAGES}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to, and for those that these link to."""
    for place in outside([f"{DOCS}{file.src_uri}" for file in files.documentation_pages()]):
        made = File.generated(config, uri_of(place), content=_content(place), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(made)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to where the site has the files."""
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


def outside(pages: list[str]) -> list[str]:
    """The files and folders outside docs/ that `pages` lead to, also by way of others that they lead to."""
    found = list(ALWAYS)
    waiting = [*pages, *ALWAYS]
    for place in waiting:  # grows while it is walked
        for there in _targets(place):
            if not there.startswith(DOCS) and there not in found and (ROOT / there).exists():
                found.append(there)
                waiting.append(there)
    return found


def uri_of(place: str) -> str:
    """Where the site's sources have the file of the repository at `place`."""
    if place.startswith(DOCS):
        return place.removeprefix(DOCS)
    if (ROOT / place).is_dir():
        return f"{SOURCE}{place}/index.md"
    return f"{SOURCE}{place}" if place.endswith(".md") else f"{SOURCE}{place}.md"


def resolve(place: str, path: str) -> str | None:
    """The file of the repository that `path`, in the file at `place`, leads to; None: another site, or this page."""
    if not path or ":" in path or path.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), path))


def rewrite_links(text: str, rewrite: Callable[[str], str]) -> str:
    """`text` with the target of each link and picture as `rewrite` has it; fenced blocks are left alone."""
    lines, fenced = [], False
    for line in text.splitlines():
        fence = _FENCE.match(line) is not None
        fenced = fenced != fence
        plain = fence or fenced
        lines.append(line if plain else _LINK.sub(lambda match: match[1] + rewrite(match[2]) + match[3], line))
    return "\n".join(lines) + "\n"


def _targets(place: str) -> list[str]:
    """What the file or folder at `place` leads to."""
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
    """The texts in a folder, by their paths in it."""
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
