"""Which column of a table is what: by the names in its header, by what a person says, by what the
cells hold. What may be one thing or another is refused, and never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from device_sdk.system.printable import printable
from device_sdk.tables.text import Reading, TableError, TextTable
from device_sdk.tables.times import MISSING, look_like_dates, look_like_stamps

NO_COLUMN = "none"
"""Said of a role: no column has it."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the roles are: indices of columns by role, from 0; several for a time whose parts
    (year, month, day, hour, minute, second; or day and time of day) have a column each.

    ``header``: the names of all columns; empty for a table without one.
    """

    places: Mapping[str, tuple[int, ...]]
    header: tuple[str, ...] = ()

    def said(self, width: int) -> str:
        """For people, such as ``user = userId, item = movieId; not used: rating``."""
        used = {place for places in self.places.values() for place in places}
        roles = ", ".join(
            f"{role} = {' + '.join(map(self.named, places))}"
            for role, places in self.places.items()
            if places
        )
        left = [self.named(place) for place in range(width) if place not in used]
        return roles + (f"; not used: {_some(left)}" if left else "")

    def named(self, place: int) -> str:
        """A column's name, for people."""
        if place < len(self.header) and self.header[place]:
            return printable(self.header[place], 40)
        return f"column {place + 1}"

    def surplus(self, table: TextTable) -> tuple[int, int] | None:
        """Where cells too many of a row belong: to a text that nobody quoted, in the columns from
        the first index to the last. None where it may be one that has a role."""
        roles = {place for places in self.places.values() for place in places}
        rows = table.head[bool(self.header) :]
        room = [
            place
            for place in range(table.width)
            if _may_split([r[place] for r in rows], place in roles)
        ]
        if not room or any(room[0] <= place <= room[-1] for place in roles):
            return None
        return room[0], room[-1]


def _may_split(cells: Sequence[str], has_role: bool) -> bool:
    """Whether the separator may stand in a column's cells, as in neither ids nor numbers."""
    if has_role:
        return any(map(_SPACE.search, cells))
    return not all(re.fullmatch(r"[-+.\deE]*", each) for each in cells)


# Names of columns, in letters and figures alone: "User-ID", "userId" and "user_id:token" are one.

_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?( ?[AaPp][Mm])?")
_SPACE = re.compile(r"\s")
_LIST = re.compile(r"\d+([ ,;|]+\d+)+|[^\s,]+(,[^\s,]+)+|[^\s|]+(\|[^\s|]+)+|[\[({].*[\])}]")
_TYPED = re.compile(r"[^:]+:(token|token_seq|float|float_seq)")
_ID = r"(?:id|ids|key|no|nr|num|number|hash|idx|index|uid|uuid|guid|code|sku|asin|isbn)"
_BEFORE = r"(?:id|fk|internal|external|original|raw)?"
_BETWEEN = r"s?(?:unique|internal|external|original|anonymous|hashed|raw)?"
_USERS = (
    "user|customer|account|visitor|member|reader|reviewer|listener|viewer|client|buyer|person|"
    "profile|subscriber|player|patron|rater|consumer|session"
)
_ITEMS = (
    "item|movie|film|product|article|track|song|video|book|artist|album|game|app|business|news|"
    "recipe|anime|show|series|episode|podcast|course|hotel|place|venue|poi|restaurant|page|post|"
    "photo|image|document|doc|media|content|listing|offer|beer|title"
)
_CODES = {
    "user": {"uid", "steamid", "login", "email"},
    "item": {"iid", "aid", "isbn", "isbn10", "isbn13", "asin", "parentasin", "sku", "ean", "gtin",
             "upc", "stockcode", "imdbid", "tmdbid"},
}  # fmt: skip
_VERBS = (
    "rating|rated|review|reviewed|event|view|viewed|click|clicked|order|ordered|purchase|"
    "purchased|play|played|listen|listened|interaction|visit|visited|watch|watched|create|created|"
    "creation|action|log|logged|start|started|transaction|invoice|add|added|post|posted|checkin|"
    "local|server|request|update|updated|utc|occurred|happened|behavior|behaviour|last|tag|tagged|"
    "bought|seen|read|submitted"
)
_LENGTHS = frozenset(("playtime", "viewtime", "watchtime", "listentime", "lasttime", "readtime"))
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_OTHER_TIMES = re.compile(r"release|publi|birth|born|join|sign|regist|since|expir|age|year")


