"""The address of the repository is in one place, and what is published is checked."""

import email.message
import re
import shutil

import pytest
from helpers import ROOT, load

pytest.importorskip("hatchling")

address = load(ROOT / "release" / "address.py")
check = load(ROOT / "release" / "check.py")

HERE = address.read()
EMPTY = HERE._replace(address="")
SOMEWHERE = HERE._replace(address="https://github.com/someone/something")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a release writes to, with an address to be filled in."""
    for name in ("README.md", "CITATION.cff", "CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)

    def fill(value):
        path = tmp_path / "pyproject.toml"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'^address = ".*"', f'address = "{value}"', text, flags=re.M)
        path.write_text(text, encoding="utf-8")
        return tmp_path

    return fill


def write(files):
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


def test_every_file_has_what_follows_from_the_address():
    assert address.stale() == []


def test_a_new_address_reaches_every_file_and_an_empty_one_leaves_no_trace(checkout):
    root = checkout(SOMEWHERE.address)
    before = address.stamped(EMPTY, root)
    write(before)
    write(address.stamped(SOMEWHERE, root))
    assert address.stale(root) == []
    for path, text in before.items():
        filled = path.read_text(encoding="utf-8")
        assert filled != text, path
        assert SOMEWHERE.address not in text
    write(address.stamped(EMPTY, root))
    assert {path: path.read_text(encoding="utf-8") for path in before} == before


def test_on_a_package_index_every_link_of_the_readme_is_absolute_and_leads_to_a_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    published = address.with_absolute_links(text, SOMEWHERE)
    message = email.message.Message()
    message["Version"] = HERE.version
    for name, url in address.project_urls(SOMEWHERE).items():
        message["Project-URL"] = f"{name}, {url}"
    message.set_payload(published)
    assert check.wrong_metadata(message.as_string(), SOMEWHERE) == []
    tagged = rf"^{SOMEWHERE.address}/(?:blob|raw)/v{HERE.version}/([^#\n]*)"
    paths = re.findall(tagged, "\n".join(address.links(published)), re.M)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    pictures = [link for link in address.links(published) if link.endswith(".svg")]
    assert pictures
    assert all("/raw/" in link for link in pictures)


def test_what_speaks_of_a_release_says_that_there_is_none_until_there_is_one():
    names = "SECURITY.md", "docs/maintainers.md", "pyproject.toml", "CHANGELOG.md"
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    says = [name for name, text in texts.items() if "not released" in text]
    assert says == ([] if HERE.address else list(names))
