"""The documentation site builds without a warning, and what it links to is there."""

import html.parser
import importlib.util
import json
import pathlib
import re
import urllib.parse

import pytest
from helpers import python

import ga_optax
import ga_optax.__main__
from ga_optax import accumulator, blocks, config, data, schedules

ROOT = pathlib.Path(__file__).parents[1]
NEEDED = ("sphinx", "myst_nb", "furo", "sphinx_copybutton")

pytestmark = [
    pytest.mark.published,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)),
        reason=f"the site needs {', '.join(NEEDED)}: the group `docs`",
    ),
]


def build(source, target):
    """Runs Sphinx with warnings as errors."""
    options = "-W", "--keep-going", "-q"
    return python("-m", "sphinx", *options, source, target, DOCS_OFFLINE="1")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once."""
    target = tmp_path_factory.mktemp("site")
    run = build(ROOT / "docs", target)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return target


class Page(html.parser.HTMLParser):
    """What a page links to, and where links to it can lead."""

    def __init__(self, text):
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}


def broken_links(folder):
    """`[(page, link)]` of the links inside a site that lead nowhere."""
    pages = {
        path.resolve(): Page(path.read_text("utf-8")) for path in folder.rglob("*.html")
    }
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            name = urllib.parse.unquote(parts.path)
            target = (path.parent / name).resolve() if name else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists() or (
                target in pages and anchor not in pages[target].anchors
            ):
                broken.append((path.name, link))
    return broken


# Sphinx reads 25 pages, in a process of its own.
def test_the_site_builds_without_a_warning_and_every_internal_link_resolves(site):
    assert broken_links(site) == []
    assert sum(len(Page(path.read_text()).links) for path in site.rglob("*.html")) > 500


def search_index(site):
    text = (site / "searchindex.js").read_text("utf-8")
    return json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))


SECTIONS = {  # which a search leads to first
    "nan": ("pitfalls", "a-nan-that-stays"),
    "out of memory": ("pitfalls", "out-of-memory"),
    "batch norm": ("pitfalls", "batch-normalisation"),
    "gradient_accumulation_steps": ("huggingface", "the-trainer"),
    "chunked cross entropy": ("head", "the-head"),
}


@pytest.mark.parametrize("words", SECTIONS)
def test_the_search_leads_to_the_section_first(words, site):
    page, section = SECTIONS[words]
    index = search_index(site)
    [(number, place, is_main)] = index["indexentries"][words]
    assert (index["docnames"][number], is_main) == (page, True)
    text = (site / f"{page}.html").read_text("utf-8")
    before = text.split(f'id="{place}"', 1)[0]
    assert re.findall(r'<section id="([^"]+)"', before)[-1] == section


def test_every_public_name_is_in_the_reference(site):
    anchors = set().union(
        *(Page(p.read_text()).anchors for p in (site / "api").glob("*.html"))
    )
    assert {"module-ga_optax.flax", "module-ga_optax.testing"} <= anchors
    modules = {accumulator, blocks, config, data, schedules}
    for name in ga_optax.__all__:
        if getattr(ga_optax, name) in modules:
            assert f"module-ga_optax.{name}" in anchors
        else:
            assert f"ga_optax.{name}" in anchors, name
    for module in modules:
        for name in module.__all__:
            assert f"{module.__name__}.{name}" in anchors, name


def test_no_signature_spells_out_what_an_array_like_is(site):
    text = "".join(p.read_text("utf-8") for p in (site / "api").glob("*.html"))
    signatures = re.findall(r'class="sig-param">.*?</em>', text, re.S)
    assert len(signatures) > 100
    assert not [s for s in signatures if "ndarray" in s or "SupportsDType" in s]


def test_every_command_is_on_the_page_of_the_command_line(site):
    text = (site / "api" / "command_line.html").read_text("utf-8")
    for name in ga_optax.__main__._COMMANDS:
        assert f"usage: ga-optax {name} " in text
