"""Checks of installed packages and plugins: versions, unmet requirements, compilers, unusable plugins."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlframework.doctor.checks import Check, Context, Finding, note, ok, warning
from rlframework.errors import PluginError
from rlframework.observers.environment import PACKAGES
from rlframework.observers.host import package_version

CORE = "rlframework-core"
OWN = (CORE, "rlframework-dtensor", "rlframework-deepspeed", "rlframework-megatron")
UNRELATED = "rlframework"
"""An unrelated distribution on PyPI that has a package of the same name."""
_MISSING = "not installed"


class Clash(NamedTuple):
    """An unmet requirement of a distribution; `there` is the installed version, or "not installed"."""

    distribution: str
    requirement: Requirement
    there: str

    @property
    def needed(self) -> str:
        """The requirement without its marker, as for `pip install`."""
        extras = f"[{','.join(sorted(self.requirement.extras))}]" if self.requirement.extras else ""
        return f"{self.requirement.name}{extras}{self.requirement.specifier}"

    def __str__(self) -> str:
        there = "it is not installed" if self.there == _MISSING else f"{self.there} is installed"
        return f"{self.distribution} requires {self.needed}, but {there}"


def versions(context: Context) -> Iterator[Finding]:
    """The versions of relevant packages."""
    found = {name: package_version(name) for name in dict.fromkeys([*OWN, *PACKAGES])}
    there = {name: version for name, version in found.items() if version != _MISSING}
    yield ok(", ".join(f"{name} {version}" for name, version in there.items()), facts={"versions": there})


def requirements(context: Context) -> Iterator[Finding]:
    """Requirements of rlframework's distributions, and transitively of their dependencies."""
    own = [name for name in OWN if package_version(name) != _MISSING]
    found = list(clashes(own))
    for clash in found:
        if clash.distribution in OWN:
            used = context.config is not None and clash.distribution == f"rlframework-{context.config.policy.backend}"
            needed = clash.distribution == CORE or used
            yield context.problem(str(clash), f"pip install '{clash.needed}'", needed=needed)
        else:
            remedy = f"Install a version that fits {clash.needed}; `pip check` shows which packages require it"
            yield warning(str(clash), remedy)
    if not found:
        yield ok(f"all requirements of {', '.join(own)} are met")
    if (version := package_version(UNRELATED)) != _MISSING:
        text = f"the unrelated distribution {UNRELATED!r} {version} is installed and overwrites this package"
        yield context.problem(text, f"pip uninstall {UNRELATED}, then reinstall rlframework-core", needed=True)


def clashes(roots: Iterable[str]) -> Iterator[Clash]:
    """Yield unmet requirements of `roots` and, transitively, of their dependencies, breadth first."""
    waiting = [(root, "") for root in roots]
    for distribution, extra in waiting:  # grows meanwhile
        for requirement in _requirements(distribution, extra):
            there = package_version(requirement.name)
            if there == _MISSING or not requirement.specifier.contains(there, prereleases=True):
                yield Clash(distribution, requirement, there)
                continue
            found = str(canonicalize_name(requirement.name))
            further = [(found, inner) for inner in ("", *sorted(requirement.extras))]
            waiting += [one for one in further if one not in waiting]


def _requirements(distribution: str, extra: str) -> Iterator[Requirement]:
    """The requirements of an installed distribution on this machine; with an `extra`, those that it adds."""
    for requirement in map(Requirement, metadata.requires(distribution) or []):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always != bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            yield requirement


def compilers(context: Context) -> Iterator[Finding]:
    """Compilers for DeepSpeed's offload to disk, which is built on first use."""
    if package_version("deepspeed") == _MISSING:
        return
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if not missing:
        yield ok("g++ and ninja are installed")
        return
    text = f"{' and '.join(missing)} not found: DeepSpeed cannot offload to disk (device: nvme); everything else works"
    yield note(text, "To enable it: apt-get install g++; pip install ninja, with its folder on PATH")


def plugins(context: Context) -> Iterator[Finding]:
    """The available plugins by kind, and those that are broken or disabled."""
    try:
        rows = context.manager.listing()
    except PluginError as error:
        yield context.problem(str(error), "See `rlframework plugins`", needed=True)
        return
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.status == "active" and row.kind is not None:
            kinds[row.kind].append(row.name)
    text = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in sorted(kinds.items()))
    yield ok(text, facts={"parts": dict(kinds)})
    for row in rows:
        title = f"the {row.kind or 'plugin'} {row.name} ({row.distribution} {row.version}) is {row.status}"
        if row.status == "disabled":
            yield note(f"{title}: {row.reason}")
        elif row.status == "broken":
            remedy = f"Reinstall {row.distribution}, or disable it: RLFRAMEWORK_DISABLE_PLUGINS={row.name}"
            needed = context.config is None  # a chosen one would not load
            yield context.problem(f"{title}: {row.reason}", remedy, needed=needed)


CHECKS = (
    Check("packages", "versions", versions),
    Check("packages", "requirements", requirements),
    Check("packages", "compilers", compilers),
    Check("plugins", "found", plugins),
)
