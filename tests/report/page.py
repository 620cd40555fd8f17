"""Parser of the report pages of runs."""

from __future__ import annotations

from html.parser import HTMLParser

from detr_bf.report import page

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Text, tags and links of a page; fails if tags are not closed in order, or a script is not ours."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []  # without those of places on the page
        self.ids: list[str] = []
        self.places: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert not self.open, f"not closed: {self.open}"
        assert len(set(self.ids)) == len(self.ids), "ids are unique"
        assert set(self.places) <= set(self.ids), "links lead to a place on the page"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert name != "style", "style attributes are forbidden by the content security policy"
            assert not name.startswith("on"), "scripts in attributes are forbidden too"
            if name == "id":
                self.ids.append(value or "")
            elif name == "href" and (value or "").startswith("#"):
                self.places.append((value or "")[1:])
            elif name in ("src", "href"):
                self.addresses.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            assert data == page.SCRIPT
        elif self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data.strip())
