"""A choice as JSON and as text for people."""

from __future__ import annotations

from dataclasses import asdict

from device_sdk.capability.choice import Choice
from device_sdk.system.printable import text_table


def choice_to_json(choice: Choice) -> dict[str, object]:
    """Plain objects; the choice is the top-level key `k` (null where the device declines)."""
    request = choice.request
    return {
        "k": choice.k,
        "reason": choice.reason,
        "fits": choice.fits,
        "confirmed": choice.confirmed,
        "method": choice.method,
        "deadline_seconds": request.deadline_seconds,
        "headroom": request.headroom,
        "limit_seconds": request.limit_seconds,
        "max_k": request.max_k,
        "time_box_seconds": request.time_box_seconds,
        "elapsed_seconds": choice.elapsed_seconds,
        "load_seconds": choice.load_seconds,
        "slowdown": request.slowdown,
        "emulated": request.slowdown > 1.0,
        "measurements": [asdict(entry) for entry in choice.measurements],
        "machine": asdict(choice.machine),
    }


def choice_to_text(choice: Choice) -> str:
    """The machine, one row per measured k, and the choice with its reason."""
    rows = [
        [
            f"{entry.k} *" if entry.k == choice.k else str(entry.k),
            _milliseconds(entry.cold_start_seconds),
            _milliseconds(entry.median_seconds),
            _milliseconds(entry.p90_seconds),
            str(entry.runs),
            _verdict(entry.p90_seconds, choice.request.limit_seconds),
        ]
        for entry in choice.measurements
    ]
    headers = ["k", "cold start ms", "median ms", "p90 ms", "runs", "within limit"]
    parts = [_machine_lines(choice)]
    if choice.request.slowdown > 1.0:
        parts.append(
            f"EMULATED: sleeps make every run {choice.request.slowdown:g} times as long, "
            "as on a device that much slower than this one."
        )
    if rows:
        parts.append(text_table(rows, headers, "rrrrr"))
    chosen = "The device declines." if choice.k is None else f"Chosen: k = {choice.k}."
    parts.append(f"{chosen} {choice.reason}")
    parts.append(
        f"Measured for {choice.elapsed_seconds:.1f} s of {choice.request.time_box_seconds:g} s, "
        f"loading ({choice.load_seconds * 1e3:.0f} ms) included."
    )
    return "\n\n".join(parts)


def _machine_lines(choice: Choice) -> str:
    machine = choice.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    memory = (
        f"{_gibibytes(machine.memory_total_bytes)} total, "
        f"{_gibibytes(machine.memory_available_bytes)} available"
    )
    rows = [
        ("processor", f"{machine.cpu_model} ({machine.architecture})"),
        ("cores used", f"{machine.cores:g} usable, {machine.threads} thread(s)"),
        ("provider", machine.provider),
        ("memory", memory),
        ("versions", versions),
        ("method", choice.method),
    ]
    return text_table(rows)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _gibibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _verdict(p90_seconds: float | None, limit_seconds: float) -> str:
    if p90_seconds is None:
        return "not measured"
    return f"{'yes' if p90_seconds <= limit_seconds else 'no'} ({p90_seconds / limit_seconds:.0%})"
