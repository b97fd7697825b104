"""Checks of installed packages: versions, unmet requirements, missing extras, compilers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from rlframework.doctor.context import Context
from rlframework.doctor.findings import Finding, note, ok, warning
from rlframework.doctor.registry import check
from rlframework.observers.environment import PACKAGES
from rlframework.observers.host import package_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CORE = "rlframework-core"
OWN = (CORE, "rlframework-dtensor", "rlframework-deepspeed", "rlframework-megatron")
EXTRAS = ("dtensor", "deepspeed", "megatron", "wandb", "mlflow")
UNRELATED = "rlframework"
"""An unrelated distribution on PyPI that has a package of the same name."""


@dataclass(frozen=True)
class Clash:
    """An unmet requirement of a distribution; `there` is the installed version, or None."""

    distribution: str
    requirement: str
    there: str | None

    def __str__(self) -> str:
        there = "it is not installed" if self.there is None else f"{self.there} is installed"
        return f"{self.distribution} requires {self.requirement}, but {there}"


@check("packages", "versions")
def versions(context: Context) -> Iterator[Finding]:
    """The versions of relevant packages."""
    known = dict.fromkeys([*OWN, *PACKAGES])
    found = {name: package_version(name) for name in known}
    there = {name: version for name, version in found.items() if version != "not installed"}
    yield ok(", ".join(f"{name} {version}" for name, version in there.items()), versions=there)


@check("packages", "requirements")
def requirements(context: Context) -> Iterator[Finding]:
    """Requirements of rlframework's distributions, and transitively of their dependencies."""
    own = [name for name in OWN if package_version(name) != "not installed"]
    found = list(clashes(own))
    for clash in found:
        if clash.distribution in OWN:
            remedy = f"pip install '{clash.requirement}'"
            yield context.problem(str(clash), remedy, needed=_is_needed(context, clash.distribution))
        else:
            yield warning(
                str(clash),
                f"Install a version that fits {clash.requirement}; `pip check` shows which packages require it",
            )
    if not found:
        yield ok(f"all requirements of {', '.join(own)} are met")


@check("packages", "extras")
def extras(context: Context) -> Iterator[Finding]:
    """Optional features that are not installed."""
    missing = [extra for extra in EXTRAS if list(_unmet(CORE, extra))]
    if missing:
        words = ",".join(missing)
        yield note(f"not installed: {', '.join(missing)}", f"To use them: pip install 'rlframework-core[{words}]'")
    else:
        yield ok(f"all extras are installed: {', '.join(EXTRAS)}")


@check("packages", "name")
def name(context: Context) -> Iterator[Finding]:
    """Whether an unrelated distribution overwrites the package `rlframework`."""
    version = package_version(UNRELATED)
    if version != "not installed":
        yield context.problem(
            f"the unrelated distribution {UNRELATED!r} {version} is installed and overwrites this package",
            f"pip uninstall {UNRELATED}, then reinstall rlframework-core",
            needed=True,
        )


@check("packages", "compilers")
def compilers(context: Context) -> Iterator[Finding]:
    """Compilers for DeepSpeed's offload to disk, which is built on first use."""
    if package_version("deepspeed") == "not installed":
        return
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if not missing:
        yield ok("g++ and ninja are installed")
        return
    text = f"{' and '.join(missing)} not found: DeepSpeed cannot offload to disk (device: nvme); everything else works"
    yield note(text, "To enable it: apt-get install g++; pip install ninja, with its folder on PATH")


def clashes(roots: Iterable[str]) -> Iterator[Clash]:
    """Yield unmet requirements of `roots` and, transitively, of their dependencies, breadth first."""
    waiting, seen = [(root, "") for root in roots], set()
    while waiting:
        distribution, extra = waiting.pop(0)
        if (distribution, extra) in seen:
            continue
        seen.add((distribution, extra))
        for requirement in _required(distribution, extra):
            there = _version(requirement.name)
            if there is None or not requirement.specifier.contains(there, prereleases=True):
                yield Clash(distribution, _plain(requirement), there)
            else:
                name = _normal(requirement.name)
                waiting += [(name, ""), *((name, inner) for inner in sorted(requirement.extras))]


def _unmet(distribution: str, extra: str) -> Iterator[Requirement]:
    for requirement in _required(distribution, extra):
        there = _version(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            yield requirement


@cache
def _required(distribution: str, extra: str = "") -> tuple[Requirement, ...]:
    """The requirements of `distribution` on this machine; with `extra`, only those that it adds."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return ()
    found = []
    for text in texts:
        requirement = Requirement(text)
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if extra:
            wanted = not always and requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        else:
            wanted = always
        if wanted:
            found.append(requirement)
    return tuple(found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plain(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _normal(name: str) -> str:
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def _is_needed(context: Context, distribution: str) -> bool:
    return distribution == CORE or context.uses_backend(distribution.removeprefix("rlframework-"))