def _plain(name: str) -> str:
    if _TYPED.fullmatch(name):
        name = name.partition(":")[0]
    return re.sub(r"[^0-9a-z]+", "", name.lower())


def _rank(role: str, name: str) -> int | None:
    """How well a name says the role, 0 the best; None for not at all."""
    plain = _plain(name)
    match role:
        case "user" | "item":
            nouns = _USERS if role == "user" else _ITEMS
            if plain in (f"{role}id", f"id{role}"):
                return 0
            if re.fullmatch(f"{_BEFORE}({nouns}){_BETWEEN}{_ID}", plain):
                return 6 if plain.startswith("session") else 1
            if plain in _CODES[role]:
                return 2
            if re.fullmatch(f"({nouns})s?", plain):
                return 5 if plain.startswith(("title", "session")) else 3
            return 4 if re.fullmatch(f"({nouns})(name|title|label)", plain) else None
        case "title":
            if re.fullmatch(f"({_ITEMS})?title", plain):
                return 0
            return 1 if re.fullmatch(f"({_ITEMS})?(name|label|description)", plain) else None
    if plain in _LENGTHS:
        return None
    if re.fullmatch(
        rf"({_VERBS})?(timestamp|ts|epoch)(s|ms)?|unix({_VERBS})?(time|timestamp)", plain
    ):
        return 0
    if re.fullmatch(rf"({_VERBS})?(time|datetime|at)", plain):
        return 1
    return 2 if re.fullmatch(rf"({_VERBS})?(date|day)|dt|when", plain) else None


_SURE = (0, 1, 2)
"""Ranks of names that are hardly anybody's data."""
_NOUN = 3
"""The rank of a bare noun, such as `user`."""


def named(role: str, names: Sequence[str]) -> tuple[int, ...]:
    """The columns whose names say the role best; several where as many say it as well."""
    ranks = [_rank(role, name) for name in names]
    best = min((rank for rank in ranks if rank is not None), default=-1)
    return tuple(place for place, rank in enumerate(ranks) if rank == best)


def parse_columns(text: str) -> dict[str, str]:
    """What ``--columns`` says, such as ``user=userId,item=2,time=none``: a column by role.

    Raises TableError.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        role, equals, column = (each.strip() for each in part.partition("="))
        if role not in ("user", "item", "time") or not equals or not column or role in found:
            raise TableError(
                f"{text!r} is not understood at {part.strip()!r}; expected user=COLUMN,item=COLUMN"
                ",time=COLUMN: names of the header, or numbers from 1; time=none for no time"
            )
        found[role] = column
    return found


# What a table of interactions has.


def interaction_columns(table: TextTable, reading: Reading) -> Columns:
    """The columns of user, item and time. Raises TableError where that is not clear."""
    told = reading.columns
    for role in ("user", "item"):
        if told.get(role) == NO_COLUMN:
            raise TableError(f"--columns {role}={NO_COLUMN}: interactions have users and items")
    numbers = {role: _numbered(table, each) for role, each in told.items() if each.isdecimal()}
    names = {role: each for role, each in told.items() if role not in numbers and each != NO_COLUMN}
    timeless = told.get("time") == NO_COLUMN
    if names or _is_header(table, numbers):
        header = table.head[0]
        places: dict[str, tuple[int, ...]]
        places = {role: (place,) for role, place in numbers.items()}
        places |= {role: (_with_name(table, header, each),) for role, each in names.items()}
        for role in ("user", "item"):
            if role not in places:
                places[role] = (_found(table, role, header),)
        if timeless:
            places["time"] = ()
        elif "time" not in places:
            places["time"] = _time(table, header, {*places["user"], *places["item"]})
        found = Columns(places, header)
    else:
        found = Columns(_by_content(table, numbers, timeless))
    if found.places["user"] == found.places["item"]:
        raise TableError(f"{table.name}: user and item are of one column (--columns)")
    if "item" not in told:
        _refuse_lists(table, found)
    return found


def _refuse_lists(table: TextTable, columns: Columns) -> None:
    """Raises TableError where most cells of the item's column seem to hold several items."""
    (place,) = columns.places["item"]
    cells = [row[place] for row in table.head[bool(columns.header) :] if row[place] not in MISSING]
    typed = columns.header and columns.header[place].endswith(":token_seq")
    if typed or 2 * sum(bool(_LIST.fullmatch(each)) for each in cells) > len(cells):
        shown = printable(cells[0], 40) if cells else ""
        raise TableError(
            f"{table.name}: the cells of {columns.named(place)}, such as {shown!r}, seem to hold "
            f"several items each; expected a row for each item (--columns item={place + 1} where "
            "each is one)"
        )


