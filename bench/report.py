"""Render the pages of measurements from the recorded results.

python -m bench.report        # bench/results/*.json -> docs/performance.md, bench/results/README.md

The first page shows what most people ask, as bars; the second has all ratios.

The pages show the newest result of each script and label; quick runs are left out. Only the figure
of losses needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import _performance_page, _ranks_tables
from bench._harness import RESULTS, BenchError, run, say, size
from bench._ranks_model import rates_for

Run = dict[str, Any]
"""A recorded result, with the path of its file under ``path``."""

_DOCS = Path(__file__).parent.parent / "docs"
_TITLES = {
    "step": "The step, beside the drive",
    "revisions": "The step, beside that of an earlier version",
    "digests": "What digests cost in a step",
    "small_tensors": "A step of many small tensors",
    "update_cpu": "The update on a CPU, beside the bytes that it moves and beside torch's code",
    "same_bits": "Values of the update on a CPU, beside torch's, bit by bit",
    "overlap": "The step, behind compute",
    "blocks": "Forward and backward of streamed blocks, beside blocks in memory",
    "near": "A step on a server of the same machine, beside a local step",
    "checkpoint": "Checkpoints",
    "frozen": "Checkpoints of a model of which little is trained",
    "resume": "Resuming",
    "hybrid": "Hybrid I/O, beside direct and buffered",
    "whole_files": "Whole files with hybrid I/O, beside direct I/O",
    "fio_axes": "`gds bench` beside fio",
    "sizing": "Predictions of `offload size`, beside measurements",
    "ranks_step": "Several ranks on one drive, beside one process",
    "ranks_bytes": "Bytes and memory of several ranks",
    "ranks_agreement": "Agreement of several ranks in a seal",
    "ranks_gather": "New values between ranks, beside torch's all-gather",
    "ranks_campaign": "Ranks that are killed or stopped",
    "tier_costs": "Tiers: uploads and downloads, and steps beside them",
    "peers": "Beside DeepSpeed ZeRO-Infinity",
    "finetune": "What smaller state does to a fine-tune",
    "kernel": "The kernels of a device, beside copies within its memory",
    "device": "State in device memory, beside the raw path",
}
_TAILS = "differences between torch's own codes, for last elements and for others"
_INTRODUCTION = """\
# Recorded results

Each recorded run has one file, named by date and what was run. The file names the command, the
machine and the versions, so that the run can be repeated. Figures of the documentation link to it.

`<date>-<bench>-<what>.json` is written by `python -m bench.<bench>`, and holds every sample.
`python -m bench.report` renders this page and `docs/performance.md` from the newest file of each
kind. Runs with `--quick` only show that a script works, so both leave them out.

`<date>-gpu-<device>.json` is the summary of `python -m bench.gpu` (`make gpu`), with the findings
of `gds check` and `gds bench`; the folder of the same name has the output of each part.

`<date>-<campaign>.json` is written by `python -m bench.campaign` (`make campaign NAME=...`): what a
campaign has tried and found, with its seed, the revision, a digest of the library and the load of
the machine.

## How to read the tables

Each claim is a ratio to something that was measured in the same run, on the same drive, in turns.
Smaller is better. A ratio is the median over pairs that were measured next to each other, in
alternating order. The 90 % interval of that median follows it (bootstrap). A limit is *met* if the
whole interval is within it, *met within noise* if only the interval's lower end is within it, and
*NOT MET* if not even the lower end is. "-" means that nothing is promised. Absolute times are those
of one machine, and a shared drive's speed can change by a factor of two within minutes.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", default=str(RESULTS), help="folder with the JSON files")
    parser.add_argument("--page", default=str(_DOCS / "performance.md"), help="page of bars")
    parser.add_argument("--tables", default=str(RESULTS / "README.md"), help="page of all ratios")
    parser.add_argument("--figures", default=str(_DOCS / "figures"), help="folder for figures")
    parser.add_argument("--no-figures", action="store_true", help="tables only")
    args = parser.parse_args(arguments)
    runs = read_results(args.results)
    page = Path(args.page)
    folder = Path(args.figures)
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(_performance_page.render(runs, page.parent, folder))
    losses = None if args.no_figures else _draw_losses(runs, folder)
    tables = Path(args.tables)
    tables.write_text(render_tables(runs, tables.parent, losses))
    num = sum(len(one["claims"]) for one in runs)
    say(f"written to {page} and {tables}: {num} claims of {len(runs)} runs")


