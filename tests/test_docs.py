"""The code that people copy from README and quickstart runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gds import MemoryBackend
from tests.stores.small import STORE, make_model, make_optimizer, step
from tests.versions import COMBINATIONS, CPU_BUILDS

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


def test_the_warning_about_a_line_with_torch_save_is_quoted_as_it_is() -> None:
    with make_optimizer(make_model(), MemoryBackend()) as optimizer:
        step(optimizer)
        with pytest.warns(RuntimeWarning, match="cannot be resumed from") as caught:
            optimizer.state_dict()
    (warning,) = caught
    said = f"RuntimeWarning: {warning.message}".replace(STORE, "/data/run")
    assert said in (ROOT / "docs/quickstart.md").read_text().replace("\n", " ")


def test_no_example_takes_the_step_of_a_checkpoint_for_the_counter_of_its_loop() -> None:
    """A loss scaler skips steps, so the two differ."""
    pages = [*(ROOT / "docs/examples").glob("*_loop.py"), *(ROOT / name for name in PAGES)]
    assert len(pages) == 5
    for page in pages:
        assert not re.search(r"^ *\w+ = checkpoint\.step\b", page.read_text(), re.MULTILINE), page


@pytest.mark.parametrize("page", PAGES)
def test_a_torch_without_cuda_is_installed_before_the_package_that_would_bring_another(
    page: str,
) -> None:
    installs = re.findall(r"^pip install (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert installs[0].endswith(f" --index-url {CPU_BUILDS}")
    torch, package = Requirement(installs[0].split()[0].strip("'")), installs[1]
    assert package.startswith(". ")
    assert torch.name == "torch"
    tested = {name.partition(":")[2] for name in COMBINATIONS}
    assert tested == {"2.11.0", "2.13.0"}
    assert all(torch.specifier.contains(version) for version in tested)
    assert "Python 3.11 to 3.13" in (ROOT / page).read_text()


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
