"""Names of this library lead to the API: `ga.plan` in backticks, once a section."""

import re

from docutils import nodes
from sphinx import addnodes


def link(app, doctree):
    """Makes a reference of each such name; Sphinx leaves code what the API has not."""
    linked = set()
    for node in [*doctree.findall(nodes.literal)]:
        name, section = node.astext(), node.parent
        while section and not isinstance(section, nodes.section | nodes.title):
            section = section.parent
        is_title = isinstance(section, nodes.title)
        if is_title or isinstance(node.parent, nodes.reference | addnodes.pending_xref):
            continue
        if re.fullmatch(r"ga(\.\w+)+", name) and (section, name) not in linked:
            linked.add((section, name))
            target = {"reftarget": f"ga_optax{name[2:]}", "refdoc": app.env.docname}
            found = addnodes.pending_xref("", refdomain="py", reftype="obj", **target)
            node.replace_self(found)
            found += node


def setup(app):
    """Connects the function above."""
    app.connect("doctree-read", link)
    return {"parallel_read_safe": True}