def _numbered(table: TextTable, said: str) -> int:
    number = float(said)  # no number of digits is too many for it
    if not 1 <= number <= table.width:
        said = printable(said, 20)
        raise TableError(f"--columns names column {said}; {table.name} has {table.width}")
    return int(number) - 1


def _with_name(table: TextTable, names: Sequence[str], said: str) -> int:
    for same in (str, _plain):
        found = [place for place, name in enumerate(names) if same(name) == same(said)]
        if len(found) == 1:
            return found[0]
    raise TableError(f"--columns names {said!r}; the first row of {table.name} is {_some(names)}")


def _is_header(table: TextTable, numbers: Mapping[str, int]) -> bool:
    """Whether the first row holds names. Raises TableError for one that seems to, and is not
    understood."""
    first, rest = table.head[0], table.head[1:]
    roles = {role: named(role, first) for role in ("user", "item")}
    if all(map(_TYPED.fullmatch, first)) or all(roles.values()):
        return True
    if {"user", "item"} <= numbers.keys():
        return False  # who counts columns knows of no names
    alone = any(
        _is_name(role, place, first, rest) for role, places in roles.items() for place in places
    )
    words = sum(_stands_out(place, first, rest) for place in range(table.width))
    if alone or words > (len(rest) == 1):  # of a single row below one is no sign
        raise TableError(
            f"{table.name}: the first row, {_some(first)}, seems to be a header, and which columns "
            "are the user's and the item's is not clear; --columns user=NAME,item=NAME says so, "
            "user=1,item=2 where it is no header"
        )
    return False


