"""The pages' tables of fields are what the classes declare."""

from __future__ import annotations

from tests.vectors.generate_message_tables import KINDS, PAGES, text


def test_the_tables_are_those_of_the_classes_and_each_class_has_one() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert pages == [text(page) for page in PAGES]
    for kind in KINDS:
        assert f"<!-- fields: {kind.__name__} -->" in "".join(pages)
