"""The page at work in a browser: its colours, two keys on one server, pictures for the docs."""

import importlib.util
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import studio
from vllm_vidspec.tools.processes import VllmServer, free_port

httpx = pytest.importorskip("httpx")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.serve, pytest.mark.slow]

KEYS, ADMIN = ("key-of-a", "key-of-b"), "the-operator's"
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
NEEDED = {
    "selenium (pip install '.[browser]')": importlib.util.find_spec("selenium"),
    "Chromium and its driver (apt-get install chromium chromium-driver)": CHROMIUM and DRIVER,
}
PICTURES = os.environ.get("VIDSPEC_STUDIO_PICTURES")  # a folder; where not set, they are looked at and thrown away


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port, folder = free_port(), tmp_path_factory.mktemp("studio")
    args = [*studio.own_args(studio.Show(), port), "--api-key", *KEYS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "vidspec")
        patch.setenv(studio.ADMIN_KEY, ADMIN)
        with VllmServer(args, port, folder / "server.log") as server:
            server.wait_ready(timeout_s=300)
            yield server


class Overheard(studio.Studio):
    """A page's server that keeps a copy of what the server has answered."""

    heard: list[tuple[str | None, str, bytes]]

    async def stream(self, side, body, headers, turn):
        async for part in super().stream(side, body, headers, turn):
            self.heard.append((side, headers.get("Authorization", ""), part))
            yield part

    def steps(self, side, key):
        text = b"".join(part for of, whose, part in self.heard if (of, whose) == (side, f"Bearer {key}")).decode()
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [step for chunk in chunks for step in chunk.get("vidspec_record", ())]


@pytest.fixture(scope="module")
def page(server):
    import uvicorn

    listener = studio._listen(0)
    it = Overheard(server.base_url, admin_key=ADMIN, num_frames=32, is_own=True)
    it.heard, it.url = [], f"http://127.0.0.1:{listener.getsockname()[1]}/?token={it.token}"
    serve = uvicorn.Server(uvicorn.Config(it.app(), log_level="warning")).run
    threading.Thread(target=serve, args=([listener],), daemon=True).start()
    return it


@pytest.fixture
def browser():
    """Return what opens a window; each is a browser of its own, with nothing of another's."""
    if missing := [name for name, found in NEEDED.items() if not found]:
        # Who asks for pictures, as CI does, is told that there are none.
        (pytest.fail if PICTURES else pytest.skip)(f"not installed: {' and '.join(missing)}")
    from selenium import webdriver

    opened = []

    def start(url, width=1280, height=900, key=""):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        opened.append(driver)
        driver.set_script_timeout(30)
        resize(driver, width, height)
        driver.get(url)
        if key:
            run(driver, "document.getElementById('key').value = arguments[0]; connect()", key)
        wait(driver, "return !document.getElementById('ask').disabled")
        return driver

    yield start
    for driver in opened:
        driver.quit()


def resize(driver, width, height=900):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def run(driver, script, *args):
    return driver.execute_script(script, *args)


def wait(driver, condition, seconds=90):
    end = time.monotonic() + seconds
    while not run(driver, condition):
        assert time.monotonic() < end, run(driver, "return document.body.innerText")[:2000]
        time.sleep(0.1)


def answered(driver):
    wait(driver, "return studio.running !== null || studio.sides.drafts.count > 0")
    wait(driver, "return studio.running === null")
    assert run(driver, "return document.getElementById('error').textContent") == ""


def picture(driver, name, tmp_path):
    """Take the whole page, in few colours, as the docs are to stay small; return its size in bytes."""
    from PIL import Image

    height = run(driver, "return document.documentElement.scrollHeight")
    resize(driver, run(driver, "return innerWidth"), height)
    path = Path(PICTURES or tmp_path) / f"studio-{name}.png"
    assert driver.save_screenshot(str(path))
    Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)
    return path.stat().st_size


COLOURS = """
const paint = getComputedStyle(document.documentElement), probe = document.createElement('i');
document.body.append(probe);
const known = {};
for (const kind of [0, 1, 2]) {
  probe.style.background = `var(--k${kind})`;
  known[getComputedStyle(probe).backgroundColor] = kind;
}
probe.remove();
return [...document.querySelectorAll(`#${arguments[0]} .tok`)].map(it =>
  [+it.dataset.id, known[getComputedStyle(it).backgroundColor], it.textContent, +it.dataset.step]);
"""


def check_colours(driver, page, side, key):
    """Every token on the page is the record's, in its place and in the colour of its origin."""
    steps = page.steps(side, key)
    told = [
        [token, min(kind, 2), text, number]
        for number, step in enumerate(steps)
        for token, kind, text in zip(step["tokens"], step["kinds"], step["text"], strict=True)
    ]
    assert told and run(driver, COLOURS, side) == told
    return [kind for _, kind, *_ in told]


