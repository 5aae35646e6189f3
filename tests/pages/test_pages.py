"""The built site in a browser: every page, wide and narrow, light and dark; the arithmetic of interactive figures."""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.parse

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from haliax_fp8 import DelayedScaling
from haliax_fp8.checkpoints.explain import engines
from haliax_fp8.recipes import named


sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("mkdocs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)

# It builds the site, which takes half a minute, and opens some two hundred pages.
pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
# Milliseconds: a busy machine takes its time over the page of the API.
PATIENCE = 180_000
WIDTHS = {"wide": (1280, 900), "phone": (390, 844)}

# What is wider than the window: the page itself, or something that no box around it scrolls or cuts.
TOO_WIDE = """() => {
    const wide = document.documentElement.clientWidth;
    const found = document.documentElement.scrollWidth > wide ? ["the page"] : [];
    const contained = (element) => {
        for (let up = element; up && up !== document.body; up = up.parentElement)
            if (getComputedStyle(up).overflowX !== "visible") return true;
        return false;
    };
    for (const element of document.querySelectorAll(".md-content *"))
        if (element.getBoundingClientRect().right > wide + 1 && !contained(element))
            found.push(`${element.tagName}: ${element.textContent.slice(0, 60)}`);
    return found;
}"""
BROKEN_IMAGES = """() => [...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"""
LINKS = """() => [...document.querySelectorAll("a[href]")].map(a => a.href)"""
ANCHORS = """() => [...document.querySelectorAll("[id], a[name]")].map(e => e.id || e.name)"""
# Code that is cut off: its box is narrower than its text. Output of programs may scroll within itself on a phone.
CUT_CODE = """() => ["python", "py", "pycon", "bash"]
    .flatMap(language => [...document.querySelectorAll(`.language-${language} pre > code`)])
    .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.textContent.slice(0, 60))"""
# What has to be scrolled sideways to be read: code, output, a table.
SCROLLING = """() => [...document.querySelectorAll(".md-content *")]
    .filter(e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1)
    .map(e => `${e.scrollWidth} px in ${e.clientWidth}: ${e.textContent.trim().slice(0, 60)}`)"""
# Pictures that do not fill the column of a phone: `docs/_figures/drawing.py` counts on it for the size of their text.
NARROW_PICTURES = """() => [...document.querySelectorAll(".md-content img")]
    .filter(i => i.getBoundingClientRect().width < i.closest("article").clientWidth - 33).map(i => i.src)"""
# What a table's rows say; not those that are hidden.
CELLS = """(table) => [...document.querySelectorAll(`${table} tbody tr`)].filter(row => !row.hidden)
    .map(row => [...row.cells].map(cell => cell.textContent))"""
# White boxes: the background that an image or a figure is drawn on.
BACKGROUNDS = """() => [...document.querySelectorAll(".md-content table, .md-content pre, .fp8-interactive")]
    .map(e => getComputedStyle(e).backgroundColor)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as a reader's copy: without a server, links lead to files."""
    folder = tmp_path_factory.mktemp("site")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--no-directory-urls", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def browser():
    """Chromium without a screen, and without a network."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclasses.dataclass
class Seen:
    """What was found on all pages in one window and one colour scheme."""

    faults: list[str] = dataclasses.field(default_factory=list)
    links: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    anchors: dict[str, set[str]] = dataclasses.field(default_factory=dict)


def failed(request) -> bool:
    """Whether something was not found; not what is given up because the next page is opened, such as an icon."""
    return request.failure != "net::ERR_ABORTED"


def visit(browser, site, size, scheme) -> Seen:
    """Opens every page."""
    seen = Seen()
    width, height = WIDTHS[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    where = ""
    page.on("console", lambda m: seen.faults.append(f"{where}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.faults.append(f"{where}: {error}"))
    page.on("requestfailed", lambda r: seen.faults.append(f"{where}: {r.url}: {r.failure}") if failed(r) else None)
    page.on("request", lambda r: seen.faults.append(f"{where}: asks for {r.url}") if r.url.startswith("http") else None)
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        where = f"{path.relative_to(site)}, {size}, {scheme}"
        page.goto(path.as_uri(), wait_until="load")
        checks = {"wider than the window": TOO_WIDE, "broken image": BROKEN_IMAGES, "cut off": CUT_CODE}
        checks |= {"scrolls sideways": SCROLLING} if size == "wide" else {"narrow picture": NARROW_PICTURES}
        for name, script in checks.items():
            seen.faults += [f"{where}: {name}: {found}" for found in page.evaluate(script)]
        if scheme == "dark":
            white = [color for color in page.evaluate(BACKGROUNDS) if color == "rgb(255, 255, 255)"]
            seen.faults += [f"{where}: a white box" for _ in white]
        seen.links[path.as_uri()] = page.evaluate(LINKS)
        seen.anchors[path.as_uri()] = set(page.evaluate(ANCHORS))
    context.close()
    return seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(WIDTHS))
def test_every_page_reads_well(browser, site, size, scheme):
    seen = visit(browser, site, size, scheme)
    assert len(seen.links) > 40
    links = {(page, link) for page, links in seen.links.items() for link in links}
    broken = sorted(f"{page}: leads to {link}" for page, link in links if not leads(link, seen))
    assert not seen.faults + broken, "\n".join(seen.faults + broken)


def leads(link, seen: Seen) -> bool:
    """Whether a link to a file leads to a page and a heading that exist."""
    target, anchor = urllib.parse.urldefrag(link)
    if not target.startswith("file:"):
        return True
    # The name of the site leads to its folder, of which servers show the index.
    target = f"{target}index.html" if target.endswith("/") else target
    if target not in seen.anchors:
        return pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(target).path)).is_file()
    return not anchor or urllib.parse.unquote(anchor) in seen.anchors[target]


@pytest.fixture(scope="module")
def opened(browser, site):
    """A function that opens a page of the site at 1280 px."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)

    def open_page(name):
        page = context.new_page()
        page.goto((site / name).as_uri(), wait_until="load")
        return page

    yield open_page
    context.close()


DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E8M0": ml_dtypes.float8_e8m0fnu,
}


