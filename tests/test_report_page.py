"""`gangrun report --html`, opened in a real headless Chromium: what is seen, hovered, zoomed and printed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from executor import protocol
from gangrun.report.page import page
from gangrun.report.source import Report
from tests import browser
from tests.report_cases import HOSTILE, Story, failed, two_attempts
from tests.test_report import group

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

needs_chromium = pytest.mark.skipif(browser.missing() != "", reason=browser.missing())
# What a log may hold.
NASTY = (
    "first\n\x1b[31mred\x1b[0m </pre></script><script>alert(2)</script>\n 10 %\r 20 %\r100 %\n{{ 7 * 7 }} &lt;\u202e\n"
)
REPORTS: dict[str, Callable[[], Report]] = {
    "1 rank": lambda: two_attempts(1).report(),
    "64 ranks": lambda: two_attempts(64, slow=50).report(),
    "1000 ranks": lambda: two_attempts(1000, slow=700).report(),
    "failed": lambda: failed_report(),
    "group": lambda: group(),
    "an hour and a bit": lambda: long_report(3640),
    "running": lambda: two_attempts(3).report(now=3000),
}


def failed_report() -> Report:
    story = failed(4, 2, HOSTILE, name="a</title><script>alert(0)</script>")
    return story.report(tails={story.ranks[2]["log"]: NASTY})


def long_report(length_s: float) -> Report:
    story = Story(2)
    story.begin(0)
    story.go(1)
    story.end(length_s, protocol.SUCCEEDED, 0, begun=1)
    return story.report()


class Elements(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_needs_no_network_and_runs_no_script_but_its_own(name: str) -> None:
    text = page(REPORTS[name]())
    elements = Elements(text).found
    assert [tag for tag, _ in elements].count("script") == 2 and not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", text
    )
    assert not {"src", "href", "style"} & {key for _, attributes in elements for key in attributes}
    assert not any(key.startswith("on") for _, attributes in elements for key in attributes)
    policy = next(attributes["content"] for _, attributes in elements if "http-equiv" in attributes)
    assert policy and policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_attempts_of_several_days_have_dates() -> None:
    story = two_attempts(1)
    assert not re.search(r"<td[^>]*>\d{4}-\d\d-\d\d ", page(story.report()))
    story.attempt = 2
    story.begin(100_000)
    assert len(re.findall(r"<td[^>]*>\d{4}-\d\d-\d\d \d\d:", page(story.report()))) == 3


def test_nothing_that_a_run_says_is_markup() -> None:
    text = page(failed_report())
    assert "alert(" in text and not re.search(r"<script>alert|\x1b|\u202e", text)
    assert (text.count("</script>"), text.count("</pre>"), text.count("</title>")) == (2, 1, 1)


# --- in a browser


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browser.chromium() as found:
        yield found


@pytest.fixture
def opened(chrome: Chrome, tmp_path: Path) -> Iterator[Callable[..., Chrome]]:
    """Opens a report's page; at the end nothing may have been complained about."""

    def open_it(name: str, scheme: str = "light") -> Chrome:
        path = tmp_path / "report.html"
        path.write_text(page(REPORTS[name]()), encoding="utf-8")
        browser.prefer(chrome, scheme)
        chrome.get(path.as_uri())
        return chrome

    yield open_it
    assert browser.complaints(chrome) == []


def css(chrome: Chrome, selector: str) -> list[WebElement]:
    from selenium.webdriver.common.by import By

    return chrome.find_elements(By.CSS_SELECTOR, selector)


def one(chrome: Chrome, selector: str) -> WebElement:
    (found,) = css(chrome, selector)
    return found


def keys(chrome: Chrome, *pressed: str) -> None:
    from selenium.webdriver import ActionChains

    for key in pressed:
        ActionChains(chrome).send_keys(key).perform()


def hover(chrome: Chrome, element: WebElement) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(chrome).move_to_element(element).perform()


