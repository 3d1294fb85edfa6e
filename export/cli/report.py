"""What a command prints about the artifact that it wrote."""

from __future__ import annotations

from export.build import Exported


def print_written(exported: Exported, how: str = "") -> None:
    """Folder, id and ``how``, and the worst of the comparisons with torch."""
    print(f"wrote {exported.directory} (artifact {exported.id[:16]}){how}")
    if exported.report is not None:
        worst = exported.report.worst
        print(
            f"verified beside torch: worst of {len(exported.report.comparisons)} comparisons is "
            f"{worst.tensor}, off by {worst.error:.1e} (allowed {worst.allowed:.1e}; float32 torch "
            f"itself: {worst.torch_error:.1e})"
        )
