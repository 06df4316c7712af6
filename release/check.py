"""Asks whether this is ready to be published: `make release-check`.

    python release/check.py PYTHON ...

Builds the package. Then, for each Python that is named, installs the wheel into an
empty environment, with all that it requires, and runs a user's program there. Last, it
reads the metadata and the documents. It prints what is missing for a release, and exits
with 1 if anything is. It needs the package index that pip uses.
"""

import argparse
import email.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

import address

ROOT = address.ROOT
PROGRAM = ROOT / "tests" / "typing" / "user_program.py"
VERSION = "import importlib.metadata as m; print(m.version('ga_optax'))"


def run(*command: object, cwd: pathlib.Path) -> str:
    """Runs a command away from the checkout; returns its output, or raises."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    print("$", *command, flush=True)
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, end="", flush=True)
    done.check_returncode()
    return done.stdout


def interpreter(name: str) -> str:
    """The absolute path of a Python, because the commands run in other folders."""
    found = shutil.which(name)
    if found is None:
        raise argparse.ArgumentTypeError(f"there is no program {name!r}")
    return os.path.abspath(found)  # not its target: a link may be an environment's


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the sdist and the wheel; returns the wheel."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    return wheel


def try_out(python: str, wheel: pathlib.Path, version: str) -> list[str]:
    """What goes wrong with the wheel in an empty environment of this Python."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        programs = folder / "empty" / "bin"
        try:
            run(python, "-m", "venv", "empty", cwd=folder)
            run(programs / "python", "-m", "pip", "install", "-q", wheel, cwd=folder)
            run(programs / "python", "-m", "pip", "check", cwd=folder)
            run(programs / "python", PROGRAM, cwd=folder)
            printed = run(programs / "python", "-c", VERSION, cwd=folder)
        except subprocess.CalledProcessError as error:
            return [f"in an empty environment of {python}: {error}"]
    right = printed == f"{version}\n"
    return [] if right else [f"the installed version is {printed!r}, not {version}"]


# -- What is to be read ----------------------------------------------------------------


def wrong_metadata(text: str, release: address.Release) -> list[str]:
    """What is missing in the metadata of the wheel."""
    metadata = email.parser.Parser().parsestr(text)
    wrong = []
    if metadata["Version"] != release.version:
        wrong.append(f"the version is {metadata['Version']}, not {release.version}")
    urls = metadata.get_all("Project-URL") or []
    for name, url in address.project_urls(release).items():
        if f"{name}, {url}" not in urls:
            wrong.append(f"the metadata has no link {name} to {url}")
    targets = address.links(str(metadata.get_payload()))
    wrong += [
        f"a package index cannot follow the link {link!r} of the README"
        for link in dict.fromkeys(targets)
        if not address.is_absolute(link)
    ]
    return wrong if targets else [*wrong, "the README has no links, or is missing"]


def wrong_documents(root: pathlib.Path, release: address.Release) -> list[str]:
    """What is missing in the files of the repository."""
    wrong = []
    if not release.address:
        wrong.append(
            "address is empty: fill it in, in [tool.ga_optax] of pyproject.toml"
        )
    wrong += [
        f"{path.relative_to(root)} is out of date: run python release/address.py"
        for path in address.stale(root)
    ]
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## {re.escape(release.version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(heading, changelog, re.M):
        wrong.append(
            f"CHANGELOG.md must have a heading '## {release.version} (YYYY-MM-DD)'"
        )
    return wrong


def main() -> int:
    """Builds, tries out and reads; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "pythons", nargs="+", type=interpreter, metavar="PYTHON", help="where to try it"
    )
    parser.add_argument("--tag", help="the tag to be published, v and the version")
    args = parser.parse_args()
    release = address.read()
    wrong = wrong_documents(ROOT, release)
    if args.tag not in (None, f"v{release.version}"):
        wrong.append(f"the tag is {args.tag}, but the version is {release.version}")
    if len(args.pythons) < 2:
        wrong.append("only one Python was named: PYTHON_OLDEST=python3.11 adds another")
    with tempfile.TemporaryDirectory() as name:
        wheel = build(pathlib.Path(name))
        with zipfile.ZipFile(wheel) as files:
            [metadata] = [n for n in files.namelist() if n.endswith("/METADATA")]
            wrong += wrong_metadata(files.read(metadata).decode(), release)
        for python in args.pythons:
            wrong += try_out(python, wheel, release.version)
    print("\nReady." if not wrong else "\nNot ready:")
    print("\n".join(f"- {line}" for line in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
