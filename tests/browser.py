"""A page in a real browser: what it shows, whether it asks any server for anything, whether its script fails."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

needs_opengl = pytest.mark.skipif(
    shutil.which("ldconfig") is None or "libOSMesa" not in os.popen("ldconfig -p").read(), reason="no libosmesa6 here"
)

DESKTOP, PHONE = (1280, 800), (390, 844)
# Debian's chromium draws in software where there is no GPU.
_ARGUMENTS = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist")


class Opened(NamedTuple):
    """An open page."""

    page: Any  # Playwright's
    requests: list[str]  # addresses that the page asked for, itself left out
    complaints: list[str]  # warnings and errors on the page's console, and uncaught errors

    @property
    def overflow(self) -> int:
        """Pixels by which it is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextlib.contextmanager
def opened(path: Path, size: tuple[int, int] = DESKTOP, dark: bool = False) -> Iterator[Opened]:
    """Opens a file; skips the test where there is no browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        try:
            width, height = size
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            page.set_default_timeout(300_000)  # ms; software draws slowly on a loaded machine
            found = Opened(page, [], [])
            address = path.absolute().as_uri()
            page.on("request", lambda request: request.url != address and found.requests.append(request.url))
            page.on("pageerror", lambda error: found.complaints.append(str(error)))
            page.on(
                "console",
                lambda message: message.type in ("error", "warning") and found.complaints.append(message.text),
            )
            page.goto(address)
            yield found
        finally:
            browser.close()
