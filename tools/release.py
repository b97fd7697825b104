"""Build the release of the commit that is checked out: wheels, documentation, checksums, a signature, the notes.

    make release KEY=~/.ssh/id_ed25519      # dist/VERSION: *.whl, *.zip, SHA256SUMS, SHA256SUMS.sig, NOTES.md

Wheels are built from an export of the commit, so that no other file gets in, and twice, to see that anybody who builds
this commit with the same hatchling gets the same checksums. The documentation is the site as an archive, for people who
have no clone, with the folder `examples`: messages and pages name both. The signature is one of `ssh-keygen`, over the
checksums; `VERIFY` below is how users check it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMESPACE = "rlframework-release"
VERIFY = """\
sha256sum --check SHA256SUMS
ssh-keygen -Y verify -f allowed_signers -I SIGNER -n {namespace} -s SHA256SUMS.sig < SHA256SUMS
"""


class ReleaseError(Exception):
    """The commit cannot be released as it is; the message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the release that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key", type=Path, help="private SSH key that signs the checksums; without it, no signature")
    parser.add_argument("--output", type=Path, help="new folder for the files [default: dist/VERSION]")
    options = parser.parse_args(arguments)
    try:
        folder = release(ROOT, options.output, options.key)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*sorted(path.name for path in folder.iterdir()), sep="\n")
    print(f"\nin {folder}. To check them, beside the file `allowed_signers` with the signer's public key:\n")
    print(VERIFY.format(namespace=NAMESPACE))
    return 0


def release(root: Path, output: Path | None = None, key: Path | None = None) -> Path:
    """Build the release of the commit of `root` into `output`, which must not exist, and return that folder."""
    if changes := git(root, "status", "--porcelain"):
        raise ReleaseError(f"these files are not as in the commit; commit or remove them:\n{changes}")
    version = version_of(root)
    text = notes(root.joinpath("CHANGELOG.md").read_text(), version)
    folder = output or root / "dist" / version
    if folder.exists():
        raise ReleaseError(f"{folder} exists: remove it, or name another folder with --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new, again = (build(root, Path(scratch) / name, version) for name in ("wheels", "again"))
        if checksums(new) != checksums(again):
            raise ReleaseError(f"two builds of one commit differ:\n{checksums(new)}\n{checksums(again)}")
        archive_site(new.with_suffix(".source"), new / f"rlframework-docs-{version}.zip")
        (new / "SHA256SUMS").write_text(checksums(new))
        (new / "NOTES.md").write_text(text)
        if key is not None:
            sign(new / "SHA256SUMS", key)
        new.rename(folder)
    return folder


def version_of(root: Path) -> str:
    """The version of core, which all distributions share."""
    [version] = re.findall(r'^__version__ = "(.+)"$', (root / "rlframework" / "__init__.py").read_text(), re.MULTILINE)
    return str(version)


def notes(changelog: str, version: str) -> str:
    """The section of `version`, which must be the newest one of the changelog: nothing is left as unreleased."""
    _, *sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    title, _, text = sections[0].partition("\n")
    if title.split()[0] != version:
        raise ReleaseError(
            f"the first section of CHANGELOG.md is {title!r}, and `__version__` of rlframework is {version}: "
            f"name the section `## {version}`, or change the version"
        )
    return text.strip() + "\n"


def build(root: Path, folder: Path, version: str) -> Path:
    """Build the wheel of each distribution from an export of the commit of `root`; return `folder` with the wheels."""
    source = folder.with_suffix(".source")
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
    command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    epoch = git(root, "log", "-1", "--format=%ct")
    done = subprocess.run(
        [*command, str(source), *(str(project.parent) for project in sorted(source.glob("plugins/*/pyproject.toml")))],
        env=os.environ | {"SOURCE_DATE_EPOCH": epoch},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ReleaseError(f"the wheels cannot be built:\n{done.stderr.strip()}")
    strange = [path.name for path in folder.iterdir() if path.name.split("-")[1] != version]
    if strange:
        raise ReleaseError(f"all distributions have one version, and core's is {version}: {', '.join(strange)}")
    return folder


def archive_site(source: Path, archive: Path) -> None:
    """Build the site of the pages in `source`, to be opened from disk; write it to `archive` with the examples."""
    site = source / "build" / archive.stem
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(
        command, cwd=source, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"the documentation cannot be built:\n{done.stderr.strip()}")
    shutil.copytree(source / "examples", site / "examples")
    shutil.make_archive(str(archive.with_suffix("")), "zip", site.parent, site.name)


def checksums(folder: Path) -> str:
    """SHA-256 and name of each wheel and archive, as `sha256sum` writes and checks them."""
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.zip")])
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def sign(path: Path, key: Path) -> None:
    """Write the signature of the file at `path` beside it, as `path` with `.sig`."""
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{key} cannot sign: {done.stderr.strip()}")


def git(root: Path, *arguments: str) -> str:
    """Run git in `root` and return its output, without surrounding whitespace."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