def test_numbers_of_the_explorer_are_those_of_ml_dtypes(opened):
    """Every pattern of every format; then rounding, at ties too, with clipping."""
    page = opened("formats.html")
    assert set(page.evaluate("Object.keys(haliaxFp8.FORMATS)")) == set(DTYPES)
    rng = np.random.default_rng(0)
    for name, dtype in DTYPES.items():
        count = 2 ** ml_dtypes.finfo(dtype).bits
        expected = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)
        decode = """([name, count]) => Array.from({length: count}, (_, pattern) =>
            String(haliaxFp8.decode(haliaxFp8.FORMATS[name], pattern)))"""
        got = np.asarray([float(text.replace("Infinity", "inf")) for text in page.evaluate(decode, [name, count])])
        np.testing.assert_array_equal(got, expected)
        finite = np.unique(expected[np.isfinite(expected)])
        limit = finite.max()
        ties = (finite[1:] + finite[:-1]) / 2
        spread = rng.standard_normal(200) * np.exp(4 * rng.standard_normal(200))
        values = np.concatenate([spread, [min(2 * limit, 3e38), limit]])
        values = np.abs(values) if name == "E8M0" else np.concatenate([values, ties, finite])
        values = values.astype(np.float32).astype(np.float64)
        # The library's cast: clipped first.
        wanted = np.clip(values, -limit, limit).astype(np.float32).astype(dtype)
        run = """([name, values]) => values.map((x) => {
            const found = haliaxFp8.round(haliaxFp8.FORMATS[name], x);
            return [found.value, found.pattern, found.below, found.above];
        })"""
        rounded, patterns, below, above = np.asarray(page.evaluate(run, [name, values.tolist()]), np.float64).T
        np.testing.assert_array_equal(rounded, wanted.astype(np.float64))
        np.testing.assert_array_equal(patterns, wanted.view(np.uint8) & (count - 1))
        inside = np.abs(values) <= limit
        np.testing.assert_array_equal(below[inside], finite[np.searchsorted(finite, values[inside], "right") - 1])
        np.testing.assert_array_equal(above[inside], finite[np.searchsorted(finite, values[inside], "left")])


def test_the_explorer_shows_what_is_typed(opened):
    page = opened("formats.html")
    page.fill(".fp8-formats input[type=text]", "1000")
    rows = {cells[0]: " ".join(cells) for cells in page.evaluate(CELLS, ".fp8-formats")}
    assert "448" in rows["E4M3"] and "clipped" in rows["E4M3"] and "01111110" in rows["E4M3"]
    assert "1024" in rows["E5M2"] and "clipped" not in rows["E5M2"]
    page.fill(".fp8-formats input[type=text]", "0.0005")
    assert "becomes zero" in page.inner_text(".fp8-formats tbody tr")


