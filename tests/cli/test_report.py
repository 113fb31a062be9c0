"""`offload report`: the page that it writes about a store, with and without a history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Run
from tests.stores.small import make_model, make_optimizer, train

LOSSES = {2: 3.5, 4: 3.25}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 2 and 4, without a history."""
    store = tmp_path_factory.mktemp("trained") / "store"
    with make_optimizer(make_model(), directory=store, keep=2) as optimizer:
        train(optimizer, 4, seal_at=(2, 4), losses=LOSSES)
    (store / "history.jsonl").unlink(missing_ok=True)
    return store


class Page(HTMLParser):
    """A page: its text, its elements and its data. Every element that is opened is closed."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.parts: list[str] = []
        self.titles: list[str] = []
        self.data: dict[str, Any] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attributes}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attributes}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.data = json.loads(data)
        elif self.open[-1:] == ["title"]:
            self.titles.append(data)
        elif self.open[-1:] != ["style"]:
            self.parts.append(data)


OWN_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "footer"),
    *("h1", "h2", "p", "b", "ul", "li", "code", "dl", "dt", "dd", "div", "span", "i", "script"),
    *("figure", "figcaption", "svg", "path", "text", "rect", "circle"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


def report(run: Run, store: Path, *more: str) -> Page:
    """Write a report, and return it as it was read again."""
    file = store.parent / "report.html"
    code, _, err = run("report", store, "-o", file, *more)
    assert (code, err) == (0, "")
    return Page(file.read_text(encoding="utf-8"))


def steps(step: int, num: int, **changes: Any) -> dict[str, Any]:
    """Return a line about some steps of 2 seconds each in a run of 4 seconds an iteration."""
    seconds = {"step_s": 2.0 * num, "compute_s": 0.5 * num, "wait_read_s": 1.2 * num}
    return {
        "kind": "steps",
        "at": 1.8e9 + 4 * step,
        "step": step,
        "steps": num,
        "elapsed_s": 4.0 * num,
        "seconds": {**seconds, "read_s": 1.6 * num, "write_s": 1.6 * num},
        "read_bytes": 4_000_000_000 * num,
        "written_bytes": 3_200_000_000 * num,
        **changes,
    }


def sealed(step: int, loss: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Return a line about a checkpoint for which training waited 20 ms."""
    return {
        "kind": "checkpoint",
        "at": 1.8e9 + 4 * step,
        "step": step,
        "bytes_written": 1 << 30,
        "stall_s": 0.02,
        "seal_s": 1.5,
        "metrics": {"loss": loss},
        **changes,
    }


def start(step: int) -> dict[str, Any]:
    """Return the line of a process that begins to train."""
    return {"kind": "start", "at": 1.8e9, "step": step}