def read_results(folder: str) -> list[Run]:
    """Return the newest full run of each script and label, in the order of the page.

    Raises:
        BenchError: A file is not JSON.
    """
    newest: dict[tuple[str, str], Run] = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise BenchError(
                f"{path} is not JSON ({error}): remove it or record it again"
            ) from None
        if found.get("bench") not in _TITLES or found.get("quick"):
            continue  # the demo's, and trials
        found["path"] = path
        key = (found["bench"], found["what"])
        if key not in newest or found["started"] >= newest[key]["started"]:
            newest[key] = found
    order = list(_TITLES)
    return sorted(newest.values(), key=lambda r: (order.index(r["bench"]), r["what"]))


def render_tables(runs: list[Run], folder: Path, losses: Path | None) -> str:
    """Return the page of all ratios as Markdown; links are relative to `folder`."""
    parts = [_INTRODUCTION]
    if not runs:
        parts.append("No run has been recorded yet: `make bench` makes one.\n")
    else:
        parts.append(_summary(runs))
    for bench, title in _TITLES.items():
        own = [r for r in runs if r["bench"] == bench]
        if not own:
            continue
        parts.append(f"## {title}\n")
        if bench == "finetune" and losses is not None:
            parts.append(f"![{title}]({_link(losses, folder)})\n")
        if bench == "finetune":
            parts.extend(_finetune_table(r, folder) for r in own)
            continue
        if bench == "same_bits":
            parts.extend(_same_bits_table(r, folder) for r in own)
            continue
        if bench == "ranks_campaign":
            links = (f"[{r['what']}]({_link(r['path'], folder)})" for r in own)
            parts.append(_ranks_tables.campaign([*zip(own, links, strict=True)]))
            continue
        parts.append(_claims_table(own, folder))
        parts.extend(_remarks(r) for r in own)
        if bench == "checkpoint":
            parts.extend(_checkpoint_table(r) for r in own if "stalls" in _parts(r))
        if bench == "frozen":
            parts.extend(_frozen_table(r) for r in own)
        if bench == "peers":
            parts.extend(_peers_table(r) for r in own)
        if bench == "ranks_step":
            for one in own:
                if (sizing := rates_for(one, runs)) is not None:
                    link = f"[{sizing['what']}]({_link(sizing['path'], folder)})"
                    parts.append(_ranks_tables.predictions(one, sizing, link))
    if runs:
        parts += ["## What it was measured on\n", _machines_table(runs, folder)]
    return "\n".join(parts)


def _summary(runs: list[Run]) -> str:
    """Return text with the number of limits that were met, and the list of those that were not."""
    claims = [c for r in runs for c in r["claims"] if c["limit"] is not None]
    missed = [c for c in claims if c["met"] is False]
    unsure = [c for c in claims if c["met"] is None]
    noisy = [c for c in claims if c["verdict"] == "met within noise"]
    clear = len(claims) - len(missed) - len(unsure) - len(noisy)
    words = f"{len(claims)} ratios have a limit: {clear} are within it, and {len(noisy)} are met "
    words += "within noise."
    if unsure:
        words += f" {len(unsure)} were measured in too few pairs for a verdict."
    if missed:
        words += " **Not met:**\n\n"
        words += "\n".join(
            f"- {c['claim']}: {_number(c['median'])}, limit {c['limit']:g}" for c in missed
        )
    return words + "\n"


def _claims_table(runs: list[Run], folder: Path) -> str:
    rows = []
    for one in runs:
        link = f"[{one['what']}]({_link(one['path'], folder)})"
        for claim in one["claims"]:
            low, high = claim["interval90"]
            limit = "-" if claim["limit"] is None else f"{claim['limit']:g}"
            verdict = "-" if claim["verdict"] == "no limit" else claim["verdict"]
            if verdict == "NOT MET":
                verdict = "**NOT MET**"
            interval = f"{_number(low)} to {_number(high)}"
            rows.append((claim["claim"], _number(claim["median"]), interval, limit, verdict, link))
    what = {"frozen": "bytes", "ranks_bytes": "bytes, memory"}.get(runs[0]["bench"], "time")
    return _table((what, "ratio", "90 % interval", "limit", "met?", "run"), rows)


