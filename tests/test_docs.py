"""The code that people copy from README and quickstart runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/quickstart.md")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _BLOCK.findall((ROOT / page).read_text())
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), {})
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("page", PAGES)
def test_the_training_program_goes_on_when_it_is_run_again(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = compile(_BLOCK.findall((ROOT / page).read_text())[0], page, "exec")
    exec(block, {})
    newest = max((tmp_path / "run").glob("step-*"))
    again: dict[str, object] = {}
    exec(block, again)
    assert again["start"] == int(newest.name[5:])


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    links = [(page, target) for page in pages for target in _LINK.findall(page.read_text())]
    assert links
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tests_that_the_guarantees_name_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs/guarantees.md").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_command_installs_from_an_index_which_the_package_is_not_on() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    texts += [p for folder in ("offload", "gds", "bench") for p in (ROOT / folder).rglob("*.py")]
    found = [p for p in texts if re.search(r"pip install (-\S+ )*['\"]?ssd-offload", p.read_text())]
    assert [str(p.relative_to(ROOT)) for p in found] == []
