"""Reading a report page: its elements, and that it is one sound file that asks for nothing else."""

import html.parser
import re

SECTIONS = "table fidelity pictures bytes density discrepancy pruning stability".split()
VOID = {"meta", "link", "img", "input", "br"}


class Page(html.parser.HTMLParser):
    """Tags, ids, addresses, texts and unbalanced elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.resources, self.open, self.unbalanced = [], [], [], [], []
        self.texts, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.ids += [v for k, v in attrs if k == "id"]
        self.resources += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def check_self_contained(text):
    found = Page(text)
    assert not found.unbalanced and not found.open
    assert len(set(found.ids)) == len(found.ids) and set(SECTIONS) <= set(found.ids)
    assert all(r.startswith(("data:", "#")) for r in found.resources), found.resources
    styles = text.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in styles and not re.search(r"url\((?!data:)", styles)
    return found
