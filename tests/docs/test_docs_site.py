"""The documentation site builds without a warning, and what it links to is there."""

import html.parser
import importlib.util
import json
import urllib.parse

import pytest
from helpers import ROOT, python

import ga_optax
from ga_optax import accumulator, blocks, config, data

NEEDED = ("sphinx", "myst_nb", "furo", "sphinx_copybutton")

pytestmark = [
    pytest.mark.published,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)),
        reason=f"the site needs {', '.join(NEEDED)}: the group `docs`",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once, with warnings as errors."""
    target = tmp_path_factory.mktemp("site")
    command = "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "docs", target
    run = python(*command, DOCS_OFFLINE="1")
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
    pages = {x.resolve(): Page(x.read_text("utf-8")) for x in folder.rglob("*.html")}
    assert sum(len(page.links) for page in pages.values()) > 500
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            name, anchor = map(urllib.parse.unquote, (parts.path, parts.fragment))
            target = (path.parent / name).resolve() if name else path
            leads = target.exists()
            if target in pages:
                leads = anchor in pages[target].anchors
            if not (leads or parts.scheme or parts.netloc):
                broken.append((path.name, link))
    return broken


def test_the_site_builds_without_a_warning_and_every_internal_link_resolves(site):
    assert broken_links(site) == []


SECTIONS = {  # which a search leads to first, and its name
    "nan": ("pitfalls", "A NaN that stays"),
    "out of memory": ("pitfalls", "Out of memory"),
    "batch norm": ("recipes/vision", "Batch normalisation"),
    "resume": ("resume", "A loop of your own"),
    "batch too large": ("pitfalls", "Out of memory"),
    "dropout": ("recipes/language", "Dropout"),
    "mixed precision": ("recipes/language", "Mixed precision"),
    "multi gpu": ("devices", "One host"),
    "lora": ("recipes/post_training", "LoRA"),
    "fp8": ("recipes/language", "fp8 with delayed scales"),
    "gradient_accumulation_steps": (
        "migrating",
        "Hugging Face: Trainer and Accelerate",
    ),
    "chunked cross entropy": ("head", "The logits"),
    "ctc": ("recipes/language", "CTC: speech, of unequal lengths"),
    "grpo": ("recipes/post_training", "GRPO with packed rows"),
    "hsdp": ("devices", "Replicas of shards (HSDP)"),
    "last batch": ("any_loss", "The last, short batch of an epoch"),
    "sam": ("recipes/vision", "SAM, lookahead and schedule-free"),
    "vendoring": ("maintainers", "Pin it or vendor it"),
    "debug nans": ("maintainers", "Debug NaNs"),
    "diffrax": ("recipes/science", "Diffrax, and loops of Equinox"),
    "numpyro": ("recipes/science", "NumPyro: SVI with plates"),
    "retrieval": ("recipes/vision", "Retrieval with large tables"),
    "long context": ("head", "One long sequence"),
    "host memory": ("memory", "Memory of the host"),
    "gradient accumulation": ("get_started", "The whole batch a call"),
    "clip loss": ("recipes/vision", "CLIP"),
    "clipping": ("pitfalls", "Clipping, decay and schedules"),
    "scan": ("migrating", "From a hand-written scan"),
    "scan over layers": ("memory", "Gradients in place"),
    "fsdp": ("devices", "FSDP"),
    "pinn": ("recipes/science", "Derivatives in the loss (PINN)"),
    "segment_ids": ("recipes/language", "Packed sequences with cu_seqlens"),
    "siglip": ("recipes/vision", "CLIP"),
}


@pytest.mark.parametrize("words", SECTIONS)
def test_the_search_leads_to_the_section_first(words, site):
    page, section = SECTIONS[words]
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))
    [(number, place, is_main)] = index["indexentries"][words]
    assert (index["docnames"][number], is_main) == (page, True)
    # The place is that of a section, so that `search_scorer.js` finds its name.
    assert [number, place] in index["alltitles"][section]
    text = (site / f"{page}.html").read_text("utf-8")
    assert f'<section id="{place}"' in text
    script = (site / "_static/language_data.js").read_text("utf-8")
    assert "result[1] =" in script
    assert "Search.htmlToText =" in script  # summaries of words, not of numbers


def test_every_public_name_is_in_the_reference(site):
    anchors = set().union(
        *(Page(p.read_text()).anchors for p in (site / "api").glob("*.html"))
    )
    modules = [accumulator, blocks, config, data]
    due = {f"module-{module.__name__}" for module in modules}
    due |= {"module-ga_optax.flax", "module-ga_optax.testing"}
    for module in (ga_optax, *modules):
        names = [x for x in module.__all__ if getattr(module, x) not in modules]
        due |= {f"{module.__name__}.{name}" for name in names}
    assert due - anchors == set()