def test_the_page_shows_what_the_server_has_recorded(page, browser, tmp_path):
    """By keyboard, wide and narrow, light and dark. Catches: colours that are shifted by a token or a side."""
    page.heard.clear()
    driver = browser(page.url, key=KEYS[0])
    from selenium.webdriver import ActionChains, Keys

    run(driver, "document.getElementById('question').focus()")
    ActionChains(driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    answered(driver)
    assert set(check_colours(driver, page, "vanilla", KEYS[0])) == {0}
    kinds = check_colours(driver, page, "drafts", KEYS[0])
    assert kinds.count(1) > kinds.count(0) > 0
    assert "identical" in run(driver, "return document.getElementById('verdict').textContent")
    check_keyboard(driver)
    assert run(driver, ELSEWHERE) == [], "the page loads nothing from anywhere else"
    # A slider by keyboard: frames, and steps.
    run(driver, "document.getElementById('at').focus()")
    ActionChains(driver).send_keys(Keys.HOME + Keys.ARROW_RIGHT * 6).perform()
    assert "Frame 7 of 32" in run(driver, "return document.getElementById('framelabel').textContent")
    told = run(driver, "return document.getElementById('frame').getAttribute('aria-label')")
    assert "tokens of this frame are kept" in told
    run(driver, "document.getElementById('drafts-step').focus()")
    ActionChains(driver).send_keys(Keys.ARROW_RIGHT * 9).perform()
    lit = run(driver, "return [...document.querySelectorAll('#drafts .tok.lit')].map(it => +it.dataset.id)")
    assert lit == page.steps("drafts", KEYS[0])[9]["tokens"]
    fullest = "const it = document.getElementById('at'); it.value = 0; shown(studio.pruned); return +it.value"
    assert run(driver, fullest) == run(driver, "return perFrame().indexOf(Math.max(...perFrame()))")
    run(driver, "document.activeElement.blur()")
    for name, width, theme in (("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")):
        resize(driver, width)
        run(driver, "theme(arguments[0])", theme)
        run(driver, f"document.querySelector('[data-view={'scores' if name == 'dark' else 'kept'}]').click()")
        time.sleep(0.3)
        assert run(driver, "return document.documentElement.scrollWidth <= innerWidth"), f"{name} overflows"
        assert picture(driver, name, tmp_path) > 20_000
    resize(driver, 380)
    wide = """return [...document.querySelectorAll('body *')].filter(it =>
      it.getBoundingClientRect().right > innerWidth + 1).map(it => it.outerHTML.slice(0, 80))"""
    assert run(driver, wide) == []
    check_contrast(driver)


ELSEWHERE = """
return performance.getEntriesByType('resource').map(it => it.name)
  .filter(it => it.startsWith('http') && new URL(it).origin !== location.origin);
"""


def check_keyboard(driver):
    """Tab reaches all that there is to use, in the order of the page."""
    from selenium.webdriver import ActionChains, Keys

    focused = """const it = document.activeElement;
      return it.id || it.name || it.dataset.view || it.className || it.tagName"""
    run(driver, "document.getElementById('theme').focus()")
    reached = [run(driver, focused)]
    for _ in range(24):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        reached.append(run(driver, focused))
    order = "theme file bundled kept at pruner lambda_loose apply question ask key vanilla-step drafts-step"
    places = [reached.index(name) for name in order.split()]
    assert places == sorted(places)


CONTRAST = """
theme(arguments[0]);
const probe = document.createElement('i'), pen = new OffscreenCanvas(1, 1).getContext('2d');
document.body.append(probe);
const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = name => {
  probe.style.color = `var(${name})`; pen.fillStyle = getComputedStyle(probe).color; pen.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(v => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b;
};
const grounds = { '--ink': ['--k0', '--k1', '--k2', '--card', '--sunk'], '--soft': ['--card', '--sunk', '--bg'],
  '--bad': ['--card'], '--on-accent': ['--accent'], '--accent': ['--card'] };
const found = [];
for (const [text, under] of Object.entries(grounds)) for (const ground of under) {
  const [more, less] = [light(text), light(ground)].sort((a, b) => b - a);
  if ((more + .05) / (less + .05) < 4.5) found.push([text, ground]);
}
probe.remove();
return found;
"""


def check_contrast(driver):
    """Text on its ground has a contrast of 4.5 at least, light and dark (WCAG AA)."""
    for theme in ("light", "dark"):
        assert run(driver, CONTRAST, theme) == []


def test_two_windows_of_two_keys_see_their_own(page, browser):
    """At the same time, on one page. Catches: a record, a frame or a key that another session gets."""
    page.heard.clear()
    windows = [browser(page.url, key=key) for key in KEYS]
    for number, driver in enumerate(windows):
        run(driver, "document.getElementById('question').value = arguments[0]", f"describe the video {number}")
        run(driver, "document.getElementById('ask').click()")
    for driver, key in zip(windows, KEYS, strict=True):
        answered(driver)
        check_colours(driver, page, "drafts", key)
        shown = run(driver, "return document.documentElement.outerHTML + JSON.stringify(studio.sides.drafts.steps)")
        assert KEYS[1 - KEYS.index(key)] not in shown
    headers = {studio.GUARD: page.token, "Authorization": "Bearer other"}
    stranger = httpx.get(httpx.URL(page.url).join("/api/setup"), headers=headers, timeout=30)
    assert stranger.status_code == 401


def test_a_reader_who_leaves_does_not_leave_the_server_without_drafts(server, page, browser):
    """Stopped in the vanilla answer, for which they are switched off."""
    driver = browser(page.url, key=KEYS[0])
    run(driver, "document.getElementById('ask').click()")
    wait(driver, "return studio.sides.vanilla.count > 3")
    run(driver, "document.getElementById('stop').click()")
    wait(driver, "return studio.running === null")
    assert run(driver, "return studio.sides.drafts.count") == 0, "it was stopped too late to say anything"
    end = time.monotonic() + 10
    while not server.metrics()["speculation_on"]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_knobs_change_what_comes_next(page, browser):
    """Through the operator's route. Catches: a knob that the page shows and the server does not have."""
    driver = browser(page.url, key=KEYS[0])
    run(
        driver,
        "document.querySelector('[name=pruner]').value = 'uniform';"
        "document.querySelector('[name=prune_ratio]').value = 0.5; document.getElementById('apply').click()",
    )
    wait(driver, "return document.getElementById('changes').children.length > 1")
    said = run(driver, "return document.getElementById('changes').innerText")
    assert "pruner: specvlm → uniform" in said and "prune_ratio: 0.9 → 0.5" in said
    run(driver, "document.getElementById('ask').click()")
    answered(driver)
    seen = run(driver, "return studio.pruned")
    steps, rows, columns, _ = seen["grid"]
    assert seen["num_kept"] == steps * rows * columns // 2 and seen["scores"] is None
    run(driver, "document.querySelector('[name=pruner]').value = 'uv'; document.getElementById('apply').click()")
    wait(driver, "return document.getElementById('knobnote').textContent.includes('does not observe')")
    assert run(driver, "return document.querySelector('[name=draft_shape]').disabled"), "it was started with a chain"
    assert "starts with draft_shape auto" in run(driver, "return document.getElementById('when').textContent")
    choices = "showKnobs({...studio.knobs, shapes: ['auto', 'chain', 'tree-static']});"
    choices += "return [...document.querySelector('[name=draft_shape]:enabled').options].map(it => it.value)"
    assert run(driver, choices) == ["auto", "chain", "tree-static"]


DROPPED = """
const carried = new DataTransfer();
fetch('/api/sample', {headers: headers()}).then(answer => answer.blob()).then(blob => {
  carried.items.add(new File([blob], 'dropped.mp4', { type: 'video/mp4' }));
  document.getElementById('drop').dispatchEvent(new DragEvent('drop', { dataTransfer: carried, cancelable: true }));
});
"""


def test_a_video_of_ones_own_is_chosen_or_dropped_and_loosened_drafts_have_their_colour(page, browser, tmp_path):
    """A draft that hardly sees the video errs, and the scorer lets it. Catches: the bundled video asked about."""
    world.write_mp4(world.held_out(1).frames[:20], tmp_path / "b.mp4")
    page.heard.clear()
    driver = browser(page.url, key=KEYS[1])
    driver.find_element("id", "file").send_keys(str(tmp_path / "b.mp4"))
    wait(driver, "return document.getElementById('videoname').textContent === 'b.mp4, 20 frames'")
    for name, value in {"pruner": "random", "prune_ratio": 0.95, "scorer": "loose", "lambda_loose": 1}.items():
        run(driver, "document.querySelector(`[name=${arguments[0]}]`).value = arguments[1]", name, value)
    run(driver, "document.getElementById('apply').click()")
    wait(driver, "return document.getElementById('changes').children.length > 3")
    run(driver, "document.getElementById('ask').click()")
    answered(driver)
    assert check_colours(driver, page, "drafts", KEYS[1]).count(2) > 0
    assert run(driver, "return studio.pruned.grid[0]") == 10
    run(driver, DROPPED)
    wait(driver, "return document.getElementById('videoname').textContent === 'dropped.mp4, 32 frames'")
