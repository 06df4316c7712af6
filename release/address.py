"""All that follows from the address of the repository, which is in pyproject.toml.

    python release/address.py    # writes it into the documents and the notebooks

`address` in `[tool.ga_optax]` is the web address of the repository, or empty as long as
there is none. Nothing else holds it: this script writes what follows from it.

- In documents: `pip install ga-optax`, or `pip install .` while it is empty.
- In notebooks: the cell that installs the package, and a badge that opens the notebook
  in Colab. While it is empty, the cell installs a wheel that lies beside the notebook,
  or the checkout around it, and there is no badge.
- In CITATION.cff: the version, and the address.
- In the built package, as a metadata hook of Hatch: the project's links, and the README
  with absolute links, because a package index has no other files. The links lead to the
  tag of the version.
"""

import json
import pathlib
import re
import sys
import tomllib
from typing import Any, NamedTuple

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/get_started.md")
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
GITHUB = "https://github.com/"


class Release(NamedTuple):
    """What everything here is computed from.

    Attributes:
      address: such as "https://github.com/owner/name", or empty.
      version: such as "0.1.0".
    """

    address: str
    version: str


def read(root: pathlib.Path = ROOT) -> Release:
    """Reads both from pyproject.toml.

    Raises:
      ValueError: if the address is neither empty nor that of a repository on GitHub.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    address = project["tool"]["ga_optax"]["address"]
    if address and not re.fullmatch(re.escape(GITHUB) + r"[\w.-]+/[\w.-]+", address):
        raise ValueError(
            f"address must be {GITHUB}OWNER/NAME without a final slash, or empty, but "
            f"it is {address!r}. Change it in pyproject.toml."
        )
    return Release(address, project["project"]["version"])


# -- In the package --------------------------------------------------------------------

# Markdown's links and pictures, and HTML's pictures. Pictures have a first group.
LINKS = re.compile(r'(!?)(\[[^\]]*\]\()([^)\s]+)(\))|(<img[^>]*?)( src=")([^"]+)(")')


def links(text: str) -> list[str]:
    """The targets of all links and pictures of a document."""
    return [found[3] or found[7] for found in LINKS.finditer(text)]


def is_absolute(link: str) -> bool:
    """Whether a link leads to the same place from anywhere; one within a page does."""
    return link.startswith(("https://", "http://", "#"))


def with_absolute_links(text: str, release: Release) -> str:
    """The document with all its links leading to the files of this version."""

    def replace(found: re.Match[str]) -> str:
        mark, before, link, after = (
            found.groups()[:4] if found[3] else found.groups()[4:]
        )
        if release.address and not is_absolute(link):
            kind = "raw" if mark else "blob"
            link = f"{release.address}/{kind}/v{release.version}/{link}"
        return f"{mark}{before}{link}{after}"

    return LINKS.sub(replace, text)


def project_urls(release: Release) -> dict[str, str]:
    """The links that a package index shows beside the README."""
    if not release.address:
        return {}
    changelog = f"{release.address}/blob/v{release.version}/CHANGELOG.md"
    return {
        "Homepage": release.address,
        "Changelog": changelog,
        "Issues": f"{release.address}/issues",
    }


class PackageMetadata(MetadataHookInterface):
    """Hatch calls it whenever it builds the package or installs a checkout."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the README and the links."""
        root = pathlib.Path(self.root)
        release = read(root)
        text = (root / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, release)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = project_urls(release)


# -- In the repository -----------------------------------------------------------------


def stamped_document(text: str, release: Release) -> str:
    """A document with the command that installs the package, wherever it has it."""
    name = "ga-optax" if release.address else "."
    return re.sub(
        r'(?<=pip install )("?)(?:\.|ga-optax)(?=[\s`\[])', rf"\1{name}", text
    )


def stamped_citation(text: str, release: Release) -> str:
    """CITATION.cff with the version, and with the address if there is one."""
    text = re.sub(r"^version: .*$", f"version: {release.version}", text, flags=re.M)
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.M)
    line = f'repository-code: "{release.address}"\n' if release.address else ""
    return text + line


def install_cell(extras: str, others: str, release: Release) -> str:
    """The cell that installs the package, where it is not installed, and other ones."""
    find = ["import importlib.util"]
    first = "# Run this cell first: it installs what is missing, and does nothing else."
    what, choose = f"ga-optax{extras} @ git+{release.address}", []
    if not release.address:
        find = ["import glob", *find]
        what = f"{{found[-1]}}{extras}"
        choose = [
            "    # A wheel beside this notebook, or the checkout around it.",
            '    found = ["..", *glob.glob("ga_optax-*.whl")]',
        ]
    test = 'if importlib.util.find_spec("ga_optax") is None:'
    command = f'    %pip install -q "{what}"{others}'
    return "\n".join([first, *find, "", test, *choose, command])


def stamped_notebook(text: str, name: str, release: Release) -> str:
    """A notebook with its install cell, and with its badge if there is an address."""
    notebook = json.loads(text)
    first, install = notebook["cells"][0], notebook["cells"][1]
    source = "".join(first["source"]).partition("\n\n[![")[0]
    if release.address:
        place = release.address.removeprefix(GITHUB)
        target = f"https://colab.research.google.com/github/{place}/blob/main/{name}"
        source += f"\n\n[![Open in Colab]({BADGE})]({target})"
    first["source"] = source.splitlines(keepends=True)

    command = "".join(install["source"])
    extras = (re.search(r"\[\w+\]", command) or [""])[0]
    others = re.search(r'install -q "[^"]*"(.*)', command)
    cell = install_cell(extras, others[1] if others else "", release)
    install["source"] = cell.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def stamped(release: Release, root: pathlib.Path = ROOT) -> dict[pathlib.Path, str]:
    """The files that hold what follows from the address, as they should be."""
    found = {}
    for path in (root / name for name in DOCUMENTS):
        found[path] = stamped_document(path.read_text(encoding="utf-8"), release)
    citation = root / "CITATION.cff"
    found[citation] = stamped_citation(citation.read_text(encoding="utf-8"), release)
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        found[path] = stamped_notebook(text, name, release)
    return found


def stale(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The files that differ from what they should be."""
    files = stamped(read(root), root)
    return [p for p, text in files.items() if p.read_text(encoding="utf-8") != text]


def main() -> int:
    """Writes the files."""
    files = stamped(read())
    for path in stale():
        path.write_text(files[path], encoding="utf-8")
        print("wrote", path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
