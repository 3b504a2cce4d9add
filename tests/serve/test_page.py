"""The page, driven in a real browser without a window.

With VARJAX_SCREENSHOTS=DIR the pictures of docs/images are made there.
"""

import contextlib
import io
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.serve.process import process
from varjax.io import pictures

pytestmark = pytest.mark.slow
pytest.importorskip("gradio", reason="needs the extra serve")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 600_000  # milliseconds: programs are compiled, on a machine that does other things, too
playwright.expect.set_options(timeout=SECONDS)
PHONE = {"width": 390, "height": 844}
WINDOW = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def server():
    if not CHROMIUM:
        pytest.skip("needs a chromium on this machine")
    with process("--max_batch=1") as server:
        yield server


@pytest.fixture(scope="module")
def browser(server):
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def visit(browser, server):
    """visit(): a new visitor's page; at the end none of them has logged an error."""
    wrong, pages = [], []

    def open_page(viewport=WINDOW):
        page = browser.new_context(viewport=viewport).new_page()
        page.set_default_timeout(SECONDS)
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("response", lambda r: wrong.append(r.url) if r.status >= 400 else None)
        page.on("request", lambda r: wrong.append(r.url) if _elsewhere(r.url) else None)
        page.goto(server.address)
        page.wait_for_selector("#draw")
        pages.append(page)
        return page

    def _elsewhere(url):
        return not url.startswith((server.address, "data:", "blob:"))

    yield open_page
    for page in pages:
        page.context.close()
    assert not wrong


def screenshot(page, name, full_page=True):
    if folder := os.environ.get("VARJAX_SCREENSHOTS"):
        data = page.screenshot(full_page=full_page)
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        picture.thumbnail((900, 1600))
        picture.quantize(128).save(pathlib.Path(folder) / f"{name}.png", optimize=True)


def subject(page, number=0):
    return page.get_by_label("Class (name or number)").nth(number)


def finish(page, said="#said"):
    page.wait_for_function(
        f"document.querySelector('{said}')?.innerText.trim().endsWith('done.')", timeout=SECONDS
    )
    page.wait_for_timeout(1000)  # pictures are loaded


def choose(page, policy, number=0):
    page.get_by_label("Policy").nth(number).click()
    page.get_by_role("option", name=policy, exact=True).click()


def upload(page, path):
    """Give the canvas a picture. It takes none before it is drawn itself, and says neither."""
    page.locator("#canvas canvas").first.wait_for()
    page.wait_for_timeout(3000)
    page.locator("#canvas input[type=file]").first.set_input_files(path)
    page.wait_for_timeout(3000)


def image_of(page, name):
    """The picture in a place of the page, as an array."""
    source = page.locator(f"#{name} img").first.get_attribute("src")
    return np.asarray(Image.open(io.BytesIO(page.request.get(source).body())).convert("RGB"))


def test_drawing(visit):
    page = visit()
    page.get_by_role("button", name="mango").click()  # an example
    playwright.expect(subject(page)).to_have_value("mango")
    subject(page).fill("kiwi")
    page.get_by_label("Seed (empty: any)").first.fill("7")
    subject(page).press("Enter")
    previews = set()
    page.wait_for_function("document.querySelector('#said').innerText.includes('Seed 7')")
    while not page.locator("#said").inner_text().strip().endswith("done."):
        previews.add(page.locator("#of-mine").inner_text())
        page.wait_for_timeout(20)
    finish(page)
    assert any("scale" in words for words in previews), previews
    words = page.locator("#of-mine").inner_text()
    assert re.search(r"25%.*PSNR [\d.]+ dB, \d+% equal tokens", words), words
    assert "100%" in page.locator("#of-full").inner_text()
    mine, full = image_of(page, "mine"), image_of(page, "full")
    assert mine.shape == full.shape == (384, 384, 3) and (mine != full).any()
    page.get_by_text("What each head keeps").click()
    playwright.expect(page.locator(".keeps svg")).to_be_visible()
    screenshot(page, "page")
    # another policy: other bytes; the gallery has all four
    choose(page, "streaming")
    page.locator("#draw").click()
    page.wait_for_function("document.querySelector('#said').innerText.includes('streaming')")
    finish(page)
    assert (image_of(page, "full") == full).all()
    assert page.locator("#gallery img").count() >= 4


def test_cancelling(visit):
    page = visit()
    choose(page, "h2o")  # not compiled yet: there is time
    page.locator("#draw").click()
    page.wait_for_function("document.querySelector('#said').innerText.includes('h2o')")
    page.locator("#cancel").click()
    page.wait_for_function("document.querySelector('#said').innerText.includes('Cancelled')")
    choose(page, "full")
    page.get_by_label("Seed (empty: any)").first.fill("8")
    page.locator("#draw").click()
    page.wait_for_function(
        "document.querySelector('#said').innerText.includes('Seed 8')", timeout=SECONDS
    )
    finish(page)
    assert "the same picture" in page.locator("#of-mine").inner_text()


