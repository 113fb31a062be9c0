"""`offload ls`, `show` and `verify` on a store that a small training run made."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import offload
from offload.format.document import digest_of
from tests.command_line import Run
from tests.stores.files import flip_on_disk
from tests.stores.small import make_model, make_optimizer, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 2 and 4."""
    store = tmp_path_factory.mktemp("trained") / "store"
    model = make_model(64, 128, 8)
    with make_optimizer(model, directory=store, keep=2) as optimizer:
        train(optimizer, 4, seal_at=(2, 4))
    return store


def test_ls_json_has_one_object_for_each_checkpoint_oldest_first(run: Run, trained: Path) -> None:
    code, out, _ = run("ls", trained, "--json")
    listed = json.loads(out)
    assert code == 0
    assert [info["step"] for info in listed] == [2, 4]
    assert [Path(info["path"]).name for info in listed] == ["step-00000002", "step-00000004"]
    assert listed[0]["generation"] < listed[1]["generation"]
    for info in listed:
        assert set(info) >= {"path", "step", "generation", "created", "valid", "reason"}
        assert info["valid"] is True
        assert info["num_parameters"] == 64 * 128 + 128 + 128 * 8 + 8
        assert info["bytes"] == sum(f.stat().st_size for f in Path(info["path"]).iterdir())


def test_ls_says_that_it_has_not_read_the_content(run: Run, store: Path) -> None:
    flip_on_disk(store / "step-00000004" / "exp_avg.safetensors", 5000)
    _, out, _ = run("ls", store)
    assert out.count("complete") == 3, "twice, and what it means"
    assert f"its content is not read (offload verify {store})" in out
    assert "usable" not in out


EVALUATED = {"eval_loss": 3.92308, "eval_samples_per_second": 91.133, "epoch": 0.24}


