"""The server's page in a browser: tokens in colour, switches that requests carry, a stopped stream, narrow screens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("sse_starlette", reason='needs the extra "serve"')

from foredraft.serve.page import page, policy
from page_server import ANSWER, ROUNDS, PageServer, serving

CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), "")
DRIVER = shutil.which("chromedriver") or ""
WAIT = 30  # seconds at most for what the page is to do

browser_test = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs a browser (chromium and chromedriver), and there is none here"
)


class Elements(HTMLParser):
    """Names and attributes of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_nothing_from_elsewhere() -> None:
    elements = Elements()
    elements.feed(page())
    for tag, attributes in elements.found:
        assert "style" not in attributes, "the policy forbids it"
        assert not [name for name in attributes if name.startswith("on")], "the policy forbids it"
        for name in ("src", "href", "action"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    assert set(re.findall(r"https?://[^\s\"']+", page())) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert ".innerHTML" not in page()


def test_labels_name_every_control_and_ids_are_unique() -> None:
    elements = Elements()
    elements.feed(page())
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"find\(\"([\w-]+)\"\)", page()))
    assert used <= set(ids)
    tags = [tag for tag, _ in elements.found]
    assert {"header", "main", "aside", "caption", "h1"} <= set(tags)
    assert dict(elements.found)["html"] == {"lang": "en"}