def _remarks(one: Run) -> str:
    """Return the remarks of a run: medians, comparisons, skipped measurements and notes."""
    lines = []
    medians = {k: v for k, v in one["medians"].items() if k.endswith("_s")}
    if one["bench"] in ("step", "digests", "overlap", "resume", "device") and len(medians) <= 8:
        times = ", ".join(f"`{k[:-2]}` {v:.3g} s" for k, v in medians.items())
        lines.append(f"Medians of {one['what']}: {times}.")
    if one["bench"] == "overlap" and one["settings"]["overlap"] != "none":
        equal = one["facts"].get("bit_identical")
        steps = one["facts"].get("bit_identical_steps")
        same = "identical to the last bit" if equal else "**different**"
        lines.append(f"After {steps} steps the parameters were {same} with and without overlap.")
    if one["bench"] == "near":
        lines += _near_remarks(one)
    for claim in one["claims"]:
        if one["bench"] == "sizing" and "is_within" in claim:
            low, high = claim["interval90_of_measured_s"]
            timed = claim["claim"].rpartition(" ")[2]
            where = "within" if claim["is_within"] else "outside"
            lines.append(
                f"{one['what']}: the {timed} took {low:.3g} to {high:.3g} s (90 % interval of the "
                f"median), and {claim['predicted_s']:.3g} s were predicted: {where}."
            )
    if one["bench"] == "ranks_agreement":
        agreement = f"{1e3 * one['facts']['median_agreement_s']:.1f} ms"
        lines.append(f"The median agreement took {agreement}, without rename and sync.")
    lines += [f"Not measured: {reason}." for reason in one["skipped"]]
    if one["notes"]:
        lines.append(one["notes"])
    return "\n".join(lines) + "\n" if lines else ""


def _near_remarks(one: Run) -> Iterator[str]:
    """Return what crossed the link, and the server's memory, for each size of the model."""
    facts = one["facts"]
    for label in one["settings"]["memory_sizes"].split(","):
        step, restored = (
            f"{facts[f'{what}_link_{label}_bytes_per_parameter']:.4f}"
            for what in ("step", "restore")
        )
        sealed = facts[f"checkpoint_link_{label}_bytes"] - facts["train_state_bytes"]
        memory = facts[f"server_peak_{label}_bytes"] / (1 << 20)
        yield (
            f"{label}: over the link, a step moved {step} bytes per parameter, a restore "
            f"{restored}, and a checkpoint its train state and {sealed} bytes. The server has had "
            f"{memory:.0f} MiB of memory."
        )


def _parts(one: Run) -> Sequence[str]:
    """Return what a run of `bench.checkpoint` has measured; early ones measured everything."""
    parts: Sequence[str] = one["settings"].get("parts", ("stalls", "cost"))
    return parts


def _checkpoint_table(one: Run) -> str:
    """Return a table of the costs of each way of saving."""
    suffix = "_written_bytes_per_parameter"
    rows = []
    for key in one["facts"]:
        if not key.endswith(suffix):
            continue
        name = key.removesuffix(suffix)
        way, label = name.rsplit("_", 1)
        medians = one["medians"]
        durable = medians.get(f"{name}_durable_s", medians.get(f"{name}_seal_s", float("nan")))
        memory = one["facts"][f"{name}_memory_bytes_per_parameter"]
        stall, written = medians[f"{name}_stall_s"], one["facts"][key]
        cells = (f"{stall:.4f}", f"{durable:.2f}", f"{written:.2f}", f"{memory:.2f}")
        rows.append((label, way.replace("_", " "), *cells))
    head = (
        "parameters",
        "way",
        "stops training, s",
        "durable, s",
        "B/param written",
        "B/param of memory",
    )
    return _table(head, rows)


