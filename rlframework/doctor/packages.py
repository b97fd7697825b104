"""Installed packages: versions, requirements that are not met, extras that are missing, compilers."""

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
STRANGER = "rlframework"
"""A distribution on PyPI that is not this project's and has a package of the same name."""


@dataclass(frozen=True)
class Clash:
    """A requirement of a distribution that what is installed does not meet; `there`: a version, or None."""

    distribution: str
    requirement: str
    there: str | None

    def __str__(self) -> str:
        there = "is not installed" if self.there is None else f"{self.there} is installed"
        return f"{self.distribution} needs {self.requirement}, and {there}"


@check("packages", "versions")
def versions(context: Context) -> Iterator[Finding]:
    """Of the packages that matter."""
    known = dict.fromkeys([*OWN, *PACKAGES])
    found = {name: package_version(name) for name in known}
    there = {name: version for name, version in found.items() if version != "not installed"}
    yield ok(", ".join(f"{name} {version}" for name, version in there.items()), versions=there)


@check("packages", "requirements")
def requirements(context: Context) -> Iterator[Finding]:
    """What our distributions need, and what those need in turn."""
    own = [name for name in OWN if package_version(name) != "not installed"]
    found = list(clashes(own))
    for clash in found:
        if clash.distribution in OWN:
            remedy = f"pip install '{clash.requirement}'"
            yield context.problem(str(clash), remedy, needed=_is_needed(context, clash.distribution))
        else:
            yield warning(
                str(clash), f"Install a version that both take, or find who asks: pip check; {clash.requirement}"
            )
    if not found:
        yield ok(f"what {', '.join(own)} and their packages need is installed")


@check("packages", "extras")
def extras(context: Context) -> Iterator[Finding]:
    """Parts that are installed on demand."""
    missing = [extra for extra in EXTRAS if list(_unmet(CORE, extra))]
    if missing:
        words = ",".join(missing)
        yield note(f"not installed: {', '.join(missing)}", f"To use them: pip install 'rlframework-core[{words}]'")
    else:
        yield ok(f"all are installed: {', '.join(EXTRAS)}")


@check("packages", "name")
def name(context: Context) -> Iterator[Finding]:
    """A stranger's package of the same import name would overwrite ours."""
    version = package_version(STRANGER)
    if version != "not installed":
        yield context.problem(
            f"the distribution {STRANGER!r} {version} is installed, which is not this project's",
            f"pip uninstall {STRANGER}, then install rlframework-core again",
            needed=True,
        )


@check("packages", "compilers")
def compilers(context: Context) -> Iterator[Finding]:
    """DeepSpeed builds its way to a disk when it is first used, and nothing else that is used here."""
    if package_version("deepspeed") == "not installed":
        return
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if not missing:
        yield ok("g++ and ninja are there")
        return
    text = f"{' and '.join(missing)} not found: DeepSpeed cannot offload to a disk (device: nvme); it trains without"
    yield note(text, "To do so: apt-get install g++; pip install ninja, with its folder on PATH")


def clashes(roots: Iterable[str]) -> Iterator[Clash]:
    """Requirements that are not met, of `roots` and of all that they need, the nearest first."""
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
    """What `distribution` needs here; with `extra`: what that adds."""
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
