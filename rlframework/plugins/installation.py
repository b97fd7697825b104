"""Checks how the distribution of a plugin is installed: once, and beside the version of core that it requires."""

from __future__ import annotations

from collections import defaultdict
from importlib import metadata
from pathlib import Path

from rlframework.base.errors import PluginError

CORE = "rlframework-core"


def installation_error(distribution: metadata.PackageMetadata, core_version: str) -> PluginError | None:
    """Return why plugins of the distribution cannot be trusted to be what its metadata says, or None.

    They are not imported then: which of two versions they are is unknown, or they were written for another core.
    """
    return _installed_twice(distribution["Name"]) or _of_another_core(distribution, core_version)


def _installed_twice(name: str) -> PluginError | None:
    """The error about several versions in one folder, of which Python takes any. A folder before another hides it."""
    copies = list(metadata.distributions(name=name))
    if len(copies) == 1:
        return None
    folders: dict[Path, set[str]] = defaultdict(set)
    for copy in copies:
        folders[Path(str(copy.locate_file(""))).resolve()].add(copy.version)
    for folder, versions in folders.items():
        if len(versions) > 1:
            return PluginError(
                f"{name} is installed {len(versions)} times in {folder}: {' and '.join(sorted(versions))}; "
                f"run `pip uninstall {name}` until none is left, and install one"
            )
    return None


def _of_another_core(distribution: metadata.PackageMetadata, core_version: str) -> PluginError | None:
    """The error about a requirement of core that the installed one does not meet."""
    wanted = [line for line in distribution.get_all("Requires-Dist") or () if _canonical(line).startswith(CORE)]
    if not wanted or wanted == [f"{CORE}=={core_version}"]:  # as distributions of this repository are released
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # of transformers; seldom needed, and 30 ms

    subject = f"{distribution['Name']} {distribution['Version']} requires"
    for line in wanted:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return PluginError(f"{subject} {line!r}, which is no requirement; install another version of it")
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or _canonical(requirement.name) != CORE:
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            return PluginError(
                f"{subject} {CORE}{requirement.specifier}, but {CORE} {core_version} is installed; install versions "
                f"that belong together: pip install --upgrade {CORE} {distribution['Name']}"
            )
    return None


def _canonical(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