def test_each_checkpoint_has_one_line_at_any_width(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit is cut, but for ``--wide`` and ``--json``."""
    offload.pin(store / "step-00000004", long := "lightning-epoch-2-step-30-8887fbe20f")
    edit_manifest(store, lambda body: body.update(metrics=EVALUATED))
    created = offload.list_checkpoints(store)[1].created[:16].replace("T", " ")
    for columns in (54, 80, 121):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = run("ls", store)
        *table, meaning = out.splitlines()
        assert max(len(line.rstrip()) for line in table) <= columns
        assert [line[:13] for line in table[2:]] == ["step-00000002", "step-00000004"]
        assert meaning.startswith("complete: ")
        assert (created in table[-1]) >= (columns >= 80)
        assert (long in table[-1]) >= (columns > 120)
    wide = run("ls", store, "--wide")[1]
    assert all(f"{name}={value}" in wide for name, value in EVALUATED.items())
    newest = json.loads(run("ls", store, "--json")[1])[1]
    assert (newest["pins"], newest["metrics"]) == ([long], EVALUATED)


def test_ls_says_why_a_checkpoint_is_not_usable(run: Run, store: Path) -> None:
    manifest = store / "step-00000004" / "manifest.json"
    flip_on_disk(manifest, 100)
    code, out, _ = run("ls", store, "--json")
    good, bad = json.loads(out)
    assert code == 0
    assert (good["valid"], bad["valid"]) == (True, False)
    assert bad["reason"]
    _, table, _ = run("ls", store)
    assert "step-00000004/manifest.json" in table.replace("\n", "")


def test_show_json_describes_the_checkpoint(run: Run, trained: Path) -> None:
    code, out, _ = run("show", trained / "step-00000002", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["step"] == 2
    assert shown["optimizer"].endswith("AdamW")
    assert shown["hyperparameters"][0]["lr"] == 1e-3
    assert set(shown["state_arrays"]) == {"master", "exp_avg", "exp_avg_sq"}
    assert shown["state_arrays"]["master"] == 4 * shown["num_parameters"]
    assert shown["files"]["model.safetensors"] > 0
    tensors = {tensor["name"]: tensor for tensor in shown["tensors"]}
    assert tensors["0.weight"] == {"name": "0.weight", "dtype": "BF16", "shape": [128, 64]}


def test_show_of_a_store_takes_its_newest_checkpoint_and_lists_tensors_if_asked(
    run: Run, trained: Path
) -> None:
    assert json.loads(run("show", trained, "--json")[1])["step"] == 4
    assert "1.bias" not in run("show", trained)[1]
    assert "1.bias" in run("show", trained, "--tensors")[1]


def test_verify_of_a_store_reads_all_of_its_checkpoints(run: Run, trained: Path) -> None:
    code, out, _ = run("verify", trained, "--json")
    verified = json.loads(out)
    assert code == 0
    assert verified["ok"] is True
    assert len(verified["checkpoints"]) == 2
    parameters = 64 * 128 + 128 + 128 * 8 + 8
    for result in verified["checkpoints"]:
        assert result["problems"] == []
        assert result["bytes_checked"] >= 14 * parameters


@pytest.mark.parametrize("name", ["model", "master", "exp_avg", "exp_avg_sq", "train_state"])
def test_verify_finds_one_flipped_bit_in_any_file(run: Run, store: Path, name: str) -> None:
    damaged = store / "step-00000004" / f"{name}.safetensors"
    flip_on_disk(damaged, 4096 + 8 if name != "train_state" else 40)
    code, out, _ = run("verify", store, "--json")
    good, bad = json.loads(out)["checkpoints"]
    assert code == 1
    assert (good["ok"], bad["ok"]) == (True, False)
    assert str(damaged) in bad["problems"][0]
    code, out, err = run("verify", damaged.parent)
    assert (code, "damaged" in out, err.count(damaged.name)) == (1, True, 1)
    assert run("verify", store / "step-00000002")[0] == 0


@pytest.mark.parametrize("file", ["manifest.json", "exp_avg.safetensors"])
def test_verify_does_not_call_damaged_what_it_could_not_open(
    run: Run, store: Path, file: str
) -> None:
    newest = store / "step-00000004"
    (newest / file).unlink()
    for path in (store, newest):
        code, out, err = run("verify", path)
        assert code == 1
        assert f"{newest}: not usable; its content was not read" in out
        assert "damaged" not in out
        assert file in err
        assert "looks for stores" not in err


def test_verify_all_finds_every_store_below(run: Run, store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "runs" / "b" / "store")
    damaged = shutil.copytree(store, tmp_path / "runs" / "a") / "step-00000002"
    flip_on_disk(damaged / "exp_avg.safetensors", 5000)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "empty" / "LOCK").touch()
    code, out, _ = run("verify", "--all", tmp_path / "runs", "--json")
    found = {result["path"]: result["ok"] for result in json.loads(out)["checkpoints"]}
    assert code == 1
    assert len(found) == 4
    assert [path for path, ok in found.items() if not ok] == [str(damaged)]
    code, _, err = run("verify", "--all", tmp_path / "runs" / "b" / "store" / "step-00000002")
    assert code == 1
    assert "no store" in err


def test_verify_marks_what_is_damaged_only_if_it_is_told_to(run: Run, store: Path) -> None:
    newest = store / "step-00000004"
    flip_on_disk(newest / "exp_avg.safetensors", 5000)
    assert run("verify", store)[0] == 1
    assert json.loads(run("show", store, "--json")[1])["step"] == 4
    assert run("verify", store, "--quarantine")[0] == 1
    assert "exp_avg.safetensors" in (newest / "damaged.txt").read_text()
    code, out, err = run("show", store, "--json")
    assert (code, json.loads(out)["step"]) == (0, 2)
    assert err.startswith(f"warning: not using {newest}: ")
    assert err.count("\n") == 1
    code, _, err = run("show", newest)
    assert code == 1
    assert "quarantined" in err
    assert run("verify", store)[0] == 1
    (newest / "damaged.txt").unlink()
    flip_on_disk(newest / "exp_avg.safetensors", 5000)
    assert run("verify", store)[0] == 0


@pytest.mark.parametrize("arguments", [["ls"], ["nothing"], ["demo", "--steps", "1"]])
def test_wrong_usage_is_status_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["offload", "--version"], 0, f"offload {offload.__version__}\n"),
        (["offload", "ls", "/nowhere"], 1, "error: /nowhere: there is no store here"),
        (["gds", "--help"], 0, "Usage: python -m gds "),
        (["gds", "check", "/nowhere/at/all"], 1, "error: /nowhere/at/all: "),
    ],
    ids=["version", "ls", "help", "check"],
)
def test_python_runs_the_package_as_the_command(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("offload ver", "verify"),
        ("offload verify --q", "--quarantine"),
        ("offload size --card rtx-40", "rtx-4060\nrtx-4070\nrtx-4080\nrtx-4090"),
        ("gds be", "bench"),
    ],
)
def test_a_shell_is_offered_what_completes_a_line(line: str, offered: str) -> None:
    command = line.split()[0]
    program = f"import sys; from {command}.cli import main; sys.argv = [{command!r}]; main()"
    asked = {
        f"_{command.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


@pytest.mark.parametrize(
    "command", ["--help", "du", "ls", "prune", "show", "size", "top", "verify"]
)
def test_commands_that_look_at_stores_import_neither_torch_nor_numpy(
    trained: Path, command: str
) -> None:
    arguments = ["--help"] if command == "--help" else [command, str(trained)]
    arguments += ["--keep", "2", "--dry-run"] if command == "prune" else []
    arguments += ["--once"] if command == "top" else []
    program = f"""
import sys
from offload.cli import main
from offload.format.document import digest_of
sys.argv = ["offload", *{arguments!r}]
try:
    main()
finally:
    heavy = {{"torch", "numpy", "transformers"}} & set(sys.modules)
    print("heavy:", sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "heavy: []" in done.stdout


def edit_manifest(store: Path, change: Callable[[dict], None]) -> Path:
    """Change the newest manifest as someone would who knows how to make its digest right."""
    path = store / "step-00000004" / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document["body"])
    path.write_bytes(json.dumps({**document, "digest": digest_of(document["body"])}).encode())
    return path.parent


def test_what_a_store_says_is_neither_markup_nor_terminal_control(run: Run, store: Path) -> None:
    hostile = "[/red]\x1b]2;owned\x07\n[bold]"
    newest = edit_manifest(store, lambda body: body["groups"][0].update({hostile: hostile}))
    code, out, err = run("show", newest)
    assert code == 0, err
    assert all(c.isprintable() or c == "\n" for c in out)
    assert r"[/red]\x1b]2;owned\x07\n[bold]" in "".join(
        line.strip("│ ").split("│")[-1].strip() for line in out.splitlines()
    )


def test_show_json_has_plain_values_for_every_hyperparameter(run: Run, store: Path) -> None:
    special = {
        "lr": {"tensor": "0.5", "dtype": "float32", "shape": []},
        "limit": {"float": "inf"},
    }
    newest = edit_manifest(store, lambda body: body["groups"][0].update(special))
    code, out, err = run("show", newest, "--json")
    assert code == 0, err
    (group,) = json.loads(out)["hyperparameters"]
    assert (group["lr"], group["limit"], group["betas"]) == (0.5, "inf", [0.9, 0.999])
    assert "Infinity" not in out


def test_an_error_is_one_line_whatever_the_name_is(run: Run, store: Path, tmp_path: Path) -> None:
    flip_on_disk(store / "step-00000004" / "manifest.json", 100)
    cases = {tmp_path / "a\nb\x1b[2J": r"a\nb\x1b[2J"}
    cases |= {store / "step-00000004": f"{store}/step-00000004/manifest.json"}
    for path, said in cases.items():
        code, out, err = run("show", path)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("error: ")
        assert said in err
