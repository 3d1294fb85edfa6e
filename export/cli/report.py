"""What a command prints about the artifact that it wrote."""

from __future__ import annotations

from export.build import Exported


def print_written(exported: Exported) -> None:
    """Folder, id, and the worst of the comparisons with torch."""
    print(f"wrote {exported.directory} (artifact {exported.id[:16]})")
    if exported.report is not None:
        worst = exported.report.worst
        print(
            f"verified: {len(exported.report.comparisons)} comparisons with torch; the worst, "
            f"{worst.tensor}, is off by {worst.error:.1e} (float32 torch itself: "
            f"{worst.torch_error:.1e})"
        )
