"""An operator's catalogue: as people and publishers write lists of items."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.errors import AggregatorError
from aggregator.task.file import read_catalogue_file, understood_catalogue

FILES: dict[str, tuple[bytes, tuple[str, ...], tuple[str, ...]]] = {
    "ids": (b"f1\nf2\n\n", ("f1", "f2"), ("", "")),
    "ids with commas, here and there": (
        b"Godfather, The\nAlien\n",
        ("Godfather, The", "Alien"),
        ("", ""),
    ),
    "ids and titles": (b"f1\tOne\nf2\n", ("f1", "f2"), ("One", "")),
    "a mark": ("\ufefff1\tOne\nf2\tTwo\n".encode(), ("f1", "f2"), ("One", "Two")),
    "U+2028": (
        "f1\tPart one\u2028Part two\nf2\tTwo\n".encode(),
        ("f1", "f2"),
        ("Part one Part two", "Two"),
    ),
    "a form feed": (b"f1\ta\x0cb\nf2\tTwo\n", ("f1", "f2"), ("a b", "Two")),
    "a header": (b"item\ttitle\r\nf1\tOne\r\n", ("f1",), ("One",)),
    "files put together": (
        b"item,title\nf1,One\nitem,title\nf2,title\n",
        ("f1", "f2"),
        ("One", "title"),
    ),
    "a header of ids": (b"item_id\nf1\nf2\n", ("f1", "f2"), ("", "")),
    "UTF-16": ("f1\tÉté\n".encode("utf-16"), ("f1",), ("Été",)),
    "quotes": (
        b'id,title\nf1,"One,\ntwo"\nf2,"Say ""x"""\n',
        ("f1", "f2"),
        ("One, two", 'Say "x"'),
    ),
    "titles with the separator": (
        b"title,movieId\nAmerican President, The,11\nAlien,12\n",
        ("11", "12"),
        ("American President, The", "Alien"),
    ),
    "an export of Excel's": (b"sep=;\nid;title\nf1;One\n", ("f1",), ("One",)),
    "a first title that may be a name": (b"f1\ttitle\nf2\tx\n", ("f1", "f2"), ("title", "x")),
    "goodbooks-10k, books.csv": (
        b"book_id,goodreads_book_id,isbn,title\n1,2767052,439023483,The Hunger Games\n",
        ("1",),
        ("The Hunger Games",),
    ),
    "a tab in a title": (
        b"f1\tOne\ttwo\nf2\tTwo\nf3\tThree\n",
        ("f1", "f2", "f3"),
        ("One two", "Two", "Three"),
    ),
    "MovieLens 100K, u.item": (
        b"1|Toy Story (1995)|01-Jan-1995||http://x|0|0\n"
        b'2|"Caf\xe9" II (1995)|01-Jan-1995||http://y|0|1\n',
        ("1", "2"),
        ("Toy Story (1995)", '"Café" II (1995)'),
    ),
    "MovieLens 1M, movies.dat": (
        b"1::Toy Story (1995)::Animation|Children's\n2::Jumanji (1995)::Adventure\n",
        ("1", "2"),
        ("Toy Story (1995)", "Jumanji (1995)"),
    ),
    "MovieLens latest, movies.csv": (
        b"movieId,title,genres\r\n1,Toy Story (1995),Adventure\r\n"
        b'11,"American President, The",Comedy\r\n',
        ("1", "11"),
        ("Toy Story (1995)", "American President, The"),
    ),
    "Last.fm HetRec, artists.dat": (
        b"id\tname\turl\tpictureURL\n1\tMALICE MIZER\thttp://a\thttp://b\n2\tDiary\thttp://c\t\n",
        ("1", "2"),
        ("MALICE MIZER", "Diary"),
    ),
    "Book-Crossing, BX-Books.csv": (
        b'"ISBN";"Book-Title";"Book-Author"\n"0195153448";"Classical; Mythology";"M"\n'
        b'"0002005018";"\\"Clara\\" Callan";"R"\n',
        ("0195153448", "0002005018"),
        ("Classical; Mythology", '"Clara" Callan'),
    ),
    "RecBole, ml-100k.item": (
        b"item_id:token\tmovie_title:token_seq\trelease_year:token\n1\tToy Story\t1995\n",
        ("1",),
        ("Toy Story",),
    ),
}


@pytest.mark.parametrize(("data", "items", "titles"), FILES.values(), ids=FILES)
def test_catalogues_are_read_as_they_are_written(
    tmp_path: Path, data: bytes, items: tuple[str, ...], titles: tuple[str, ...]
) -> None:
    path = tmp_path / "items"
    path.write_bytes(data)
    found = read_catalogue_file(path)
    assert (found.items, found.titles) == (items, titles)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"f1\nf2\nf1\n", "row 2 repeats the item id of row 0 .row 0 is line 1."),
        (b"item\nf1\n\nf2\n", r"items\[1\] is ''; expected a text of 1 to 256 .*row 0 is line 2"),
        (b"", "holds no rows"),
        (b"book\nlamp\n", "'?book'?, may be a header or an item; a first row of names"),
        (b"Artikel\nf1\nf2\n", "Artikel, may be a header or an item"),
        (b"title\nToy Story\nJumanji\n", "title, may be a header or an item"),
        (b"f1,One\nf2,Two\n", "may be ids, or ids and titles.*a first row of names"),
        (b"movie_id,track_id\n1,2\n", "several columns may be the item's"),
        ("f1\né\n".encode() * 3 + b"\xff\n", "ids hold bytes that are not UTF-8"),
    ],
)
def test_a_list_that_may_be_another_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "items"
    path.write_bytes(data)
    with pytest.raises(AggregatorError, match=f"the catalogue .*{why}"):
        read_catalogue_file(path)


def test_a_header_decides(tmp_path: Path) -> None:
    path = tmp_path / "items"
    path.write_bytes(b"item\nbook\nlamp\n")
    found, said = understood_catalogue(path)
    assert found.items == ("book", "lamp")
    assert said == "2 items, 0 with titles; item = item"


_PIECES = ("f1", "item", "title", "movieId", "1", ",", ";", "\t", "::", "|", '"', "\\", "\ufeff")
_TEXTS = st.lists(st.sampled_from((*_PIECES, "\n", "\r\n", "\u2028", "\x0c", "\x00")), max_size=30)


@given(data=st.binary(max_size=60) | _TEXTS.map(lambda pieces: "".join(pieces).encode()))
def test_any_bytes_are_a_catalogue_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-items"
    path.write_bytes(data)
    try:
        found = read_catalogue_file(path)
    except AggregatorError as error:
        assert str(path) in str(error)
        return
    assert all(each and each == each.strip() for each in found.items)
    assert not any(end in title for title in found.titles for end in "\n\r\u2028\x0c")
