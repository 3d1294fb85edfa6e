"""Texts that say when, as people and programs write them, in seconds since 1970."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Parser = Callable[[str], float]

MISSING = frozenset(
    ("", "NULL", "null", "\\N", "NaN", "nan", "<NA>", "NA", "N/A", "#N/A", "NaT", "None")
)
"""What programs write for nothing."""
_FORMATS = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%d/%m/%y",
    "%m/%d/%y",
    "%d-%b-%Y",
    "%d %b %Y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%m %d, %Y",
    "%a %b %d %H:%M:%S %Y",
    "%a %b %d %H:%M:%S %z %Y",
    "%a, %d %b %Y %H:%M:%S GMT",  # %Z takes other names by the machine's own zone
    "%a, %d %b %Y %H:%M:%S %z",
)
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
_TEXT_DATE = re.compile(r"(?=.*\d)(?=.*[-/.:, ]).*(\d{4}|\d\d[-/.]\d\d[-/.]\d\d).*", re.DOTALL)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# 1995 to 2035, in seconds; and likewise in thousandths, millionths, billionths of them.
_PLAUSIBLE = (788_918_400.0, 2_051_222_400.0)
_SCALES = (1.0, 1e3, 1e6, 1e9)
_SAMPLE = 100


class TimesError(ValueError):
    """Texts cannot be read as times; the message says why."""


def seconds_of(texts: Sequence[str], format: str = "") -> Seconds:
    """float64 [texts]: numbers as they are, those that are times in thousandths of a second beside
    others in seconds in one unit; dates as seconds since 1970, UTC where they name no zone; NaN
    where one is missing or is no time, as is a number beside dates that is neither a time nor a
    date itself.

    ``format``: of the dates, as ``datetime.strptime`` takes it; empty: found. Raises TimesError
    where several would do, which differ in the order, or none.
    """
    if not format:
        try:
            numbers = (math.nan if each in MISSING else float(each) for each in texts)
            found = np.fromiter(numbers, np.float64, len(texts))
        except ValueError:
            pass
        else:
            return _in_one_unit(np.where(np.isfinite(found), found, np.nan))
    known = dict.fromkeys(texts)
    parse = _parser([each for each in known if each not in MISSING], format)
    read = {each: math.nan if each in MISSING else parse(each) for each in known}
    return _in_one_unit(np.fromiter((read[each] for each in texts), np.float64, len(texts)))


def _in_one_unit(found: Seconds) -> Seconds:
    """Numbers that are times of several units, put together from several programs' files, in
    seconds; those of a single unit, or of none, as they are."""
    units = [
        (_PLAUSIBLE[0] * scale <= found) & (found <= _PLAUSIBLE[1] * scale) for scale in _SCALES
    ]
    if sum(bool(each.any()) for each in units) < 2:
        return found
    return np.select(units, [found / scale for scale in _SCALES], found)


def look_like_dates(texts: Iterable[str]) -> bool:
    """Whether all that are not missing are dates in words or figures, one at least."""
    found = [each for each in texts if each not in MISSING]
    if not found or not all(_TEXT_DATE.match(each) and not _is_number(each) for each in found):
        return False
    try:
        return all(not math.isnan(each) for each in map(_parser(found, ""), found))
    except TimesError:
        return _is_slashed(found)


def look_like_stamps(texts: Iterable[str]) -> bool:
    """Whether all that are not missing are numbers that are times of 1995 to 2035, one at least, in
    seconds, or thousandths, millionths or billionths of them."""
    values = [_number(each) for each in texts if each not in MISSING]
    return bool(values) and any(
        all(_PLAUSIBLE[0] <= each / scale <= _PLAUSIBLE[1] for each in values) for scale in _SCALES
    )


def said_span(seconds: Seconds) -> str:
    """From the first to the last, for people; empty where there is none."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return ""
    first, last = float(known.min()), float(known.max())
    for scale in _SCALES:
        if _PLAUSIBLE[0] <= first / scale and last / scale <= _PLAUSIBLE[1]:
            return f"{_day(first / scale)} to {_day(last / scale)}"
    return f"{first:.15g} to {last:.15g} (numbers, no dates)"


def _day(seconds: float) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).date().isoformat()


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def _is_number(text: str) -> bool:
    return not math.isnan(_number(text))


def _parser(texts: Sequence[str], format: str) -> Parser:
    """What reads one of them: NaN for what it cannot."""
    if format:
        parse = _of_format(format)
        if texts and not _read(parse, texts):
            raise TimesError(f"{texts[0]!r} is not written as {format!r}")
        return parse
    sample = texts[:: max(1, len(texts) // _SAMPLE)]
    if _read(_iso, sample) == len(sample):
        return _iso
    parsers = {"": _iso} | {
        each: _of_format(each)
        for known in _FORMATS
        for each in ([known] if "%H" in known else [known + clock for clock in _CLOCKS])
    }
    # A few may be no times at all, what nearly all are is their format.
    best = {each: _read(parse, sample) for each, parse in parsers.items()}
    most = max(best.values(), default=0)
    if most <= len(sample) / 2:
        some = ", ".join(repr(each) for each in sample[:3])
        raise TimesError(f"{some} are no times that are known here")
    fit = [each for each in best if best[each] == most]
    if len(fit) > 1 and fit[0]:
        counts = {each: _read(parsers[each], texts) for each in fit}
        fit = [each for each in fit if counts[each] == max(counts.values())]
    if len(fit) > 1 and fit[0] and _differ([parsers[each] for each in fit], texts):
        raise TimesError(f"{texts[0]!r} may be of {fit[0]} or of {fit[1]}")
    return parsers[fit[0]]


def _read(parse: Parser, texts: Iterable[str]) -> int:
    return sum(not math.isnan(parse(each)) for each in texts)


def _differ(parsers: Sequence[Parser], texts: Sequence[str]) -> bool:
    """Whether they put the texts into different orders."""
    orders = {
        tuple(np.argsort([parse(each) for each in texts], kind="stable").tolist())
        for parse in parsers
    }
    return len(orders) > 1


def _is_slashed(texts: Sequence[str]) -> bool:
    return all(re.match(r"\d{1,2}[-/]\d{1,2}[-/]\d{2,4}", each) for each in texts)


def _iso(text: str) -> float:
    value = _number(text)
    if any(_PLAUSIBLE[0] <= value / scale <= _PLAUSIBLE[1] for scale in _SCALES):
        return value
    try:  # dates may be written without anything between
        return _since(datetime.fromisoformat(text.removesuffix(" UTC")))
    except ValueError:
        return math.nan


def _of_format(format: str) -> Parser:
    def parse(text: str) -> float:
        try:
            return _since(datetime.strptime(text, format))
        except (ValueError, re.error):  # the latter where the format has a part twice
            return math.nan

    return parse


def _since(found: datetime) -> float:
    found = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (found - _EPOCH).total_seconds()
