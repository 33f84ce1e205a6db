"""Links of the documentation lead somewhere, and its lines are short; pins and action groups are complete."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path for kind in ("*.md", "docs/*.md", "roles/*/*.md", "inventories/*/*.md") for path in sorted(ROOT.glob(kind))
]


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"(?m)^#+ (.*)", text)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{page.name}: {target}#{anchor}"


def test_lines_of_the_documentation_are_short():
    for page in PAGES:
        text = re.sub(r"(?ms)^## Proof$.*?^## ", "", page.read_text())
        assert max(map(len, text.splitlines())) <= 160, page


def test_pins_of_the_controller_are_exact_and_direct_ones_say_what_they_are_for():
    direct, _blank, indirect = (ROOT / "requirements.txt").read_text().partition("\n\n")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+  # .+", line) for line in direct.splitlines()[1:])
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in indirect.splitlines())


def test_the_action_group_has_all_modules():
    groups = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text())["action_groups"]
    assert groups["cluster"] == sorted(path.stem for path in ROOT.glob("plugins/modules/*.py"))
