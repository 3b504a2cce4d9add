"""The page, driven in a real browser without a window. Its policy (CSP) stays in force.

With VARJAX_SCREENSHOTS=DIR the pictures of docs/images are made there.
"""

import base64
import contextlib
import io
import os
import pathlib
import re
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from tests.serve.process import process
from varjax.storage import pictures

pytestmark = pytest.mark.slow
pytest.importorskip("fastapi", reason="needs the extra serve")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 300  # programs are compiled, on a machine that does other things, too


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
    """visit(): a new visitor's page; at the end none of them has logged anything, asked another
    server, or got an error. visit.allowed: paths whose errors a test expects."""
    wrong, pages = [], []

    def open_page(hash="", **options):
        options = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | options
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", lambda m: wrong.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "response", lambda r: wrong.append(f"{r.status} {r.url}") if r.status > 399 else None
        )
        page.on("request", lambda r: wrong.append(r.url) if _elsewhere(r.url) else None)
        page.goto(f"{server.address}/{hash}")
        page.wait_for_selector("#policy-a")
        pages.append(page)
        return page

    def _elsewhere(url):
        return not url.startswith((server.address, "data:", "blob:"))

    open_page.wrong = wrong
    yield open_page
    for page in pages:
        page.context.close()
    assert not wrong


def screenshot(page, name, selector=None):
    if folder := os.environ.get("VARJAX_SCREENSHOTS"):
        place = page.locator(selector) if selector else page
        picture = Image.open(io.BytesIO(place.screenshot())).convert("RGB")
        picture.thumbnail((900, 1600))
        picture.quantize(128).save(pathlib.Path(folder) / f"{name}.png", optimize=True)


def until(page, script):
    """Wait until a script is true. (The page's policy forbids playwright's own way to wait.)"""
    end = time.monotonic() + SECONDS
    while not page.evaluate(script):
        assert time.monotonic() < end, (script, page.inner_text("body")[:2000])
        time.sleep(0.02)


def status(page, words, place="#status"):
    until(page, f"document.querySelector('{place}').textContent.includes({words!r})")


def done(page, place="#status"):
    status(page, "Done in", place)
    page.wait_for_timeout(300)


def image_of(page, selector):
    """The picture in a place of the page, as an array."""
    source = page.locator(selector).get_attribute("src")
    data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def ask(page, name, seed):
    page.fill("#subject", name)
    page.fill("#seed", str(seed))
    page.press("#subject", "Enter")


def test_the_first_view(visit):
    """It is there at once, and not empty for long."""
    page = visit()
    page.wait_for_timeout(300)
    page.reload()  # the browser itself has started
    page.wait_for_selector("#policy-a")
    paints = page.evaluate("performance.getEntriesByType('paint').map((one) => one.startTime)")
    print("first paint", paints)
    assert max(paints) < 400  # beside a compiler; 60 ms on a quiet machine
    until(page, "document.querySelectorAll('#gallery img').length === 44")
    assert page.locator("#subject-list li").count() == 44
    until(page, "document.querySelectorAll('#subject-list img').length === 44")
    page.fill("#subject", "tomato")
    names = page.locator("#subject-list li").all_inner_texts()
    assert names and all("tomato" in name for name in names)
    page.press("#subject", "ArrowDown")
    assert page.locator("#subject-list li[aria-selected=true]").inner_text() == names[1]


def test_drawing(visit):
    page = visit()
    ask(page, "kiwi", 7)
    previews = set()
    while "Done in" not in page.inner_text("#status"):
        previews.add(page.inner_text("#about-a"))
        time.sleep(0.005)
    done(page)
    assert any("scale" in words for words in previews), previews
    words = page.inner_text("#about-a")
    assert re.search(r"headkv, budget 0.25.*\(25 % of full\), [\d.]+ s", words, re.S), words
    near = re.search(r"beside the full cache: PSNR ([\d.]+) dB, (\d+) % equal tokens", words)
    mine, full = image_of(page, "#picture-a"), image_of(page, "#picture-b")
    decibels = 10 * np.log10(255**2 / ((mine - full) ** 2).mean())
    assert abs(float(near[1]) - decibels) < 0.051
    assert "(100 % of full)" in page.inner_text("#about-b")
    a, b = (float(re.search(r", ([\d.]+) s", page.inner_text(f"#about-{x}"))[1]) for x in "ab")
    assert a == b or page.is_visible("#slower") == (a > b)
    # the same, as `run` draws it
    from varjax import load
    from varjax.generation.generator import Generator
    from varjax.storage.pictures import to_uint8

    model = load()
    kiwi = model.class_names.index("kiwi")
    expected = to_uint8(Generator(model, "headkv", 0.25, batch_size=1)([kiwi], seed=7))[0]
    assert np.abs(mine - expected).max() <= 1
    page.click("#kept summary")
    page.wait_for_timeout(300)
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, "page")


