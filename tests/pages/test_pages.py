"""The built site opens in a browser: its first page has a heading, and its pictures are there."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest


sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("mkdocs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = pathlib.Path(__file__).parents[2]

BROKEN_IMAGES = "() => [...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_site_opens(tmp_path):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--no-directory-urls", "-d", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": paths}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto((tmp_path / "index.html").as_uri(), wait_until="load", timeout=180_000)
        assert page.inner_text("h1")
        assert page.evaluate("document.images.length") > 0
        assert page.evaluate(BROKEN_IMAGES) == []
        browser.close()
