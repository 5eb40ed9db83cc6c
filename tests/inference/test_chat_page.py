"""The page at / in a real browser: it streams an answer, shows thoughts and metrics, and stops when told."""

import shutil

import pytest

from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference.scripted_engine import ScriptedEngine
from tests.inference.served import serving, wait_until
from tests.locations import TINY

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")


@pytest.fixture(scope="module")
def server():
  tokenizer = KimiTokenizer.from_directory(TINY)
  with serving(ScriptedEngine(), tokenizer, sorted(tokenizer.stop_ids), api_key="secret") as served:
    yield served


@pytest.fixture(scope="module")
def browser():
  with playwright.sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
    yield browser
    browser.close()


@pytest.fixture
def page(server, browser):
  """A page that knows the key; nothing may fail in it, and nothing may come from elsewhere."""
  page, problems = browser.new_page(), []
  page.on("pageerror", lambda error: problems.append(str(error)))
  page.on("request", lambda request: request.url.startswith(server.url) or problems.append(request.url))
  page.goto(server.url)
  page.fill("#key", "secret")
  page.dispatch_event("#key", "change")
  page.wait_for_function("document.getElementById('model').textContent.includes('tiny')")
  yield page
  page.close()
  assert [each for each in problems if not each.startswith("data:")] == []


def test_an_answer_streams_with_its_thoughts(server, page):
  tokenizer = server.tokenizer
  marker = tokenizer.special_id
  tags = lambda kind, name: [marker(kind), *tokenizer.encode(name), marker("<|sep|>")]
  thoughts, words = tokenizer.encode("想 🤔"), tokenizer.encode("<b>尼罗河</b> 😀")
  close = tags("<|close|>", "think") + tags("<|open|>", "response")
  server.engine.answers = [[*thoughts, *close, *words, marker("<|end_of_msg|>")]]
  page.fill("#input", "Hello")
  page.press("#input", "Enter")
  page.wait_for_function("!document.getElementById('send').disabled && document.querySelector('.content')")
  assert page.text_content(".user") == "Hello"
  assert page.text_content(".reasoning") == "想 🤔"
  assert page.text_content(".content") == "<b>尼罗河</b> 😀"  # text, never markup of the page
  row = "dt:text-is('generated tokens') + dd"
  page.wait_for_function("document.querySelector('#metrics').textContent.includes('generated tokens')")
  wait_until(lambda: int(page.text_content(row)) >= len(thoughts + words))
  page.click("#clear")
  assert page.query_selector(".message") is None


def test_the_chat_is_wider_than_the_metrics_beside_it(page):
  chat, metrics, form = (page.locator(part).bounding_box() for part in ("main", "aside", "form"))
  assert chat["x"] == form["x"] == 0 and chat["width"] == form["width"] == metrics["x"]
  assert chat["width"] > metrics["width"]


def test_stop_frees_the_slot(server, page):
  server.engine.answers, server.engine.seconds = [server.tokenizer.encode("a " * 400)], 0.05
  page.fill("#input", "Go on")
  page.click("#send")
  page.wait_for_selector(".reasoning")
  page.click("#stop")
  wait_until(lambda: server.engine.resources.used_slots == 0, seconds=3)
  page.wait_for_function("!document.getElementById('send').disabled")
  server.engine.seconds = 0.0


def test_a_mistake_is_shown(server, page):
  page.fill("#key", "wrong")
  page.dispatch_event("#key", "change")
  page.wait_for_function("document.getElementById('model').textContent.includes('API key')")
  page.fill("#input", "Hello")
  page.press("#input", "Enter")
  page.wait_for_selector(".error")
  assert "API key" in page.text_content(".error")