def write(store: Path, *lines: dict[str, Any] | str) -> None:
    """Write the history of a store; text as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (store / "history.jsonl").write_text("".join(texts))


def stretches(page: Page) -> list[tuple[int, int]]:
    return [(one["start"], one["step"]) for one in page.data["steps"]]


def losses(page: Page) -> dict[int, float]:
    return {one["step"]: one["metrics"].get("loss") for one in page.data["checkpoints"]}


def test_a_run_says_where_its_time_went_and_what_would_help(run: Run, store: Path) -> None:
    checkpoints = sealed(10, 2.5), sealed(20, 2.0, stall_s=0.2)
    write(store, start(0), steps(10, 10), checkpoints[0], steps(20, 10), checkpoints[1])
    page = report(run, store)
    assert (
        "A step took 2.000 s on average: 60% waiting for reads, 25% updating and 15% everything "
        "else; of the whole time of the run, steps took 50% and waiting for checkpoints 0.3%."
    ) in page.text
    assert "A second drive of the same speed, directory=[a, b], about halves" in page.text
    assert "a step would take 1.400 s instead of 2.000 s" in page.text
    assert 'Options(overlap="forward")' in page.text
    assert "fewer checkpoints" not in page.text
    assert "steps 0 to 20, from " in page.text
    assert stretches(page) == [(0, 10), (10, 20)]
    assert losses(page) == {**LOSSES, 10: 2.5, 20: 2.0}
    assert "20 2027-01-15 08:01 recycled 1.00 GiB 200.0 ms 1.500 s 2" in page.text
    assert "steps 1 to 10: read 2.50 GB/s, written 2.00 GB/s" in page.titles
    assert "step 20: 2" in page.titles
    assert {"loss", "waiting for reads 60%", "read", "written"} <= {p.strip() for p in page.parts}


def test_the_page_is_of_its_own_elements_and_loads_nothing(run: Run, store: Path) -> None:
    write(store, start(0), steps(10, 10), sealed(10))
    page = report(run, store)
    assert page.tags <= OWN_TAGS
    assert not {name for name in page.names if name in ("src", "href") or name.startswith("on")}
    text = (store.parent / "report.html").read_text()
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_a_store_without_a_history_gets_a_report_of_its_checkpoints(run: Run, store: Path) -> None:
    page = report(run, store)
    assert losses(page) == LOSSES
    assert "Where the time went is not known" in page.text
    assert page.text.count("complete") == 2
    assert "What would make it faster" not in page.text
    assert "training waited" not in page.text


@pytest.mark.parametrize("says_start", [True, False], ids=["start lines", "no start lines"])
def test_steps_that_a_killed_run_takes_again_are_counted_once(
    run: Run, store: Path, says_start: bool
) -> None:
    went_on = [start(100)] if says_start else []
    write(
        store,
        *([start(0)] if says_start else []),
        *[steps(50, 50), sealed(50, 9.0), steps(100, 50), sealed(100, 8.0)],
        *[steps(150, 50), sealed(150, 7.0), steps(180, 30), '{"kind": "steps", "at": 18\n'],
        *went_on,
        *[steps(130, 30, read_bytes=0), sealed(150, 6.0), steps(170, 40)],
    )
    page = report(run, store)
    assert stretches(page) == [(0, 50), (50, 100), (100, 130), (130, 170)]
    assert page.data["steps"][2]["read_bytes"] == 0
    assert losses(page) == {**LOSSES, 50: 9.0, 100: 8.0, 150: 6.0}
    assert page.data["resumed_at"] == [100]
    assert "went on from step 100" in page.titles
    assert "170 steps recorded" not in page.text
    assert "steps recorded 170" in page.text


def test_a_run_that_goes_back_further_gives_up_the_checkpoints_after_that(
    run: Run, store: Path
) -> None:
    write(
        store,
        *[steps(100, 100), sealed(100), steps(200, 100), sealed(200), steps(300, 100)],
        *[steps(140, 40), steps(250, 110), sealed(250), steps(260, 10)],
    )
    page = report(run, store)
    assert stretches(page) == [(0, 100), (100, 140), (140, 250), (250, 260)]
    assert list(losses(page)) == [2, 4, 100, 250]


def test_a_seal_that_ends_after_later_steps_is_no_going_back(run: Run, store: Path) -> None:
    write(store, steps(10, 10), steps(20, 10), sealed(10), steps(30, 10), sealed(20))
    page = report(run, store)
    assert stretches(page) == [(0, 10), (10, 20), (20, 30)]
    assert page.data["resumed_at"] == []


def test_a_checkpoint_whose_metrics_were_replaced_is_one(run: Run, store: Path) -> None:
    write(store, start(0), steps(10, 10), sealed(10, 3.0), sealed(10, 2.0))
    page = report(run, store)
    assert losses(page)[10] == 2.0
    assert page.data["checkpoints"][-1]["stall_s"] == 0.04


MARKUP = "<img src=x onerror=alert(1)></script><script>"
HOSTILE = [
    json.dumps(sealed(30, metrics={"loss" + MARKUP: 1.0, "\u202etxet\ud800": 1.0})),
    json.dumps(steps(30, 10, seconds={"step_s": 20.0, "wait_" + MARKUP: 9.0, "\x1b]2;": 9.0})),
    '{"kind": "later", "at": 1.8e9, "step": 30, "anything": 1}',
]
DROPPED = [
    json.dumps(steps(40, 10, seconds={"step_s": float("nan")})),
    json.dumps(steps(40, 10, seconds={"step_s": 1e300})),
    json.dumps(steps(40, 10, read_bytes="4")),
    json.dumps(steps(40, 50)),
    json.dumps(steps(True, 1)),
    json.dumps(steps(-40, 10)),
    json.dumps(steps(40, 10, at=1e300)),
    json.dumps(steps(10**30, 10)),
    json.dumps(steps(40, 10, seconds=[])),
    json.dumps(steps(40, 10, seconds={"x" * 1000: 1.0})),
    json.dumps(sealed(40, metrics={"loss": float("inf")})),
    json.dumps(sealed(40, metrics={str(n): 1.0 for n in range(500)})),
    json.dumps(sealed(40, metrics="loss")),
    json.dumps({"kind": "checkpoint"}),
    "[" * 60_000,
    '"text"',
    "\x00\x00",
    "x" * 100_000,
]


def test_hostile_lines_are_escaped_or_left_out(run: Run, store: Path) -> None:
    lines = [steps(10, 10), *(f"{line}\n" for line in [*HOSTILE, *DROPPED])]
    write(store, *lines, steps(35, 5), '{"kind": "steps", "at')
    page = report(run, store)
    assert page.tags <= OWN_TAGS
    assert not {name for name in page.names if name.startswith("on")}
    assert stretches(page) == [(0, 10), (20, 30), (30, 35)]
    assert f"loss{MARKUP}" in page.text
    assert "\\u202etxet\\ud800" in page.text
    assert "\x1b" not in page.text
    assert f"{len(DROPPED)} lines of history.jsonl could not be understood" in page.text


@pytest.mark.parametrize(
    "values",
    [(1e300, -1e300), (5e-324, 1e-323), (0.0, 0.0), (1e-300, 1e300), (7.0, 7.0 + 1e-15)],
    ids=str,
)
def test_metrics_of_any_size_are_drawn(run: Run, store: Path, values: tuple[float, float]) -> None:
    write(store, *(sealed(10 * n, value) for n, value in enumerate(values, 1)))
    page = report(run, store)
    assert [losses(page)[step] for step in (10, 20)] == list(values)
    assert "nan" not in (store.parent / "report.html").read_text().lower()


def test_a_long_run_has_a_small_page_with_the_same_sums(run: Run, store: Path) -> None:
    lines = []
    for n in range(1, 5001):
        lines += [steps(10 * n, 10), sealed(10 * n, 99.0 if n == 777 else 1.0)]
    write(store, *lines)
    page = report(run, store)
    assert os.path.getsize(store.parent / "report.html") < 1 << 20
    assert len(page.data["steps"]) <= 1000
    assert len(page.data["checkpoints"]) <= 1000
    assert sum(one["steps"] for one in page.data["steps"]) == 50_000
    assert "80" in page.parts, "the axis of the loss reaches up to the outlier"
    assert "more checkpoints not shown" in page.text


@pytest.mark.parametrize(
    ("seconds", "stall_s", "said"),
    [
        ({"step_s": 10.0, "wait_write_s": 6.0}, 0.0, "waited for the drive for 60%"),
        ({"step_s": 10.0, "wait_read_s": 6.0}, 0.0, "Smaller state is as good"),
        ({"step_s": 10.0, "wait_seal_s": 3.0}, 0.0, "waited for seals for 30% of the time"),
        ({"step_s": 10.0}, 8.0, "waited for seals for 20% of the run. Make fewer checkpoints"),
        ({"step_s": 10.0, "compute_s": 8.0}, 0.0, "Updating took 80%"),
        ({"step_s": 10.0, "wait_device_s": 8.0}, 0.0, "no drive shortens it"),
        ({"step_s": 0.4, "wait_read_s": 0.4}, 0.0, "faster drives would hardly be noticed"),
        ({"step_s": 10.0}, 0.0, "No wait stands out"),
        ({"compute_s": 8.0, "reading": 2.0}, 0.0, "Updating took 80%"),
        ({"beside_s": 20.0, "wait_update_s": 1.0, "wait_read_s": 9.0}, 0.0, "beside the model"),
    ],
    ids=lambda value: None if not isinstance(value, dict) else "-".join(value),
)
def test_the_advice_follows_from_the_numbers(
    run: Run, store: Path, seconds: dict[str, float], stall_s: float, said: str
) -> None:
    write(store, steps(10, 10, seconds=seconds), sealed(10, stall_s=stall_s))
    assert said in report(run, store).text


def test_the_file_is_named_for_the_store_and_replaced(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    for _ in range(2):
        code, out, err = run("report", "store")
        assert (code, err) == (0, "")
        assert out == "store-report.html: 2 checkpoints, no history; open it in a browser\n"
    assert Page((store.parent / "store-report.html").read_text()).data["steps"] == []


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("store/report.html", "a report is not written into a store"),
        ("store/step-00000004/manifest.json", "a report is not written into a store"),
        (".", "no report was written (Is a directory): choose another with -o"),
        ("nowhere/report.html", "no report was written (No such file or directory)"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(
    run: Run, store: Path, output: str, said: str
) -> None:
    before = sorted(store.rglob("*"))
    code, out, err = run("report", store, "-o", store.parent / output)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert sorted(store.rglob("*")) == before


def test_what_is_no_store_and_no_history_is_refused(run: Run, store: Path) -> None:
    code, _, err = run("report", store.parent / "nowhere")
    assert (code, err.count("\n")) == (1, 1)
    assert "there is no store here" in err
    os.mkfifo(store / "history.jsonl")
    code, _, err = run("report", store, "-o", os.devnull)
    assert (code, err.count("\n")) == (1, 1)
    assert "this is a FIFO, and no run has written it: remove it" in err


def test_the_command_runs_as_a_process_and_loads_neither_torch_nor_numpy(store: Path) -> None:
    write(store, steps(10, 10))
    program = f"""
import sys
from offload.cli import main
sys.argv = ["offload", "report", {str(store)!r}, "-o", "/dev/stdout"]
try:
    main()
finally:
    print("heavy:", sorted({{"torch", "numpy"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page, end, said = done.stdout.partition("</html>\n")
    assert stretches(Page(page + end)) == [(0, 10)]
    assert said == (
        "/dev/stdout: 2 checkpoints, 10 recorded steps; open it in a browser\nheavy: []\n"
    )
