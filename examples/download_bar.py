"""Downloading MovieLens 100K with a bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from examples.datasets.movielens_download import download_ml_100k


def download_with_bar(folder: Path, console: Console) -> None:
    """Put the files below ``folder``. Raises DatasetError."""
    with Progress(
        TextColumn("downloading MovieLens 100K"), BarColumn(), DownloadColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=None)
        download_ml_100k(
            folder, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