def _is_name(role: str, place: int, first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether a cell of the first row says a role, and is hardly a user or an item itself."""
    rank = _rank(role, first[place])
    return rank in _SURE or (rank == _NOUN and all(row[place] != first[place] for row in rest))


def _stands_out(place: int, first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether a cell of the first row is a word, where those below it hold figures."""
    below = [row[place] for row in rest if row[place] not in MISSING]
    if not below or not first[place] or re.search(r"\d", first[place]):
        return False
    return first[place] not in MISSING and all(re.search(r"\d", each) for each in below)


def _found(table: TextTable, role: str, names: Sequence[str]) -> int:
    """The one column that a header's names say. Raises TableError."""
    places = named(role, names)
    if len(places) == 1:
        return places[0]
    several = " and ".join(repr(names[place]) for place in places[:3])
    why = f"{several} may each be the {role}'s" if places else f"none is known as the {role}'s"
    which = names[places[0]] if places else "NAME"
    if list(names).count(which) > 1:
        which = str(places[0] + 1)
    raise TableError(
        f"{table.name}: of the columns {_some(names)} {why}; --columns {role}={which} says which"
    )


def _time(table: TextTable, names: Sequence[str], used: set[int]) -> tuple[int, ...]:
    """The columns of the time; none where there are none. Raises TableError, also for a column of
    another name that holds times."""
    places, parts = named("time", names), _parts(names)
    if parts and not any(_rank("time", names[place]) in (0, 1) for place in places):
        return parts
    if places:
        place = _found(table, "time", names)
        _refuse_part(table, names, place)
        days = [each for each, name in enumerate(names) if _rank("time", name) == 2]
        if len(days) == 1 and place not in days:
            if _is_of_a_day(table, place):
                return days[0], place
            _refuse_numbers_beside_dates(table, names, place, days[0])
        return (place,)
    for place, name in enumerate(names):
        cells = [row[place] for row in table.head[1:]]
        if place in used or _OTHER_TIMES.search(_plain(name)):
            continue
        if look_like_dates(cells) or look_like_stamps(cells):
            raise TableError(
                f"{table.name}: the column {name!r} holds times, such as {cells[0]!r}; --columns "
                f"time={name} where they are of the interactions, time=none where not"
            )
    return ()


def _refuse_part(table: TextTable, names: Sequence[str], place: int) -> None:
    """Raises TableError for the day of a month, or a day before an hour, without the others."""
    plain = [_plain(name) for name in names]
    others = [names[plain.index(each)] for each in ("month", "hour") if each in plain]
    if plain[place] == "day" and others:
        raise TableError(
            f"{table.name}: {names[place]!r} and {' and '.join(map(repr, others))} are parts of a "
            f"time, of which others are missing: --columns time={names[place]} takes the one "
            "alone, time=none the rows in their order; or write a column that holds all of it"
        )


def _refuse_numbers_beside_dates(
    table: TextTable, names: Sequence[str], place: int, day: int
) -> None:
    """Raises TableError for numbers that are no times by themselves, such as 1030, beside dates."""
    cells, dates = ([row[each] for row in table.head[1:]] for each in (place, day))
    if look_like_dates(dates) and not look_like_dates(cells) and not look_like_stamps(cells):
        raise TableError(
            f"{table.name}: {names[day]!r} holds dates, and {names[place]!r} what is no time by "
            f"itself, such as {cells[0]!r}: --columns time={names[day]} or time={names[place]} "
            "says which is the order"
        )


def _is_of_a_day(table: TextTable, place: int) -> bool:
    cells = [row[place] for row in table.head[1:] if row[place] not in MISSING]
    return bool(cells) and all(map(_CLOCK.fullmatch, cells))


def _parts(names: Sequence[str]) -> tuple[int, ...]:
    """The columns of year, month and so on, as far as they are there without a gap."""
    plain = [_plain(name) for name in names]
    for before in ("", "date", "time"):
        wanted = [plain.index(before + part) if before + part in plain else -1 for part in _PARTS]
        there = wanted.index(-1) if -1 in wanted else len(wanted)
        if there >= 2:
            return tuple(wanted[:there])
    return ()


# Without a header: users come before items, and times are known by what they look like.


def _by_content(
    table: TextTable, numbers: Mapping[str, int], timeless: bool
) -> dict[str, tuple[int, ...]]:
    told = set(numbers.values())
    if timeless:
        time: tuple[int, ...] = ()
    elif "time" in numbers:
        time = (numbers["time"],)
    else:
        time = _time_by_content(table, told)
    free = [place for place in range(table.width) if place not in {*told, *time}]
    wanted = [role for role in ("user", "item") if role not in numbers]
    if len(free) < len(wanted):
        raise TableError(f"{table.name}: {table.width} columns are too few for user and item")
    places = {**numbers, **dict(zip(wanted, free, strict=False))}
    if wanted:
        _refuse_doubtful(table, places["user"], places["item"])
    return {"user": (places["user"],), "item": (places["item"],), "time": time}


def _time_by_content(table: TextTable, told: set[int]) -> tuple[int, ...]:
    cells = {place: _cells(table, place) for place in range(table.width) if place not in told}
    found = [place for place, each in cells.items() if look_like_dates(each)]
    clocks = [place for place in cells if _is_of_a_day(table, place)]
    if clocks:
        raise _unclear(table, f"{_columns([*found, *clocks])} hold times, or parts of them")
    if not found and table.width > 2:
        # The first two are ids where nothing says otherwise, which may look like times.
        found = [place for place, each in cells.items() if place > 1 and look_like_stamps(each)]
        if not found and table.width == 4 and _is_rated(cells):
            found = [3]  # user, item, rating, time: as MovieLens, and Amazon, have it
        if not found and any(look_like_stamps(each) for each in cells.values()):
            found = [place for place, each in cells.items() if look_like_stamps(each)]
            raise _unclear(table, f"{_columns(found)} may be a time, or ids")
    if len(found) > 1:
        raise _unclear(table, f"{_columns(found)} hold times")
    return tuple(found)


def _is_rated(cells: Mapping[int, Sequence[str]]) -> bool:
    """Whether the third column holds ratings, and the fourth whole numbers."""
    return (
        {2, 3} <= cells.keys()
        and all(re.fullmatch(r"-?\d{1,2}(\.\d+)?", each) for each in cells[2])
        and all(each.isdecimal() for each in cells[3])
        and any(float(each) > 0 for each in cells[3])
    )


_ACTS = frozenset(
    (
        "view",
        "click",
        "like",
        "buy",
        "cart",
        "fav",
        "pv",
        "purchase",
        "play",
        "addtocart",
        "add_to_cart",
        "rate",
        "order",
        "read",
        "listen",
        "share",
        "comment",
        "follow",
    )
)


def _refuse_doubtful(table: TextTable, user: int, item: int) -> None:
    """Raises TableError where the columns of a table without a header seem to be others."""
    users, items = _cells(table, user), _cells(table, item)
    if not users or not items:
        return
    if table.width > 2 and len(users) > 2 and users[0] in ("0", "1"):
        first = int(users[0])
        if users == [str(each) for each in range(first, first + len(users))]:
            raise _unclear(table, f"column {user + 1} counts the rows from {first}")
    if {each.lower() for each in items} <= _ACTS:
        raise _unclear(table, f"column {item + 1} says what was done, such as {items[0]!r}")
    if all(re.fullmatch(r"B0[0-9A-Z]{8}|\d{9}[\dX]", each) for each in users) and all(
        re.fullmatch(r"A[0-9A-Z]{9,27}", each) for each in items
    ):
        raise _unclear(table, f"column {user + 1} holds ASINs, such as {users[0]!r}, so items")
    if all(re.fullmatch(r"-?\d+\.\d+", each) for each in items) and not all(
        float(each).is_integer() for each in items
    ):
        raise _unclear(table, f"column {item + 1} holds fractions, such as {items[0]}")
    coded = all(re.fullmatch(r"B0[0-9A-Z]{8}|\d{9}[\dX]", each) for each in items)
    if len(users) > 2 and len(set(users)) == len(users) and len(set(items)) == 1 and not coded:
        raise _unclear(
            table, f"every row has another user and the one item {items[0]!r}: they may be swapped"
        )
    if len(items) >= 50 and len(set(items)) <= 10:
        for place in range(item + 1, table.width):
            if len(set(_cells(table, place))) > 5 * len(set(items)) and not _is_time(table, place):
                raise _unclear(
                    table,
                    f"column {item + 1} has {len(set(items))} values, such as {items[0]!r}, and "
                    f"column {place + 1} many: either may hold the items",
                )


def _is_time(table: TextTable, place: int) -> bool:
    cells = _cells(table, place)
    return look_like_dates(cells) or look_like_stamps(cells)


def _cells(table: TextTable, place: int) -> list[str]:
    return [row[place] for row in table.head if row[place] not in MISSING]


def _unclear(table: TextTable, why: str) -> TableError:
    return TableError(
        f"{table.name} has no header, and {why}; the first row is {_some(table.head[0])}: "
        "--columns user=1,item=2,time=4, with the right numbers, says what is where (time=none "
        "for no time)"
    )


def _columns(places: Iterable[int]) -> str:
    return " and ".join(f"column {place + 1}" for place in places)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name, 40) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# What a catalogue has: an item a row, in an order that is never to change.