def view(chrome: Chrome) -> tuple[float, float]:
    """From where, and how much, the timeline shows of its 10,000 units. All bars show the same."""
    (box,) = {element.get_dom_attribute("viewBox") for element in css(chrome, "svg.bar")}
    assert box is not None
    begin, _, width, _ = (float(word) for word in box.split())
    return begin, width


def tip(chrome: Chrome) -> str:
    element = one(chrome, "#tip")
    return element.text if element.is_displayed() else ""


def brightness(chrome: Chrome) -> tuple[int, int]:
    """Of the paper and of the ink."""
    body = one(chrome, "body")
    words = [body.value_of_css_property(name) for name in ("background-color", "color")]
    paper, ink = (sum(int(number) for number in re.findall(r"\d+", word)[:3]) for word in words)
    return paper, ink


@needs_chromium
@pytest.mark.parametrize(
    "name, rows", [("1 rank", 1), ("64 ranks", 64), ("1000 ranks", 1000), ("failed", 4), ("group", 3)]
)
def test_a_page_shows_every_rank_and_nothing_is_complained_about(
    opened: Callable[..., Chrome], name: str, rows: int
) -> None:
    chrome = opened(name)
    assert len(css(chrome, "svg[data-row]")) == rows
    assert all(element.size["width"] > 500 for element in css(chrome, "svg[data-row]")[:5])
    assert css(chrome, "#axis text")[0].text == "0" and len(css(chrome, "#axis text")) >= 3
    assert len(css(chrome, ".sentences li")) >= 1
    width = chrome.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0, "it is wider than the window"


@needs_chromium
def test_no_time_of_the_axis_is_cut_off(opened: Callable[..., Chrome]) -> None:
    chrome = opened("an hour and a bit")
    frame = one(chrome, "#axis").rect
    boxes = [element.rect for element in css(chrome, "#axis text")]
    assert css(chrome, "#axis text")[-1].text == "1h"
    assert all(box["x"] + box["width"] <= frame["x"] + frame["width"] + 1 for box in boxes)


@needs_chromium
def test_a_rank_that_stands_out_comes_first_of_many(opened: Callable[..., Chrome]) -> None:
    chrome = opened("1000 ranks")
    assert [element.text for element in css(chrome, ".row .name")[2:4]] == ["700 n701", "0 n1"]


@needs_chromium
def test_a_span_tells_its_times_when_it_is_hovered(opened: Callable[..., Chrome]) -> None:
    chrome = opened("64 ranks")
    assert tip(chrome) == ""
    hover(chrome, css(chrome, "svg[data-row] rect.p-setup")[0])
    assert tip(chrome).splitlines()[:2] == ["rank 50 on n51", "setup for 1m 4s, attempt 0"]
    assert tip(chrome).splitlines()[3] == "42 s to 1m 46s after the submission"
    hover(chrome, one(chrome, "h1"))
    assert tip(chrome) == ""


@needs_chromium
def test_buttons_wheel_and_keys_zoom_and_a_double_click_shows_all(opened: Callable[..., Chrome]) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    chrome = opened("1 rank")
    labels = [element.text for element in css(chrome, "#axis text")]
    assert view(chrome) == (0, 10000)
    one(chrome, "#in").click()
    assert view(chrome) == (2500, 5000)
    assert [element.text for element in css(chrome, "#axis text")] != labels
    one(chrome, "#out").click()
    assert view(chrome) == (0, 10000)
    bar = one(chrome, "svg[data-row]")
    quarter = -int(bar.size["width"] / 4)
    ActionChains(chrome).scroll_from_origin(ScrollOrigin.from_element(bar, quarter, 0), 0, -100).perform()
    begin, width = view(chrome)
    assert width == 8000 and begin == pytest.approx(2500 * 0.2, abs=15), "what is under the pointer stays there"
    ActionChains(chrome).drag_and_drop_by_offset(bar, -100, 0).perform()
    assert view(chrome)[0] > begin and view(chrome)[1] == width
    ActionChains(chrome).double_click(bar).perform()
    assert view(chrome) == (0, 10000)
    for _ in range(40):
        one(chrome, "#in").click()
    assert view(chrome)[1] == 10000 / 5000, "there is an end to it"
    one(chrome, "#all").click()
    assert view(chrome) == (0, 10000)


