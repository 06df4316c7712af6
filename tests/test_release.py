"""The address of the repository is in one place, and what is published is checked."""

import email.message
import json
import pathlib
import re
import shutil
import subprocess
import sys

import helpers
import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("hatchling")

ROOT = pathlib.Path(__file__).parents[1]
address = helpers.load(ROOT / "release" / "address.py")
check = helpers.load(ROOT / "release" / "check.py")

HERE = address.read()
EMPTY = HERE._replace(address="")
SOMEWHERE = HERE._replace(address="https://github.com/someone/something")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a release writes to, with an address to be filled in."""
    for name in ("README.md", "CITATION.cff", "CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", symlinks=True)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")

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


# -- One place -------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("release", "what", "badges"),
    [
        (EMPTY, r'"\{found\[-1\]\}(\[\w+\])?"', 0),
        (SOMEWHERE, rf'"ga-optax(\[\w+\])? @ git\+{SOMEWHERE.address}"', 1),
    ],
    ids=["empty", "filled"],
)
def test_each_notebook_installs_the_package_if_it_is_not_there(release, what, badges):
    for path, text in address.stamped(release).items():
        if path.suffix == ".ipynb":
            first, install, *_ = json.loads(text)["cells"]
            guard, *found, command = "".join(install["source"]).split("\n    ")
            assert guard.endswith('if importlib.util.find_spec("ga_optax") is None:')
            wheel = 'found = ["..", *glob.glob("ga_optax-*.whl")]'
            assert found[1:] == ([] if badges else [wheel])
            assert re.match(rf"%pip install -q {what}( [a-z-]+)*$", command)
            shown = "".join(first["source"])
            assert shown.count(address.BADGE) == badges
            place = f"/github/someone/something/blob/main/notebooks/{path.name})"
            assert shown.count(place) == badges


def test_the_citation_is_of_this_version():
    for release in (EMPTY, SOMEWHERE):
        [text] = (t for p, t in address.stamped(release).items() if p.suffix == ".cff")
        citation = yaml.safe_load(text)
        assert citation["version"] == HERE.version
        assert citation.get("repository-code", "") == release.address
        assert {"cff-version", "title", "authors", "message"} <= set(citation)


@pytest.mark.parametrize(
    "wrong", ["github.com/a/b", "https://github.com/a/b/", "https://example.com/a/b"]
)
def test_what_is_no_address_is_refused(wrong, checkout):
    root = checkout(wrong)
    with pytest.raises(ValueError, match=re.escape(repr(wrong))):
        address.read(root)


# -- The README on a package index -----------------------------------------------------


def metadata(release, readme):
    message = email.message.Message()
    message["Version"] = release.version
    for name, url in address.project_urls(release).items():
        message["Project-URL"] = f"{name}, {url}"
    message.set_payload(readme)
    return message.as_string()


def test_on_a_package_index_every_link_of_the_readme_is_absolute_and_leads_to_a_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    published = address.with_absolute_links(text, SOMEWHERE)
    assert check.wrong_metadata(metadata(SOMEWHERE, published), SOMEWHERE) == []
    tagged = f"{SOMEWHERE.address}/(?:blob|raw)/v{HERE.version}/(.*)"
    found = [re.fullmatch(tagged, link) for link in address.links(published)]
    paths = [match[1].partition("#")[0] for match in found if match]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    pictures = [link for link in address.links(published) if link.endswith(".svg")]
    assert pictures
    assert all("/raw/" in link for link in pictures)


@pytest.mark.parametrize(
    ("readme", "word"),
    [
        ("[a](https://x.org) [page](docs/page.md)", "docs/page.md"),
        ('![a](#b) <img width="9" src="docs/picture.svg">', "docs/picture.svg"),
        ("nothing", "no links"),
    ],
)
def test_a_link_that_leads_nowhere_or_another_version_is_found(readme, word):
    """The twin."""
    [wrong] = check.wrong_metadata(metadata(SOMEWHERE, readme), SOMEWHERE)
    assert word in wrong
    text = metadata(EMPTY._replace(version="9"), "[a](https://x.org)")
    wrong = check.wrong_metadata(text, SOMEWHERE)
    assert len(wrong) == 1 + len(address.project_urls(SOMEWHERE))


# -- What stops a release --------------------------------------------------------------


def test_it_stops_until_the_address_the_files_and_the_date_are_there(checkout):
    root = checkout("")
    assert any("is empty" in line for line in check.wrong_documents(root, EMPTY))
    root = checkout(SOMEWHERE.address)
    stale = [
        line for line in check.wrong_documents(root, SOMEWHERE) if "out of" in line
    ]
    assert len(stale) == len(address.stamped(SOMEWHERE, root))
    write(address.stamped(SOMEWHERE, root))
    path = root / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(f"## {HERE.version} (not released)\n", encoding="utf-8")
    [undated] = check.wrong_documents(root, SOMEWHERE)
    assert "YYYY-MM-DD" in undated
    dated = text.replace("(not released)", "(2030-01-31)")
    path.write_text(dated, encoding="utf-8")
    assert check.wrong_documents(root, SOMEWHERE) == []


def test_the_address_reaches_the_built_package(checkout, tmp_path):
    root = checkout(SOMEWHERE.address)
    shutil.copytree(ROOT / "release", root / "release")
    (root / "ga_optax").mkdir()
    (root / "ga_optax" / "__init__.py").touch()
    shutil.copy(ROOT / "LICENSE", root)
    command = [sys.executable, "-m", "hatchling", "metadata"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["urls"] == address.project_urls(SOMEWHERE)
    targets = address.links(found["readme"]["text"])
    assert targets
    assert all(map(address.is_absolute, targets))