def _frozen_table(one: Run) -> str:
    """Return a table of the most bytes that a seal of each phase moved, and of the seals' times."""
    facts, samples = one["facts"], one["samples"]
    suffix = "_written_bytes"
    rows = []
    for key in samples:
        if not key.endswith(suffix):
            continue
        phase = key.removesuffix(suffix)
        moved = [max(samples[f"{phase}_{kind}_bytes"]) for kind in ("written", "read")]
        times = (one["medians"][f"{phase}_seal_s"], max(samples[f"{phase}_seal_s"]))
        cells = (*map(size, moved), *(f"{seconds:.2f}" for seconds in times))
        rows.append((phase.replace("_", " "), str(len(samples[key])), *cells))
    head = (
        "phase",
        "seals",
        "most written by a seal",
        "most read by a seal",
        "median time, s",
        "longest, s",
    )
    trained, frozen = size(facts["trained_bytes"]), size(facts["frozen_bytes"])
    return f"{trained} is trained, {frozen} is frozen ({one['what']}).\n\n" + _table(head, rows)


def _peers_table(one: Run) -> str:
    """Return a table of bytes and memory of each system."""
    rows = []
    for key, peak in one["facts"].items():
        if not key.endswith("_peak_bytes"):
            continue
        name = key.removesuffix("_peak_bytes")
        facts = one["facts"]
        first = facts[f"{name}_peak_with_first_step_bytes"]
        moved = (size(facts[f"{name}_read_bytes"]), size(facts[f"{name}_written_bytes"]))
        rows.append((name.replace("_", ", "), *moved, size(peak), size(first)))
    head = (
        "system",
        "read per iteration",
        "written per iteration",
        "peak memory",
        "peak memory, first steps included",
    )
    return _table(head, rows)


def _finetune_table(one: Run, folder: Path) -> str:
    """Return a table of each format's losses, and of their differences from those of FP32 state."""
    facts, rows = one["facts"], []
    for key, after in facts.items():
        if not key.endswith("_held_out_loss_after"):
            continue
        name = key.removesuffix("_held_out_loss_after")
        cells = (facts[f"{name}_held_out_loss_before"], after, facts[f"{name}_largest_difference"])
        rows.append((name, *(f"{cell:.4f}" for cell in cells)))
    head = ("state", "held-out loss before", "after", "largest difference of a training loss")
    link = f"[{one['what']}]({_link(one['path'], folder)})"
    text = (
        f"Each format is trained with the same data in the same order ({link}). The last row has "
        "FP32 state and another learning rate, as a measure for the other differences.\n\n"
    )
    return text + _table(head, rows)


def _same_bits_table(one: Run, folder: Path) -> str:
    """Return a table of the values that were compared, for each set of instructions."""
    facts, rows = one["facts"], []
    for key, num in facts.items():
        if not key.endswith("_num_values"):
            continue
        name = key.removesuffix("_num_values")
        wrong = sum(facts[f"{name}_differences"].values())
        tails = ", ".join(f"{kind}: {n}" for kind, n in facts[f"{name}_tails"].items())
        cells = (name, f"{num:,}", str(facts[f"{name}_num_cases"]), str(wrong), tails or "none")
        rows.append((*cells, f"[{one['what']}]({_link(one['path'], folder)})"))
    head = ("instructions", "values", "cases", "with other bits than torch's", _TAILS, "run")
    return _table(head, rows) + "\n" + _remarks(one)


def _machines_table(runs: list[Run], folder: Path) -> str:
    rows = []
    for one in runs:
        machine, storage = one["machine"], one["storage"]
        hardware = f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])}"
        disk = f"{storage['filesystem']} on {storage['device']}, kernel {machine['kernel']}"
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        link = f"[{one['bench']}, {one['what']}]({_link(one['path'], folder)})"
        rows.append((link, one["date"], hardware, disk, versions))
    return _table(("run", "date", "machine", "storage", "versions"), rows)


def _draw_losses(runs: list[Run], folder: Path) -> Path | None:
    """Draw the losses of the newest fine-tune; return the path of the figure, if there is one."""
    own = [r for r in runs if r["bench"] == "finetune"]
    if not own:
        return None
    path = folder / "performance-finetune.svg"
    try:
        from bench._figures import draw_losses
    except ImportError as error:
        old = "the one that exists stays" if path.exists() else "there is none yet"
        say(f"no figure of losses drawn: {error.name} is missing (pip install '.[bench]'); {old}")
        return path if path.exists() else None
    losses = {k.removesuffix("_loss"): v for k, v in own[-1]["samples"].items()}
    draw_losses(_TITLES["finetune"], losses, path)
    return path


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Return a ratio as text, with two decimals, or two digits if it is below 0.1."""
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


if __name__ == "__main__":
    run(main)