@needs_chromium
def test_with_the_keyboard_alone_spans_are_told_and_zoomed(opened: Callable[..., Chrome]) -> None:
    from selenium.webdriver.common.keys import Keys

    chrome = opened("64 ranks")
    keys(chrome, *[Keys.TAB] * 4)  # past the three buttons
    assert tip(chrome).startswith("rank 50 on n51\nqueued for 40 s")
    keys(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "setup for 1m 4s" in tip(chrome) and len(css(chrome, "rect.active")) == 1
    keys(chrome, "+", "+")
    begin, width = view(chrome)
    middle = sum(
        float(one(chrome, "rect.active").get_dom_attribute(name) or 0) * part
        for name, part in (("x", 1), ("width", 0.5))
    )
    assert width == 2500 and begin <= middle <= begin + width
    keys(chrome, Keys.ARROW_DOWN)
    assert tip(chrome).startswith("rank 0 on n1\n")
    keys(chrome, "0")
    assert view(chrome) == (0, 10000)
    keys(chrome, *[Keys.ARROW_DOWN] * 63)
    assert tip(chrome).startswith("rank 63 on n64\n") and css(chrome, "svg[data-row]")[63].is_displayed()
    keys(chrome, Keys.ESCAPE)
    assert tip(chrome) == ""


@needs_chromium
def test_a_failed_run_shows_why_and_the_end_of_the_log_as_text(opened: Callable[..., Chrome]) -> None:
    chrome = opened("failed")
    assert one(chrome, ".state").text == "FAILED" and "failed first" in one(chrome, ".sentences").text
    assert one(chrome, ".how.bad").text == "failed, code 7"
    log = one(chrome, "details pre").text
    assert log.splitlines() == ["first", "red </pre></script><script>alert(2)</script>", "100 %", "{{ 7 * 7 }} &lt;·"]
    assert chrome.title.startswith("a</title><script>alert(0)</script>: FAILED")
    assert len(css(chrome, "script")) == 2


@needs_chromium
def test_light_and_dark_are_what_the_reader_prefers(opened: Callable[..., Chrome], tmp_path: Path) -> None:
    shots = {}
    for scheme in ("light", "dark"):
        chrome = opened("64 ranks", scheme)
        paper, ink = brightness(chrome)
        assert (paper > ink + 400) if scheme == "light" else (ink > paper + 400)
        shots[scheme] = chrome.get_screenshot_as_png()
        assert len(shots[scheme]) > 10_000
    assert shots["light"] != shots["dark"]


@needs_chromium
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no pdftotext here")
def test_in_print_all_ranks_stand_and_no_buttons(opened: Callable[..., Chrome], tmp_path: Path) -> None:
    """Also from a dark screen, and zoomed: paper shows what the screen does, in black on white."""
    chrome = opened("64 ranks", "dark")
    browser.print_pdf(chrome, tmp_path / "page.pdf")
    done = subprocess.run(["pdftotext", "-layout", str(tmp_path / "page.pdf"), "-"], capture_output=True, text=True)
    words = done.stdout.split()
    assert {"n1", "n64", "Timeline", "useful"} <= set(words) and "All" not in words and "zoom;" not in words
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        paper, ink = brightness(chrome)
        assert (paper, ink) == (255 * 3, 0)
    finally:
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@needs_chromium
def test_without_scripts_the_page_still_tells_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(re.sub(r"<script>.*?</script>", "", page(REPORTS["64 ranks"]()), flags=re.S), encoding="utf-8")
    with browser.chromium() as chrome:
        chrome.get(path.as_uri())
        assert len(css(chrome, "#axis text")) >= 4 and len(css(chrome, "svg[data-row] rect")) > 64 * 8
