"""``make screenshots``: pictures of the console for its page in the docs, in a real browser, of a
fleet that is served."""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Page

from tests.fakes.browsers import running_chromium, why_no_chromium
from tests.fakes.scenes import PHONE, WIDE, running_scene

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
MOST_BYTES = 400_000
"""Of all of them."""


@dataclass(frozen=True)
class Screenshot:
    """What is taken: of which page, how wide and high, once ``ready`` is to be seen there."""

    name: str
    address: str
    ready: str
    width: int = WIDE
    height: int = 900

    @property
    def file(self) -> Path:
        return FOLDER / f"console-{self.name}.png"


SCREENSHOTS = (
    Screenshot("now", "/now", "updates a second", height=1150),
    Screenshot("learning", "/learning?task=default", "hr10 by version"),
    Screenshot("devices", "/devices", "1 to 41 of 41 devices"),
    Screenshot("phone", "/learning?task=default", "hr10 by version", PHONE),
)


def taken(of: Screenshot, page: Page, folder: Path) -> bytes:
    """A PNG of at most 256 colours. Raises RuntimeError where the page names a local path."""
    page.goto(of.address)
    page.get_by_text(of.ready).first.wait_for()
    page.get_by_role("status").get_by_text("Live").wait_for()
    if str(folder) in page.inner_text("body"):
        raise RuntimeError(f"{of.address} names {folder}")
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256)
    found = io.BytesIO()
    picture.save(found, "PNG", optimize=True)
    return found.getvalue()


def main() -> int:
    """Take all of them, and say how large they are."""
    argparse.ArgumentParser(prog="make screenshots", description=__doc__).parse_args()
    if why := why_no_chromium():
        print(f"make screenshots: {why}")
        return 2
    with (
        TemporaryDirectory() as made,
        running_chromium() as browser,
        running_scene(Path(made), browser) as scene,
    ):
        for each in SCREENSHOTS:
            with scene.page(width=each.width, height=each.height) as page:
                each.file.write_bytes(taken(each, page, Path(made)))
    sizes = {each.file.name: each.file.stat().st_size for each in SCREENSHOTS}
    for name, size in sizes.items():
        print(f"{name}: {size:,} bytes")
    print(f"all: {sum(sizes.values()):,} of at most {MOST_BYTES:,} bytes")
    return int(sum(sizes.values()) > MOST_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
