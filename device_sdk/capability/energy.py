"""What the machine draws, where it tells."""

from __future__ import annotations

from pathlib import Path

from device_sdk.system.clock import Clock


class EnergyMeter:
    """Joules of the whole machine, whoever draws them, from :meth:`start` on.

    ``source``: ``rapl``, the processors' own counters, which Linux mostly shows to root alone;
    ``battery``, what one that is being discharged gives at the end of each span; empty where
    neither tells. ``root`` is where `sys` is looked for.
    """

    def __init__(self, clock: Clock, root: Path = Path("/")) -> None:
        self._clock = clock
        zones = (root / "sys/class/powercap").glob("intel-rapl:*")
        # Packages alone: what lies below one (its cores, say) is in its sum.
        self._zones = [each for each in zones if each.name.count(":") == 1]
        self._zones = [each for each in self._zones if _number(each / "energy_uj") is not None]
        self._batteries = sorted((root / "sys/class/power_supply").glob("*"))
        self._began, self._marks = 0.0, [0.0]
        self.source = "rapl" if self._zones else "battery" if self._watts() else ""

    def start(self) -> None:
        """A span begins."""
        self._began = self._clock.now()
        self._marks = [_number(zone / "energy_uj") or 0.0 for zone in self._zones]

    def joules(self) -> float | None:
        """Since the span began; None where nothing tells."""
        if not self._zones:
            watts = self._watts()
            return None if watts is None else watts * (self._clock.now() - self._began)
        total = 0.0
        for zone, mark in zip(self._zones, self._marks, strict=True):
            spent = (_number(zone / "energy_uj") or mark) - mark
            if spent < 0.0:  # the counter began anew
                spent += _number(zone / "max_energy_range_uj") or -spent
            total += spent
        return total / 1e6

    def _watts(self) -> float | None:
        for each in self._batteries:
            if _text(each / "type") != "Battery" or _text(each / "status") != "Discharging":
                continue
            power = _number(each / "power_now")
            if power is None:
                volts, amperes = _number(each / "voltage_now"), _number(each / "current_now")
                power = None if volts is None or amperes is None else volts * amperes / 1e6
            if power:
                return abs(power) / 1e6
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None