@pytest.mark.parametrize("length, margin", [(1, 0), (4, 1), (16, 0)])
def test_what_fits_is_what_the_library_lets_fit(opened, length, margin):
    amaxes = np.random.default_rng(1).uniform(0.1, 9.0, 40).astype(np.float32)
    memory = DelayedScaling(amax_history_length=length, margin=margin).memory
    state, expected = jnp.asarray([memory.first_row]), []
    for amax in amaxes:
        expected.append(float(state[0, 0]) * 448.0)
        state = memory.update(state, jnp.asarray([[amax]]), (448.0,))
    got = opened("how-it-works.html").evaluate("(a) => haliaxFp8.limits(...a)", [amaxes.tolist(), length, margin, 448])
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_sliders_change_the_picture(opened):
    page = opened("how-it-works.html")
    read = lambda: page.inner_text(".fp8-history output")
    before = read()
    page.evaluate("""() => {
        const margin = document.querySelectorAll(".fp8-history input")[1];
        margin.value = 3;
        margin.dispatchEvent(new Event("input", {bubbles: true}));
    }""")
    assert before != read() and "Clipped in 0 of" in read()


def test_filters_of_the_table_of_engines(opened):
    page = opened("checkpoint-folders.html")
    shown = lambda: page.evaluate(CELLS, ".fp8-filtered")
    assert len(shown()) == sum(len(engine.layouts.split()) for engine in engines)
    page.select_option(".fp8-filtered select >> nth=0", "MXFP8")
    expected = sorted(engine.engine for engine in engines if "MXFP8" in engine.layouts.split())
    assert sorted(row[1] for row in shown()) == expected
    page.fill(".fp8-filtered input", "blackwell")
    assert [row[2] for row in shown()] == ["NVIDIA Blackwell"]


def test_tiles_are_of_every_recipe_and_product(opened):
    page = opened("recipes/index.html")
    rows = page.evaluate("""() => [...document.querySelectorAll(".fp8-tiles tbody tr")].map((row) =>
        [row.cells[0].textContent, [...row.querySelectorAll("svg")].map((svg) => svg.getAttribute("aria-label"))])""")
    tiles = {name: [label.partition(" in ")[2] for label in labels] for name, labels in rows}
    assert list(tiles) == list(named)
    assert tiles["current"] == ["E4M3: tensor"] * 2 + ["E5M2: tensor", "E4M3: tensor", "E4M3: tensor", "E5M2: tensor"]
    strip, square = "E4M3: 1×128", "E4M3: 128×128"
    assert tiles["deepseek"] == [strip, square, strip, square, strip, "E4M3: 128×1"]
    assert tiles["rowwise"] == ["E4M3: row", "E4M3: column"] * 3
    assert tiles["mxfp8"] == ["E4M3: 1×32", "E4M3: 32×1"] * 3
    assert tiles["rowwise_wgrad_bf16"][4:] == ["high precision: no scale"] * 2
    assert tiles["nvfp4"][5] == "E2M1: 16×1, rotated, random rounding"
    # Gradients alone are rounded at random.
    assert [i for i, tile in enumerate(tiles["nvfp4"]) if "random" in tile] == [2, 5]


# --- The machinery itself ---------------------------------------------------------------------------------------------


def test_faults_are_found(opened):
    """A box that is too wide, an image that is not there, code that is cut off, a white box."""
    page = opened("faq.html")
    for script in (TOO_WIDE, BROKEN_IMAGES, CUT_CODE, SCROLLING):
        assert page.evaluate(script) == []
    page.evaluate("""() => document.querySelector(".md-content article").insertAdjacentHTML("beforeend", `
        <div style="width: 3000px">wide</div><img src="none.svg" style="width: 9px">
        <table style="background: #fff"><tr><td>a</td></tr></table>
        <div class="language-python"><pre style="overflow: auto">
        <code style="white-space: pre">${"x = 1; ".repeat(99)}</code></pre></div>`)""")
    page.wait_for_timeout(200)
    assert any("wide" in fault for fault in page.evaluate(TOO_WIDE))
    assert [source.rpartition("/")[2] for source in page.evaluate(BROKEN_IMAGES)] == ["none.svg"]
    assert len(page.evaluate(CUT_CODE)) == len(page.evaluate(SCROLLING)) == 1
    assert len(page.evaluate(NARROW_PICTURES)) == 1
    assert "rgb(255, 255, 255)" in page.evaluate(BACKGROUNDS)
    seen = Seen(anchors={"file:///a.html": {"here"}})
    links = ("https://elsewhere.org", "file:///a.html#here", "file:///a.html#there", "file:///not/there.html")
    assert [leads(link, seen) for link in links] == [True, True, False, False]
