"""The code that people copy from the pages runs as it stands."""

from __future__ import annotations

import json
import pkgutil
import re
import statistics
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gds
import offload
from gds import MemoryBackend
from offload.sizing import Machine
from tests.stores.small import STORE, make_model, make_optimizer, step
from tests.versions import COMBINATIONS, CPU_BUILDS

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/quickstart.md")
RUN_PAGES = (
    *PAGES,
    "docs/options.md",
    "docs/beyond-memory.md",
    "docs/retention.md",
    "docs/logs.md",
    "docs/recipes.md",
)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK_ANYWHERE = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


@pytest.mark.parametrize("page", RUN_PAGES)
def test_code_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _BLOCK.findall((ROOT / page).read_text())
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), {})
    assert [*tmp_path.glob("**/step-*")], "a checkpoint was made"


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


def test_the_figures_beside_deepspeed_are_those_of_the_recorded_run() -> None:
    (file,) = (ROOT / "bench/results").glob("*-peers-deepspeed-128Mi.json")
    run = json.loads(file.read_text())
    samples = run["samples"]
    added = {
        system: statistics.median(
            a - b
            for a, b in zip(samples[f"exact_{system}_s"], samples["exact_compute_s"], strict=True)
        )
        for system in ("offload", "deepspeed")
    }
    text = (ROOT / "README.md").read_text().replace("\n> ", " ")
    assert f"With {run['settings']['parameters'] / 1e6:.0f} M parameters" in text
    assert f"`offload` adds **{added['offload']:.2f} s** to an iteration" in text
    assert f"DeepSpeed's NVMe offload adds **{added['deepspeed']:.2f} s**" in text


def test_the_table_of_model_sizes_is_computed_from_recorded_bytes_and_rates() -> None:
    (file,) = (ROOT / "bench/results").glob("*-step-128Mi.json")
    run = json.loads(file.read_text())
    num, facts = run["settings"]["parameters"], run["facts"]
    moved_bytes = facts["step_read_bytes"] + facts["step_written_bytes"]
    rate = round(moved_bytes / run["medians"]["fio_s"] / 1e9, 1) * 1e9
    (claim,) = [c for c in run["claims"] if "fio" in c["claim"]]
    text = (ROOT / "docs/sizing.md").read_text()
    assert f"drive at {rate / 1e9:.1f} GB/s" in text
    rows = re.findall(r"^\| ([\d.]+) ([MB]) \|(.*)\|$", text, re.MULTILINE)
    assert len(rows) == 5
    for number, unit, cells in rows:
        size = float(number) * {"M": 1e6, "B": 1e9}[unit]
        state = size * facts["step_written_bytes"] / num
        expected = (
            state / 1e9,
            size * (facts["state_bytes"] / num + 2) * 3 / 1e9,
            size * moved_bytes / num / rate * round(claim["median"], 2),
            state * 24 * 3600 / 300 / 1e12,
        )
        for cell, value in zip(cells.split("|"), expected, strict=True):
            printed = cell.split()[0]
            assert float(printed) == round(value, len(printed.partition(".")[2])), (number, cell)
    seven = next(cells for number, unit, cells in rows if (number, unit) == ("7", "B"))
    days = 600 / float(seven.split("|")[-1].split()[0])
    assert f"{days:.0f} days of the row for 7 B" in text
    _, disk, step, _ = (cell.strip() for cell in seven.split("|"))
    readme = (ROOT / "README.md").read_text().replace("\n", " ")
    assert f"A 7 B model takes {disk} of disk, and a step of it {step} with a drive of" in readme
    assert f"takes {claim['median']:.2f} times as long as `fio`" in readme


def test_the_table_of_gpus_is_computed() -> None:
    rows = re.findall(r"^\| (\d+) GB \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 5
    for memory, cells in rows:
        found = [float(cell.removesuffix(" B ")) for cell in cells.split("|")]
        plan = offload.size(1e9, machine=Machine(gpu_memory=1e9 * int(memory)))
        names = ["all in memory", "state on drives", 'gradients="host"']
        assert [fit.name for fit in plan.fits[:3]] == names
        assert found == [round((fit.largest or 0) / 1e9, 1) for fit in plan.fits[:3]]


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    links = [(page, target) for page in pages for target in _LINK.findall(page.read_text())]
    assert links
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_version_is_the_same_wherever_it_stands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert project["version"] == cited == offload.__version__


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text, re.MULTILINE)
    assert len(set(listed)) == len(listed)
    made = {"docs/cli.md"}  # by docs/pages.py
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in listed if page.startswith("docs/")} == pages | made
    assert all((ROOT / page).exists() for page in {*listed} - made)


def test_the_page_of_the_api_has_every_exported_name() -> None:
    shown = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(set(shown)) == len(shown)
    exported = {f"{module.__name__}.{name}" for module in (offload, gds) for name in module.__all__}
    assert exported <= {*shown}
    assert {name for name in {*shown} - exported if ".integrations." not in name} == set()


def test_the_errors_that_are_named_exist() -> None:
    """Those of the pages, and those of the docstrings that say what is raised."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sources = [*(ROOT / "offload").rglob("*.py"), *(ROOT / "gds").rglob("*.py")]
    found = {
        name
        for path in [*pages, *sources]
        for name in re.findall(r"\b(?:offload|gds)(?:\.\w+)*\.\w+Error\b", path.read_text())
    }
    assert len(found) > 10
    assert [name for name in sorted(found) if pkgutil.resolve_name(name) is None] == []


def test_each_line_of_the_evidence_links_to_a_test() -> None:
    """That the linked files exist is the test of all links between pages."""
    page = (ROOT / "docs/evidence.md").read_text()
    faults = page[page.index("## The process ends") : page.index("## Numbers, bytes and memory")]
    promises = re.findall(r"^- .*(?:\n  .*)*", faults, re.MULTILINE)
    assert len(promises) > 80
    linked = re.compile(r"\]\(\.\./(tests/\w+(?:/test_\w+\.py)?)\)")
    assert [promise for promise in promises if not linked.search(promise)] == []


@pytest.mark.parametrize("page", [*RUN_PAGES, "docs/recovery.md"])
def test_code_needs_only_what_is_installed_with_the_package(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {Requirement(text).name for text in project["dependencies"]}
    code = "\n".join(_BLOCK_ANYWHERE.findall((ROOT / page).read_text()))
    found = {*re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)}
    assert found
    assert found - sys.stdlib_module_names - installed <= {"gds", "offload"}


def test_no_command_installs_from_an_index_which_the_package_is_not_on() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    texts += [p for folder in ("offload", "gds", "bench") for p in (ROOT / folder).rglob("*.py")]
    found = [p for p in texts if re.search(r"pip install (-\S+ )*['\"]?ssd-offload", p.read_text())]
    assert [str(p.relative_to(ROOT)) for p in found] == []
