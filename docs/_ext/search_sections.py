"""Search results of index entries lead to their section, by its name.

<!-- index: nan, inf -->

A page has its entries in comments before a section, which a viewer of Markdown does not
show. Sphinx gives an entry a target of its own, and a search shows it with the title of
the page. Here it gets the target of the section that it stands before, and
`search_scorer.js` shows the title of that section.
"""

import re

from docutils import nodes
from sphinx import addnodes


def read_entries(app, name, source):
    """Makes a directive of each comment with entries; all are main entries."""
    del app, name

    def directive(match):
        words = match[1].split(", ")
        return f"```{{index}} {', '.join(f'! {word}' for word in words)}\n```"

    source[0] = re.sub(r"^<!-- index: (.*) -->$", directive, source[0], flags=re.M)


def lead_to_sections(app, doctree, name):
    """Replaces the targets of the index entries of a page."""
    del app, name
    place = {
        target: section["ids"][0]
        for section in doctree.findall(nodes.section)
        for target in section["ids"]
    }
    for node in doctree.findall(addnodes.index):
        node["entries"] = [
            (kind, value, place.get(target, target), *rest)
            for kind, value, target, *rest in node["entries"]
        ]


def setup(app):
    """Connects the functions above."""
    app.connect("source-read", read_entries)
    app.connect("doctree-resolved", lead_to_sections)
    return {"parallel_read_safe": True}
