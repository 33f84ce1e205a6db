"""Configuration of sphinx for the documentation site: make site."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from docutils import nodes

ANSIBLE = "https://docs.ansible.com/projects/ansible/latest/"
LABELS = {
    "action_plugins": "plugins/action.html#action-plugins",
    "ansible_configuration_settings": "reference_appendices/config.html#ansible-configuration-settings",
    "common_return_values": "reference_appendices/common_return_values.html#common-return-values",
    "list_of_collections": "collections/index.html#list-of-collections",
}
"""Pages for the labels in Ansible's documentation that antsibull-docs refers to. The site is built without a network."""
REPOSITORY = "https://github.com/llamacpp-cluster/llamacpp.cluster"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)\s]*)?)\)")

project = "llamacpp.cluster"
author = copyright = "llamacpp.cluster contributors"
extensions = ["myst_parser", "sphinx_antsibull_ext"]
root_doc = "index"
html_theme = "sphinx_ansible_theme"
html_theme_options = {"topbar_links": {"Repository": REPOSITORY, "Ansible": "https://docs.ansible.com/"}}
html_short_title = project
html_title = project
html_show_sphinx = False
html_use_index = False
html_copy_source = False
pygments_style = "ansible"
highlight_language = "text"
default_role = "any"
nitpicky = True
myst_heading_anchors = 4


def _link_rewriter(docname: str, site_pages: set[str]):
    """Return a function that replaces links to files outside the site with their addresses in the repository."""
    folder = PurePosixPath(docname).parent

    def replace(link: re.Match[str]) -> str:
        parts: list[str] = []
        for part in (folder / link[1]).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = "/".join(parts)
        is_on_site = path.endswith(".png") or path.removesuffix(".md") in site_pages
        return link[0] if is_on_site else f"]({REPOSITORY}/blob/main/{path}{link[2]})"

    return replace


def _rewrite_links(app, docname: str, content: list[str]) -> None:
    if app.env.doc2path(docname, base=False).suffix == ".md":
        content[0] = LINK.sub(_link_rewriter(docname, app.env.found_docs), content[0])


def _ansible_reference(_app, _env, node, content):
    """Return a reference to Ansible's documentation; None if the label is unknown."""
    if node["reftarget"] in LABELS:
        return nodes.reference("", "", content, refuri=ANSIBLE + LABELS[node["reftarget"]], internal=False)
    return None


def setup(app) -> None:
    app.connect("source-read", _rewrite_links)
    app.connect("missing-reference", _ansible_reference)
