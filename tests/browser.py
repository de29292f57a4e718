"""A headless Chromium that has no network to speak of, for tests of pages that are files."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --proxy-server=127.0.0.1:9"
).split()


def missing() -> str:
    """Why there is none; empty if there is."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "no chromium with chromium-driver here"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return ""


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 800) -> Iterator[Chrome]:
    """A browser of its own, with an empty profile; it ends with the block."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    with tempfile.TemporaryDirectory(prefix="gangrun-chromium-") as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        browser = Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield browser
        finally:
            browser.quit()


def prefer(browser: Chrome, scheme: str) -> None:
    """`light` or `dark`."""
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)


def complaints(browser: Chrome) -> list[Any]:
    """What the console says, policy violations included."""
    return [entry["message"] for entry in browser.get_log("browser")]


def print_pdf(browser: Chrome, path: Path) -> None:
    import base64

    path.write_bytes(base64.b64decode(browser.print_page()))