def test_a_second_policy_and_several_pictures(visit):
    page = visit()
    page.select_option("#policy-b", "streaming")
    page.fill("#budget-b", "0.5")
    page.fill("#count", "3")
    ask(page, "mango", 5)
    done(page)
    assert "streaming, budget 0.5" in page.inner_text("#about-b")
    assert "beside streaming" in page.inner_text("#about-a")
    tiles = page.locator("#several button")
    assert tiles.count() == 3
    first = image_of(page, "#picture-a")
    tiles.nth(2).click()
    page.wait_for_timeout(200)
    assert (image_of(page, "#picture-a") != first).any()
    page.select_option("#policy-b", "")  # nothing to compare with
    page.fill("#count", "1")
    page.click("#draw")
    status(page, "Done in")
    assert not page.is_visible("#picture-b") and page.locator("#history button").count() == 2
    page.locator("#history button").nth(1).click()
    page.wait_for_timeout(200)
    assert page.is_visible("#picture-b") and "streaming" in page.inner_text("#about-b")


def test_wrong_input(visit):
    page = visit()
    page.fill("#subject", "<img src=x onerror=alert(1)>")
    page.press("#subject", "Enter")
    status(page, "here is no class")
    assert not page.locator("#status img").count()
    assert page.get_attribute("#subject", "aria-invalid") == "true"
    page.fill("#subject", "kiwi")
    page.fill("#seed", "-3")
    page.click("#draw")
    status(page, "a whole number, 0 to")
    page.fill("#seed", "3")
    page.click("summary >> text=Sampling")
    page.fill("#sampling-top_p", "7")
    page.click("#draw")
    status(page, "op_p=7 is outside")
    assert page.get_attribute("#sampling-top_p", "aria-invalid") == "true"
    assert page.get_attribute("#status", "role") == "alert"
    assert [w for w in visit.wrong if "422" in w]
    visit.wrong[:] = [w for w in visit.wrong if "422" not in w]


def test_what_heads_kept(visit):
    page = visit()
    page.click("#gallery button >> nth=0")
    done(page)
    page.click("#kept summary")
    page.wait_for_timeout(300)
    before = page.inner_text("#kept-head")
    assert re.match(r"Layer 1, head 1: \d+ of 66 tokens kept", before)
    counts = page.locator("#kept-large small").all_inner_texts()
    kept = [int(re.search(r": (\d+) of", words)[1]) for words in counts]
    assert len(counts) == 5 and sum(kept) == int(re.search(r": (\d+) of", before)[1])
    page.press("#kept-map", "ArrowRight")
    page.press("#kept-map", "ArrowDown")
    assert page.inner_text("#kept-head").startswith("Layer 2, head 2")
    page.click("#kept-whose button >> text=full")
    page.wait_for_timeout(200)
    assert "66 of 66 tokens kept (100 %)" in page.inner_text("#kept-head")
    page.click("#kept-whose button >> text=headkv")
    page.select_option("#kept-scale", "all")
    page.select_option("#kept-scale", "4")
    page.wait_for_timeout(200)
    screenshot(page, "page_kept", "#kept")


def paint(page, points):
    box = page.locator("#canvas").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=5)
    page.mouse.up()


def test_editing(visit, tmp_path):
    rows = np.linspace(40, 250, 96).astype(np.uint8)
    picture = np.ascontiguousarray(np.stack([np.broadcast_to(rows[:, None], (96, 96))] * 3, -1))
    pictures.save_png(tmp_path / "mine.png", picture)
    page = visit()
    page.click("#tab-edit")
    page.set_input_files("#upload", tmp_path / "mine.png")
    until(page, "document.querySelector('#upload-told').textContent.includes('96 x 96 pixels')")
    page.click("#preset-lower")
    page.fill("#edit-subject", "orange")
    page.fill("#edit-seed", "3")
    page.click("#edit-draw")
    done(page, "#edit-status")
    before, after = image_of(page, "#edit-before"), image_of(page, "#edit-after")
    assert (before[:32] == after[:32]).all() and (before[32:] != after[32:]).any()
    # a soft seam changes a few lines above the mask, and nothing else
    page.fill("#feather", "4")
    page.fill("#edit-seed", "3")
    page.evaluate("document.querySelector('#edit-status').textContent = ''")
    page.click("#edit-draw")
    done(page, "#edit-status")
    soft = image_of(page, "#edit-after")
    assert (soft[:28] == after[:28]).all() and np.abs(soft[32:] - after[32:]).max() <= 1
    assert (soft[28:32] != after[28:32]).any()
    # painted by hand, undone, painted again, and rubbed out in part
    page.click("#clear")
    paint(page, [(0.3, 0.5), (0.7, 0.6)])
    page.click("#undo")
    page.click("#edit-draw")
    status(page, "black: nothing would be drawn", "#edit-status")
    visit.wrong[:] = [w for w in visit.wrong if "422" not in w]
    page.click("#redo")
    page.click("#eraser")
    paint(page, [(0.7, 0.3), (0.7, 0.9)])
    page.fill("#edit-seed", "4")
    page.click("#edit-draw")
    status(page, "Seed 4. Done", "#edit-status")
    page.wait_for_timeout(300)
    painted = image_of(page, "#edit-after")
    assert 0.5 < (painted == before).all(-1).mean() < 0.99
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, "page_edit")
    page.click("#edit-use")
    page.wait_for_timeout(300)


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
        page.goto(server.address)
        page.wait_for_selector("#policy-a")
        page.select_option("#policy-a", "full")
        ask(page, "lemon", 5)
        done(page)
        assert image_of(page, "#picture-a").shape == (64, 64, 3)
        for one in (stranger, page):
            one.context.close()
