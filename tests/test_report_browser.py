"""Reports in a real browser: sort, filter, hover, links, comparison, what is hostile; skipped where there is none."""

from benchmarks.browser import Browser, find

import json

import pytest

from adalog import artifact
from adalog.report import comparison, examine, report
from problems_report import HOSTILE, hostile, subject_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium here: the Debian package chromium has one"),
]

NAMES = (
    "[...document.querySelectorAll('#sites tbody tr')].filter((row) => !row.hidden)"
    ".map((row) => row.cells[1].textContent)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(browser, tmp_path):
    """Opens the bytes of a page; the page may write nothing to the console and ask for nothing else."""
    path = tmp_path / "page.html"

    def show(content, **options):
        path.write_bytes(content)
        browser.open(path.as_uri(), **options)
        return browser

    yield show
    assert browser.messages == []
    assert browser.asked == [path.as_uri()]


@pytest.fixture(scope="module")
def subject(content):
    return subject_of(content)


@pytest.fixture
def shown(page, subject):
    return page(report(subject))


def heading(key):
    return f"document.querySelector('#sites th[data-key={key}]')"


def test_headings_sort(shown, subject):
    order = [site.row.site for site in subject.sites]
    assert shown.value(NAMES) == order
    by_sqnr = [site.row.site for site in sorted(subject.sites, key=lambda site: site.row.sqnr)]
    for way, names in (("ascending", by_sqnr), ("descending", by_sqnr[::-1])):
        shown.value(f"{heading('sqnr')}.querySelector('button').click()")
        assert shown.value(NAMES) == names
        assert shown.value(f"{heading('sqnr')}.getAttribute('aria-sort')") == way
    shown.value(f"{heading('number')}.querySelector('button').click()")
    assert shown.value(NAMES) == order
    assert shown.value("document.querySelectorAll('th[aria-sort]').length") == 1


def test_rows_are_filtered(shown, subject):
    def enter(control, text):
        found = f"const control = document.getElementById('{control}'); control.value = '{text}'"
        shown.value(f"{{{found}; control.dispatchEvent(new Event('input'))}}")

    enter("filter", "BLOCKS.1 softmax")
    assert shown.value(NAMES) == ["blocks.1.attn.av"]
    assert shown.value("document.getElementById('count').textContent") == f"1 of {len(subject.sites)} sites"
    enter("filter", "")
    enter("role", "qk")
    assert shown.value(NAMES) == ["blocks.0.attn.qk", "blocks.1.attn.qk"]


def test_a_cell_under_the_pointer_or_in_focus_is_told(shown, subject):
    cell = "document.querySelectorAll('.cell')[4]"
    assert shown.value("document.getElementById('hover').hidden")
    middle = "[box.x + box.width / 2, box.y + box.height / 2]"
    x, y = shown.value(f"{{const box = {cell}.getBoundingClientRect(); {middle}}}")
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = "document.getElementById('hover').hidden ? '' : document.getElementById('hover').textContent"
    row = subject.sites[4].row
    assert all(word in shown.value(told) for word in (row.site, row.left, row.right, f"{row.sqnr:.1f}"))
    assert shown.value("[...document.querySelectorAll('tr.lit')].map((row) => row.id)") == ["row-4"]
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert shown.value(told) == ""
    shown.value(f"{cell}.focus()")
    assert row.site in shown.value(told)
    shown.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    assert shown.value(told) == ""


def test_a_link_opens_its_site(shown):
    assert shown.value("document.querySelectorAll('details[open]').length") == 0
    shown.value("document.querySelectorAll('.cell')[3].dispatchEvent(new MouseEvent('click'))")
    shown.value("new Promise((done) => setTimeout(done, 100))")
    assert shown.value("[...document.querySelectorAll('details[open]')].map((each) => each.id)") == ["site-3"]


def test_two_files_are_compared(page, content, twin_content):
    first, second = subject_of(content), subject_of(twin_content)
    shown = page(comparison(first, second))
    pairs = list(zip(first.sites, second.sites, strict=True))
    differ = [a.row.site for a, b in pairs if (a.row.left, a.row.right) != (b.row.left, b.row.right)]
    assert 0 < len(differ) < len(pairs)
    shown.value("document.getElementById('differs').click()")
    assert [name.strip() for name in shown.value(NAMES)] == differ
    shown.value(f"{heading('sqnr_more')}.querySelector('button').click()")
    by_gain = sorted(pairs, key=lambda pair: pair[1].row.sqnr - pair[0].row.sqnr)
    assert shown.value(NAMES) == [a.row.site for a, _ in by_gain if a.row.site in differ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_any_window_in_light_and_dark(page, subject, width, scheme):
    """Nothing but tables and the picture, in boxes of their own, is wider than the window; text stands out."""
    shown = page(report(subject), width=width, scheme=scheme)
    assert shown.value("document.documentElement.scrollWidth") <= width
    ink, ground = (
        json.loads(shown.value(f"JSON.stringify(getComputedStyle(document.body).{name}.match(/\\d+/g))"))
        for name in ("color", "backgroundColor")
    )
    light, dark = sorted((sum(map(int, each)) for each in (ink, ground)), reverse=True)
    assert light > 3 * 220
    assert dark < 3 * 40
    assert (sum(map(int, ground)) == dark) == (scheme == "dark")


def test_hostile_names_are_text(page, content):
    """In a page of one file and of two, where each name stands in the table, the picture, the data and the title."""
    subject = hostile(content)
    for made in (report(subject), comparison(subject, subject_of(content))):
        shown = page(made)
        assert shown.value("document.querySelectorAll('script').length") == 2
        assert shown.value("document.querySelectorAll('img, iframe, object, embed, link, base').length") == 0
        assert shown.value("typeof window.ran") == "undefined"
        text = shown.value("document.body.textContent")
        assert all(name in text for name in HOSTILE)
        assert set(shown.value(NAMES)) >= set(HOSTILE)


def test_a_file_that_quantize_wrote(page, content):
    model = artifact.deserialise(content)
    assert model.ledger[0].site in page(report(examine("a", content, model))).value("document.body.textContent")