def names_a_catalogue(names: Sequence[str]) -> bool:
    """Whether they are a header for sure: of several columns, one of which is the item's."""
    if len(names) < 2:
        return False
    places, titles = _items_named(names), named("title", names)
    sure = any(_rank("item", names[place]) in _SURE for place in places)
    return bool(places) and (sure or bool(set(titles) - set(places)))


def catalogue_columns(table: TextTable) -> Columns:
    """The columns of item and title, the latter where there is one. Without a header they are the
    first and the second. Raises TableError where that is not clear."""
    first, rest = table.head[0], table.head[1:]
    places = _items_named(first)
    alone = len(first) == 1 and (
        _plain(first[0]) in ("item", "items", "id", "ids") or _rank("item", first[0]) in _SURE
    )
    if alone or names_a_catalogue(first):
        if len(places) > 1:
            raise _no_catalogue(table, f"several columns may be the item's: {_some(first)}")
        titles = tuple(place for place in named("title", first) if place not in places)
        return Columns({"item": places, "title": titles[:1]}, first)
    titles_alone = len(first) == 1 and bool(named("title", first))
    if places or titles_alone or (len(rest) > 1 and _stands_out(0, first, rest)):
        raise _no_catalogue(table, f"the first row, {_some(first)}, may be a header or an item")
    if table.separator in (",", ";"):
        raise _no_catalogue(
            table, f"the rows may be ids, or ids and titles, such as {_some(first)}"
        )
    return Columns({"item": (0,), "title": (1,) if table.separator else ()})


def _items_named(names: Sequence[str]) -> tuple[int, ...]:
    alone = tuple(place for place, name in enumerate(names) if _plain(name) == "id")
    places = named("item", ["" if _plain(name) == "title" else name for name in names])
    sure = any(_rank("item", names[place]) in _SURE for place in places)
    return places if sure or not alone else alone


def _no_catalogue(table: TextTable, why: str) -> TableError:
    return TableError(
        f"{table.name}: {why}; a first row of names says what is where, such as item, or "
        "item<TAB>title"
    )