def test_the_policy_allows_the_page_and_no_more() -> None:
    parts = dict(part.split(" ", 1) for part in policy().split("; "))
    assert parts["default-src"] == "'none'"
    assert parts["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", parts["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", parts["style-src"])
    assert "unsafe" not in policy()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Tab:
    """The page in a browser, and the few things that tests do with it."""

    def __init__(self, driver: Any, address: str, width: int = 1280) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        self.driver = driver
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(address)
        self._wait = WebDriverWait(driver, WAIT, poll_frequency=0.05)

    def until(self, script: str) -> Any:
        """The value of a script, as soon as it is true."""
        return self._wait.until(lambda driver: driver.execute_script(f"return {script}"))

    def get(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def ready(self) -> None:
        self.until("document.getElementById('state').className === 'ready'")

    def send(self, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.one("#prompt").send_keys(text + Keys.ENTER)

    def ended(self, answers: int = 1) -> None:
        self.until(f"document.querySelectorAll('.answer:not(.live)').length >= {answers}")

    def press(self, key: str, times: int = 1) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*[key] * times).perform()

    def said(self) -> str:
        return str(self.get("document.getElementById('said').textContent"))


Open = Callable[..., Tab]


@pytest.fixture
def server() -> PageServer:
    return PageServer()


@pytest.fixture
def tab(server: PageServer, chromium: Any) -> Iterator[Open]:
    """Opens the page of `server`."""
    with serving(server) as address:
        yield lambda width=1280: Tab(chromium, address, width)
        chromium.execute_script("sessionStorage.clear()")
        chromium.get("about:blank")  # its open streams end, so that the server can


@browser_test
def test_an_answer_arrives_token_by_token_in_the_colours_of_its_origins(tab: Open, server: PageServer) -> None:
    page = tab()
    page.ready()
    page.send("Write a class.")
    page.ended()
    shown = page.get(
        "[...document.querySelectorAll('.answer .t')].map(t => [t.textContent, t.className.split(' ')[1]])"
    )
    tokens = [token for chunk in ROUNDS for token in chunk["tokens"] if token["text"]]
    assert shown == [[token["text"], token["origin"]] for token in tokens]
    look = "(s => [s.backgroundColor, s.borderBottomStyle])(getComputedStyle(document.querySelector('.answer .{}')))"
    looks = {origin: page.get(look.format(origin)) for origin in ("draft", "correction", "bonus")}
    assert len({colour for colour, _ in looks.values()}) == 3
    assert len({line for _, line in looks.values()}) == 3, "origins must differ in more than colour"
    assert server.asked[0]["messages"] == [{"role": "user", "content": "Write a class."}]
    assert server.asked[0]["foredraft"] == {"trace": True}
    assert page.one("#forwards").text == str(len(ROUNDS))
    assert page.one("#rate").text == "125"
    assert "2.04 ×" in page.one("#ratio").text
    assert page.said() == f"Answer: {ANSWER}"
    assert page.all("#requests tr")


@browser_test
def test_the_next_question_tells_what_was_said_and_how_to_draft(tab: Open, server: PageServer) -> None:
    page = tab()
    page.ready()
    page.send("One.")
    page.ended()
    page.driver.execute_script("document.getElementById('drafter').focus()")
    page.one("#drafter option[value=suffix]").click()
    page.one("#rule option[value=block]").click()
    page.one("#budget").send_keys("5")
    page.one("#seed").send_keys("11")
    temperature = page.one("#temperature")
    temperature.clear()
    temperature.send_keys("0.7")
    page.send("Two.")
    page.ended(2)
    asked = server.asked[1]
    assert asked["foredraft"] == {"trace": True, "drafter": "suffix", "rule": "block", "budget": 5}
    assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["stream"]) == (0.7, 11, 256, True)
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["messages"][1]["content"] == ANSWER
    page.one("#new").click()
    page.send("Three.")
    page.ended(1)
    assert [message["content"] for message in server.asked[2]["messages"]] == ["Three."]


@browser_test
def test_escape_stops_an_answer_and_keeps_what_there_is(tab: Open, server: PageServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page = tab()
    page.ready()
    page.send("hang")
    page.until("document.querySelectorAll('.answer .t').length > 5")
    assert page.one("#stop").is_displayed()
    page.press(Keys.ESCAPE)
    page.ended()
    assert server.left.wait(WAIT), "the server was not told"
    assert page.one("#send").is_displayed()
    assert page.said().startswith("Stopped: ```python")
    page.send("Go on.")
    page.ended(2)
    kept = server.asked[1]["messages"][1]["content"]
    assert kept
    assert ANSWER.startswith(kept)


@browser_test
def test_errors_are_told_and_a_refused_question_can_be_asked_again(tab: Open, server: PageServer) -> None:
    page = tab()
    page.ready()
    page.send("refuse")
    page.until("document.querySelector('[role=alert]')")
    assert "256 requests are waiting already. Try again in 5 seconds." in page.one("[role=alert]").text
    page.one("[role=alert] button").click()
    page.until("document.querySelectorAll('[role=alert]').length === 1 && document.getElementById('stop').hidden")
    assert [asked["messages"] for asked in server.asked] == [[{"role": "user", "content": "refuse"}]] * 2
    page.send("break")
    page.until("document.querySelectorAll('[role=alert]').length === 2")
    assert page.all("[role=alert]")[1].text == "The worker was restarted."
    assert [message["content"] for message in server.asked[2]["messages"]] == ["break"]
    page.send("cut")
    page.until("document.querySelectorAll('[role=alert]').length === 3")
    assert "ended before the answer was complete" in page.all("[role=alert]")[2].text


@browser_test
def test_a_key_is_asked_for_and_kept_in_the_tab(tab: Open, server: PageServer) -> None:
    from selenium.webdriver.common.keys import Keys

    server.key = "opensesame"
    page = tab()
    page.until("!document.getElementById('key').hidden")
    page.one("#secret").send_keys("wrong" + Keys.ENTER)
    page.until("!document.getElementById('key').hidden && !document.getElementById('refused').hidden")
    page.one("#secret").send_keys("opensesame" + Keys.ENTER)
    page.ready()
    page.send("Hello.")
    page.ended()
    assert not page.all("[role=alert]")
    assert page.get("[localStorage.length, document.cookie, sessionStorage.getItem('foredraft-key')]") == [
        0,
        "",
        "opensesame",
    ]


@browser_test
def test_rounds_can_be_looked_at_one_by_one(tab: Open) -> None:
    page = tab()
    page.ready()
    page.send("Write a class.")
    page.ended()
    last = ROUNDS[-1]["round"]
    assert page.one("#where").text == f"{len(ROUNDS)} of {len(ROUNDS)}"
    assert len(page.all("#tree g")) == 2 + len(last["tree"]["tokens"])
    assert len(page.all("#tree g.accepted")) == last["accepted"]
    page.one("#back").click()
    assert len(page.all("#tree g")) == 2 + len(ROUNDS[-2]["round"]["tree"]["tokens"])
    page.one(".answer .t").click()
    assert page.one("#where").text == f"1 of {len(ROUNDS)}"
    assert page.one("#next").is_enabled()
    assert not page.one("#back").is_enabled()
    assert page.one("#tree svg").get_attribute("aria-label") == page.one("#told").text


@browser_test
@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(tab: Open, width: int) -> None:
    page = tab(width)
    page.ready()
    page.send("A long word: " + "x" * 200)
    page.ended()
    page.driver.execute_script("document.getElementById('how').open = true")
    assert page.get("document.documentElement.scrollWidth") <= width
    assert page.get("document.querySelector('#tree').scrollWidth > document.querySelector('#tree').clientWidth")


@browser_test
def test_the_keyboard_reaches_everything_in_order(tab: Open) -> None:
    from selenium.webdriver.common.keys import Keys

    page = tab()
    page.ready()
    assert page.get("document.activeElement.id") == "prompt"
    page.press("a")
    page.driver.execute_script("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.driver.execute_script("document.querySelector('h1').tabIndex = -1; document.querySelector('h1').focus()")
    seen = []
    for _ in range(16):
        page.press(Keys.TAB)
        seen.append(
            page.get(
                "document.activeElement.id || document.activeElement.textContent || document.activeElement.tagName"
            )
        )
        assert page.get("getComputedStyle(document.activeElement).outlineStyle") != "none" or seen[-1] == "prompt"
    order = ["new", "talk", "prompt", "send", "drafter", "rule", "budget", "temperature", "seed", "max", "tree"]
    assert [name for name in seen if name in order] == order
    assert page.get("getComputedStyle(document.getElementById('line')).outlineStyle") == "none"
    page.driver.execute_script("document.getElementById('prompt').focus()")
    assert page.get("getComputedStyle(document.getElementById('line')).outlineStyle") == "solid"


CONTRASTS = """
const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
const light = colour => numbers(colour).slice(0, 3).map(v => v / 255)
  .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const clear = colour => numbers(colour).length < 3 || numbers(colour)[3] === 0;
const behind = element => {
  const node = element.namespaceURI.endsWith("svg") && element.parentElement.querySelector(".box");
  const box = node && getComputedStyle(node).fill;
  if (box && !clear(box)) return box;
  while (clear(getComputedStyle(element).backgroundColor)) element = element.parentElement;
  return getComputedStyle(element).backgroundColor;
};
const shown = [...document.querySelectorAll("body :not(title)")].filter(e => e.checkVisibility()
  && !e.closest(".unseen") && (e.matches("input, select, textarea")
  || [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())));
return shown.map(e => {
  const style = getComputedStyle(e), own = light(e.namespaceURI.endsWith("svg") ? style.fill : style.color);
  const other = light(behind(e));
  return [(Math.max(own, other) + .05) / (Math.min(own, other) + .05), e.tagName, e.textContent.slice(0, 40)];
});
"""
"""For each element with text: the contrast with what is behind it (WCAG 2), its name, its text."""


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(tab: Open, scheme: str) -> None:
    page = tab()
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    page.ready()
    page.send("Write a class.")
    page.ended()
    page.send("refuse")
    page.until("document.querySelector('[role=alert]')")
    page.driver.execute_script("document.getElementById('key').hidden = false")
    contrasts = page.driver.execute_script(CONTRASTS)
    assert len(contrasts) > 150
    assert [found for found in contrasts if found[0] < 4.5] == []


@browser_test
def test_shift_and_enter_begins_a_new_line(tab: Open, server: PageServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page = tab()
    page.ready()
    page.one("#prompt").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.get("document.getElementById('prompt').value") == "one\ntwo"
    assert not server.asked
    page.send("")
    page.ended()
    assert server.asked[0]["messages"][0]["content"] == "one\ntwo"


@browser_test
def test_it_speaks_to_its_own_server_only_and_reports_no_fault(tab: Open) -> None:
    import json

    page = tab()
    page.ready()
    page.send("Write a class.")
    page.ended()
    home = page.get("location.origin")
    sent = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert {url.removeprefix(home) for url in urls if not url.startswith("data:")} == {
        "/",
        "/foredraft/status",
        "/v1/chat/completions",
    }
    assert page.driver.get_log("browser") == []
