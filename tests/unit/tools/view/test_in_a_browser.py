"""The page in a real browser: views, keys, addresses, speed, and that it logs no problem and loads nothing."""

import asyncio
import json
from pathlib import Path

import pytest

from support.browser import Page, browser
from support.small_runs import HOSTILE, group, serving, write_run
from titan_rl.config.sections import Config
from titan_rl.record.run_log import RunLog
from titan_rl.tools.view import __main__ as view
from titan_rl.tools.view.page import page, page_data

pytestmark = pytest.mark.slow  # needs Debian's chromium
LOAD_MS = 2000
TABS = ("overview", "curves", "time", "samples", "prompts", "evaluations", "config", "events")


async def text_of(page: Page) -> str:
    return await page.run("document.getElementById('view').innerText")


async def selected(page: Page) -> str:
    return await page.run("document.querySelector('[aria-selected=true]').innerText")


def test_every_view_of_two_runs_opens_from_disk_without_a_problem(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", 6, text=HOSTILE)
    out = tmp_path / "page.html"
    assert view.main([str(first), str(second), "--out", str(out)]) == 0

    async def read() -> None:
        async with browser() as page:
            await page.open(out.as_uri())
            for number, tab in enumerate(TABS, 1):
                await page.press(str(number))
                assert (await selected(page)).lower() == tab
                assert len(await text_of(page)) > 10, tab
            await page.open(f"{out.as_uri()}#samples?run=1&step=6&prompt=13")
            shown = await text_of(page)
            assert "step 6, prompt 13" in shown
            assert "<img src=x onerror=alert(2)>" in shown  # as text
            assert await page.run("document.querySelectorAll('#view img, #view script').length") == 0
            assert (page.problems, set(page.requests)) == ([], {out.as_uri()})

    asyncio.run(read())


def test_heads_stand_over_their_numbers_and_every_axis_has_two(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "page.html"
    assert view.main([str(run), "--out", str(out)]) == 0
    crooked = """[...document.querySelectorAll('table')].flatMap((table) => {
      const align = (cell) => getComputedStyle(cell).textAlign, row = table.tBodies[0]?.rows[0];
      return [...table.tHead.rows[0].cells].filter((head, i) => row?.cells[i] && align(head) !== align(row.cells[i]));
    }).map((head) => head.innerText)"""
    bare = """[...document.querySelectorAll('.plot svg')].filter(
      (plot) => plot.querySelectorAll('text[text-anchor=end][x=\"42\"]').length < 2).length"""

    async def read() -> None:
        async with browser() as page:
            for tab in TABS:
                await page.open(f"{out.as_uri()}#{tab}")
                assert await page.run(crooked) == [], tab
            await page.open(f"{out.as_uri()}#overview")
            assert await page.run("document.querySelectorAll('.plot svg').length") >= 3
            assert await page.run(bare) == 0
            low, high = await page.run("[ticks(0.034, 0.87, 4).length, ticks(1, 300, 4).length]")
            assert min(low, high) >= 2

    asyncio.run(read())


def test_keys_move_through_steps_and_groups_and_change_the_address(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    assert view.main([str(run)]) == 0

    async def use() -> None:
        async with browser(390, 844) as page:
            await page.open(f"{(run / 'view.html').as_uri()}#samples")
            assert "step 3, prompt 6" in await text_of(page)
            await page.press("j")
            assert "step 3, prompt 7" in await text_of(page)
            await page.press("ArrowLeft")
            assert "step 2, prompt 4" in await text_of(page)
            address = await page.run("location.href")
            await page.open("about:blank")
            await page.open(address)
            assert "step 2, prompt 4" in await text_of(page)
            await page.press("c")
            assert "colour=logprob" in await page.run("location.href")
            await page.press("d")
            assert await page.run("document.documentElement.dataset.theme") in ("dark", "light")
            await page.press("?")
            assert await page.run("document.getElementById('keys').open") is True
            # Nothing is wider than a phone, but for tables and groups, which scroll by themselves.
            assert await page.run("document.documentElement.scrollWidth <= innerWidth") is True
            assert page.problems == []

    asyncio.run(use())


def test_a_long_run_loads_within_two_seconds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000, groups=4)
    out = tmp_path / "page.html"
    out.write_text(page(page_data([run], sample_bytes=3_000_000)))
    assert out.stat().st_size < 5_000_000

    async def load() -> float:
        async with browser() as page:
            return min([await page.open(f"{out.as_uri()}#{tab}") for tab in ("overview", "samples", "curves")])

    assert asyncio.run(load()) < LOAD_MS


def test_a_live_page_shows_the_next_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)

    async def watch() -> None:
        async with browser() as page:
            await page.open(server.address)
            assert "1 of 1" in await text_of(page)
            with RunLog(run, "tiny", Config(), resume_step=1) as log:
                log.step(2, {"reward/mean": 0.75}, {}, [group(9, "12")])
            for _ in range(100):
                if "0.75" in json.dumps(await page.run("DATA.runs[0].curves.values['reward/mean']")):
                    break
                await asyncio.sleep(0.1)
            assert "2 of" in await text_of(page)
            assert page.problems == []

    with serving(run) as server:
        asyncio.run(watch())
