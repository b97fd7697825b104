"""Checks of installed packages: versions, unmet requirements, missing extras, compilers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlframework.doctor.checks import Context, Finding, check, note, ok, warning
from rlframework.observers.environment import PACKAGES
from rlframework.observers.host import package_version

CORE = "rlframework-core"
OWN = (CORE, "rlframework-dtensor", "rlframework-deepspeed", "rlframework-megatron")
EXTRAS = ("dtensor", "deepspeed", "megatron", "wandb", "mlflow")
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


@check("packages", "versions")
def versions(context: Context) -> Iterator[Finding]:
    """The versions of relevant packages."""
    found = {name: package_version(name) for name in dict.fromkeys([*OWN, *PACKAGES])}
    there = {name: version for name, version in found.items() if version != _MISSING}
    yield ok(", ".join(f"{name} {version}" for name, version in there.items()), facts={"versions": there})


@check("packages", "requirements")
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


@check("packages", "extras")
def extras(context: Context) -> Iterator[Finding]:
    """Optional features that are not installed."""
    missing = [extra for extra in EXTRAS if any(clash for _, clash in _required(CORE, extra))]
    if missing:
        words = ",".join(missing)
        yield note(f"not installed: {', '.join(missing)}", f"To use them: pip install 'rlframework-core[{words}]'")
    else:
        yield ok(f"all extras are installed: {', '.join(EXTRAS)}")


@check("packages", "name")
def name(context: Context) -> Iterator[Finding]:
    """Whether an unrelated distribution overwrites the package `rlframework`."""
    version = package_version(UNRELATED)
    if version != _MISSING:
        text = f"the unrelated distribution {UNRELATED!r} {version} is installed and overwrites this package"
        yield context.problem(text, f"pip uninstall {UNRELATED}, then reinstall rlframework-core", needed=True)


@check("packages", "compilers")
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


def clashes(roots: Iterable[str]) -> Iterator[Clash]:
    """Yield unmet requirements of `roots` and, transitively, of their dependencies, breadth first."""
    waiting = [(root, "") for root in roots]
    for distribution, extra in waiting:  # grows meanwhile
        for requirement, clash in _required(distribution, extra):
            if clash is not None:
                yield clash
                continue
            found = str(canonicalize_name(requirement.name))
            further = [(found, inner) for inner in ("", *sorted(requirement.extras))]
            waiting += [one for one in further if one not in waiting]


@cache
def _required(distribution: str, extra: str) -> list[tuple[Requirement, Clash | None]]:
    """The requirements of `distribution` here, those that `extra` adds if given, each with how it is not met."""
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if (not always and marker is not None and marker.evaluate({"extra": extra})) if extra else always:
            there = package_version(requirement.name)
            met = there != _MISSING and requirement.specifier.contains(there, prereleases=True)
            found.append((requirement, None if met else Clash(distribution, requirement, there)))
    return found