def test_wrong_input(visit):
    page = visit()
    subject(page).fill("<img src=x onerror=alert(1)>")
    subject(page).press("Enter")
    message = page.locator(".toast-wrap")
    message.wait_for()
    assert "there is no class" in message.inner_text() and not message.locator("img").count()
    page.get_by_label("Seed (empty: any)").first.fill("-3")
    subject(page).fill("kiwi")
    subject(page).press("Enter")
    page.get_by_text("a whole number, 0 to").wait_for()


def test_editing(visit, tmp_path):
    rows = np.linspace(40, 250, 96).astype(np.uint8)
    picture = np.stack([np.broadcast_to(rows[:, None], (96, 96))] * 3, -1)
    pictures.save_png(tmp_path / "mine.png", np.ascontiguousarray(picture))
    page = visit()
    page.get_by_role("tab", name="Edit").click()
    upload(page, tmp_path / "mine.png")
    page.get_by_text("the lower half").click()
    subject(page, 1).fill("orange")
    page.get_by_label("Seed (empty: any)").nth(1).fill("3")
    page.locator("#edit").click()
    finish(page, "#edit-said")
    before, after = image_of(page, "before"), image_of(page, "after")
    assert (before[:192] == after[:192]).all() and (before[192:] != after[192:]).any()
    # painted by hand
    page.get_by_text("what I paint").click()
    box = page.locator("#canvas canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 60, y)
    page.mouse.down()
    for step in range(12):
        page.mouse.move(x - 60 + 10 * step, y + 3 * step)
    page.mouse.up()
    page.wait_for_timeout(1000)
    page.get_by_label("Seed (empty: any)").nth(1).fill("4")
    page.locator("#edit").click()
    page.wait_for_function("document.querySelector('#edit-said').innerText.includes('Seed 4')")
    finish(page, "#edit-said")
    painted = image_of(page, "after")
    same = (painted == before).all(-1).mean()
    assert 0.05 < same < 0.99
    screenshot(page, "page_edit")


def test_uploads_that_are_too_large(visit, tmp_path):
    """A file over the limit is told, and nothing of it is drawn; one of another shape is cut, and
    that is told, too."""
    noise = np.random.default_rng(0).integers(0, 256, (2400, 2400, 3), np.uint8)
    pictures.save_png(tmp_path / "large.png", noise)  # the canvas would say of a file that is none
    assert (tmp_path / "large.png").stat().st_size > 2**24
    page = visit()
    page.get_by_role("tab", name="Edit").click()
    upload(page, tmp_path / "large.png")
    page.get_by_text("This file is too large: at most 16 MiB").wait_for()
    wide = np.full((1500, 3000, 3), 90, np.uint8)
    pictures.save_png(tmp_path / "wide.png", wide)
    upload(page, tmp_path / "wide.png")
    playwright.expect(page.locator("#too-large")).to_have_text("")
    page.get_by_text("the lower half").click()
    page.locator("#edit").click()
    finish(page, "#edit-said")
    words = page.locator("#of-before").inner_text()
    assert "3000 x 1500 pixels" in words and "cut out" in words, words


def test_two_visitors(visit):
    pages = [visit(), visit()]
    for number, page in enumerate(pages):
        subject(page).fill(str(10 + number))
        page.get_by_label("Seed (empty: any)").first.fill(str(20 + number))
        page.locator("#draw").click()
    for number, page in enumerate(pages):
        page.wait_for_function(
            f"document.querySelector('#said').innerText.startsWith('Seed {20 + number}')"
        )
        finish(page)
    assert (image_of(pages[0], "mine") != image_of(pages[1], "mine")).any()


def test_a_phone(visit):
    page = visit(PHONE)
    subject(page).fill("lemon")
    subject(page).press("Enter")
    page.wait_for_function("document.querySelector('#said').innerText.includes('Seed')")
    finish(page)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"], "it scrolls sideways"
    left, right = (page.locator(f"#{name} img").first.bounding_box() for name in ("mine", "full"))
    assert left["width"] > 120 and right["width"] > 120
    screenshot(page, "page_phone")


def test_a_page_with_a_key(browser, tmp_path):
    """The browser asks for a password; with it everything works, without it nothing is shown."""
    (tmp_path / "key").write_text("of the tests\n")
    with process("--max_batch=1", f"--api_key={tmp_path / 'key'}") as server:
        stranger = browser.new_context().new_page()
        assert stranger.request.get(server.address).status == 401
        with contextlib.suppress(playwright.Error):  # some versions of Chromium show the 401
            stranger.goto(server.address)
        assert not stranger.locator("#draw").count()
        known = {"username": "anybody", "password": "of the tests"}
        page = browser.new_context(http_credentials=known).new_page()
        page.set_default_timeout(SECONDS)
        page.goto(server.address)
        page.wait_for_selector("#draw")
        choose(page, "full")
        page.get_by_label("Seed (empty: any)").first.fill("5")
        page.locator("#draw").click()
        page.wait_for_function("document.querySelector('#said').innerText.includes('Seed 5')")
        finish(page)
        assert image_of(page, "mine").shape == (384, 384, 3)
        for one in (stranger, page):
            one.context.close()
