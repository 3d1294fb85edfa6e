"""Further tasks for the homes of :mod:`tests.fakes.homes`."""

from __future__ import annotations

from aggregator.home import AggregatorHome
from aggregator.task.request import write_task_files
from tests.fakes.waiting import endless

ROUND = "quorum = 1"


def task_text(
    home: AggregatorHome, catalogue: str, round_lines: str = ROUND, more: str = "", width: int = 8
) -> str:
    """A scatter task with 20 items of its own; the catalogue lies in the home."""
    lines = [f"{catalogue}-{row}\t{catalogue} {row}" for row in range(20)]
    (home.folder / f"{catalogue}.tsv").write_text("\n".join(lines) + "\n")
    return (
        f'[task]\nfolder = "{home.folder.resolve()}"\ncatalogue = "{catalogue}.tsv"\n'
        f"{more}\n"
        f"[round]\n{endless(round_lines)}\n[scatter]\ncolumns = {width}\n"
        "least_squares.most_columns = 0\n"
    )


def add_task(home: AggregatorHome, name: str, text: str) -> None:
    """What ``tessera-aggregator task add`` does."""
    store = home.open_store()
    with store.database.transaction():
        store.tasks.add(name, f"tasks/{name}.toml", text)
    write_task_files(home.folder, store)
    store.database.close()
