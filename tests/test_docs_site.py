"""The documentation site builds without a warning, and what it links to is there.

Where there is a Chromium, it opens the site, searches, and follows what it finds.
"""

import contextlib
import functools
import html.parser
import http.server
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse

import pytest

import ga_optax
import ga_optax.__main__
from ga_optax import accumulator, blocks, config, data, schedules

ROOT = pathlib.Path(__file__).parents[1]
NEEDED = ("sphinx", "myst_nb", "furo", "sphinx_copybutton")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")

pytestmark = [
    pytest.mark.published,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)),
        reason=f"the site needs {', '.join(NEEDED)}: the group `docs`",
    ),
]


def build(source, target):
    """Runs Sphinx with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", source, target],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DOCS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once."""
    target = tmp_path_factory.mktemp("site")
    run = build(ROOT / "docs", target)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return target


class Page(html.parser.HTMLParser):
    """What a page links to, where links to it can lead, and its search."""

    def __init__(self, text):
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {""}
        self.forms, self.fields, self.results = [], set(), []
        self.within = False  # the results of a search
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}
        self.forms += [found] if tag == "form" else []
        self.fields |= {found.get("name")} if tag == "input" else set()
        self.within |= found.get("id") == "search-results"
        if self.within and tag == "a":
            self.results.append(found["href"])

    def handle_endtag(self, tag):
        self.within &= tag != "article"


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


def test_a_link_that_leads_nowhere_is_found(site, tmp_path):
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    page = tmp_path / "guide.html"
    text = page.read_text("utf-8")
    for link in ("nowhere.html", "memory.html#nowhere", "#nowhere"):
        page.write_text(text.replace("</article>", f'<a href="{link}">x</a></article>'))
        assert broken_links(tmp_path) == [("guide.html", link)]


def test_the_search_index_knows_multi_steps_and_its_page(site):
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))
    titles = [entry[-1] for entry in index["objects"]["ga_optax"]]
    assert "MultiSteps" in titles
    page = next(e for e in index["objects"]["ga_optax"] if e[-1] == "MultiSteps")[0]
    assert index["docnames"][page] == "api/across_calls"


def found_by_search(site, words):
    """The pages that have all of these words, as Sphinx's search sees it."""
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))
    import sphinx.search.en  # where the site can be built

    language = sphinx.search.en.SearchEnglish({})
    pages = set(index["docnames"])
    for word in words.lower().split():
        hits = set()
        if word in language.stopwords:
            continue
        for where in ("terms", "titleterms"):
            found = index[where].get(language.stem(word), [])
            hits |= set(found) if isinstance(found, list) else {found}
        pages &= {index["docnames"][i] for i in hits}
    return pages


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("huggingface", "huggingface"),
        ("gradient_accumulation_steps", "huggingface"),
        ("num_items_in_batch", "huggingface"),
        ("accumulate_grad_batches", "migrating"),
        ("zero_grad", "migrating"),
        ("no_sync", "migrating"),
        ("nan", "pitfalls"),
        ("out of memory", "pitfalls"),
        ("batch norm", "pitfalls"),
        ("clip", "pitfalls"),
        ("clip", "recipes"),
        ("disable", "switch"),
    ],
)
def test_the_search_finds_the_page_that_answers(words, page, site):
    assert page in found_by_search(site, words)
    assert found_by_search(site, "nothingofthiskind") == set()


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


def test_a_signature_has_types_and_a_link_to_its_source(site):
    text = (site / "api" / "inside_a_call.html").read_text("utf-8")
    found = re.search(r'id="ga_optax.value_and_grad">(.*?)</dt>', text, re.S)
    plain = re.sub(r"<[^>]+>|\s+", "", found[1])
    assert "num_microbatches:int|None=None,*,microbatch_size:int|None=None,arg" in plain
    assert "accumulator_dtype:DTypeLike|None=jnp.float32," in plain
    assert "_modules/ga_optax/_calls/gradients.html#value_and_grad" in found[1]


def test_a_metaclass_hides_no_signature(site):
    text = (site / "api" / "flax.html").read_text("utf-8")
    found = re.search(r'id="ga_optax.flax.Optimizer">(.*?)</dt>', text, re.S)
    assert "(model,tx,*,wrt," in re.sub(r"<[^>]+>|\s+", "", found[1])


def test_no_signature_spells_out_what_an_array_like_is(site):
    text = "".join(p.read_text("utf-8") for p in (site / "api").glob("*.html"))
    signatures = re.findall(r'class="sig-param">.*?</em>', text, re.S)
    assert len(signatures) > 100
    assert not [s for s in signatures if "ndarray" in s or "SupportsDType" in s]


def test_the_front_page_installs_shows_the_idea_and_copies_code(site):
    text = (site / "index.html").read_text("utf-8")
    assert re.search(r"pip install \S+", re.sub(r"<[^>]+>", "", text))
    page = Page(text)
    assert any(link.endswith("idea.svg") for link in page.links)
    for name in ("favicon.svg", "tables.css", "copybutton.js"):
        [link] = (link for link in page.links if name in link)
        assert (site / link.partition("?")[0]).exists()


def test_what_make_docs_writes_is_ignored_by_git():
    """The notebooks' pictures, too, which come into the folder above the site."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    [target] = re.findall(r"sphinx .* docs (\S+)", makefile)
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert f"{pathlib.PurePath(target).parent}/" in ignored


def test_every_command_is_on_the_page_of_the_command_line(site):
    text = (site / "api" / "command_line.html").read_text("utf-8")
    for name in ga_optax.__main__._COMMANDS:
        assert f"usage: ga-optax {name} " in text


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("{py:func}`ga_optax.nothing`", "reference target not found: ga_optax.nothing"),
        ("[a page](nothing.md)", "cross-reference target not found"),
        ("[a heading](#nothing)", "cross-reference target not found"),
    ],
)
def test_a_page_with_a_reference_to_nothing_does_not_build(text, warning, tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs" / "_ext", docs / "_ext")
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    shutil.copytree(ROOT / "docs" / "_static", docs / "_static")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (docs / "index.md").write_text(f"# A page\n\n{text}\n")
    run = build(docs, tmp_path / "site")
    assert run.returncode != 0
    assert warning in run.stderr


# -- In a browser ----------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, format, *args):  # noqa: A002  # its name in the base
        del format, args


@contextlib.contextmanager
def serve(folder):
    """The address at which a folder is served."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def browse(address, profile, *options):
    """The document at an address, after its scripts have run."""
    run = subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", f"--user-data-dir={profile}"),
            *("--virtual-time-budget=10000", *options, "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return Page(run.stdout)


def search(site, word, profile):
    """What the search box on the front page leads to: `[(address, text)]`."""
    front = browse(site, profile)
    (form,) = {form["action"]: form for form in front.forms}.values()
    assert form["method"] == "get"
    assert "q" in front.fields
    address = urllib.parse.urljoin(site, form["action"])
    found = browse(f"{address}?{urllib.parse.urlencode({'q': word})}", profile)
    return [urllib.parse.urljoin(address, link) for link in found.results]


@pytest.mark.skipif(not BROWSER, reason=f"needs one of {', '.join(BROWSERS)}")
def test_a_browser_finds_multi_steps_and_lands_on_its_page(site, tmp_path):
    with serve(site) as address:
        assert search(address, "nothingofthiskind", tmp_path) == []
        results = search(address, "MultiSteps", tmp_path)
        first = urllib.parse.urlsplit(results[0])
        assert first.path == "/api/across_calls.html"
        assert first.fragment == "ga_optax.MultiSteps"
        page = browse(results[0], tmp_path)
        assert first.fragment in page.anchors
