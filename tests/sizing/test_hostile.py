"""Inputs that are damaged, huge or made to do harm: each is refused at once, with its path."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from offload.sizing import Cluster, Machine, Precision, Run, SizingError, measured_drives, size
from tests.limits import HANG_S
from tests.sizing.test_sources import LLAMA


def write_weights(path: Path, header: dict[str, Any], num_bytes: int) -> None:
    """Write a safetensors file with the given header and zeros as data."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))


def one_tensor(name: str = "a") -> dict[str, Any]:
    """Return the header of a file with two numbers in bf16."""
    return {name: {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}


def write_index(path: Path, *names: str) -> Path:
    """Write an index of safetensors files with one tensor in each."""
    path.write_text(json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(names)}}))
    return path


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "x.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        words = rf"{name}: a pipe, a socket or a device, expected"
        for model in (tmp_path, tmp_path / name):
            with pytest.raises(SizingError, match=words):
                size(model)
        (tmp_path / name).rename(tmp_path / "drive.json")
        for path in (str(tmp_path / "drive.json"), "/dev/zero"):
            with pytest.raises(SizingError, match=f"{path}: a pipe, a socket or a device"):
                measured_drives(path)
        (tmp_path / "drive.json").unlink()


OUTSIDE = ["", "..", "../x.safetensors", "x/ok.safetensors", "a\0b", "\ud800"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_beside_it_only(name: str, tmp_path: Path) -> None:
    write_weights(tmp_path / "x.safetensors", one_tensor(), 4)
    inner = tmp_path / "model"
    inner.mkdir()
    write_index(inner / "model.safetensors.index.json", name)
    with pytest.raises(SizingError, match=r"model\.safetensors\.index\.json: .*names") as caught:
        size(inner)
    str(caught.value).encode()


def test_an_index_may_lead_to_links(tmp_path: Path) -> None:  # as in the cache of Hugging Face
    write_weights(tmp_path / "blob", one_tensor(), 4)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model-1.safetensors").symlink_to("../blob")
    write_index(snapshot / "model.safetensors.index.json", "model-1.safetensors")
    assert size(snapshot).num_parameters == 2


def test_a_tensor_in_two_files_is_refused_with_the_path(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        write_weights(tmp_path / name, one_tensor(), 4)
    index = write_index(tmp_path / "x.safetensors.index.json", "1.safetensors", "2.safetensors")
    with pytest.raises(SizingError, match=r"index\.json: .*two tensors are called 'a'"):
        size(index)


def test_weights_without_an_element(tmp_path: Path) -> None:
    header = {"a": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}
    write_weights(tmp_path / "a.safetensors", header, 0)
    with pytest.raises(SizingError, match=r"a\.safetensors: 0 parameters, expected 1 to"):
        size(tmp_path)


@pytest.mark.parametrize("name", ["model_type", "hidden_size", "attention_bias"])
@pytest.mark.parametrize("value", ["x" * 1_000_000, ["x"] * 100_000], ids=["text", "list"])
def test_a_message_is_short_however_long_a_value_is(
    name: str, value: object, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {name: value}))
    with pytest.raises(SizingError, match=f"config.json: {name} is ") as caught:
        size(tmp_path)
    assert len(str(caught.value)) < 1000


WIDE = {"vocab_size": 1 << 20, "hidden_size": 1 << 14}


@pytest.mark.parametrize(
    ("changed", "given", "message"),
    [
        ({"num_hidden_layers": 1 << 40}, {}, r"config\.json: .*more than 100000 tensors"),
        (
            {"vocab_size": 1 << 40, "hidden_size": 1 << 20},
            {},
            r"config\.json: .*parameters, expect",
        ),
        (WIDE, {"chunk_bytes": 4096}, "chunks, at most"),
    ],
)
def test_a_huge_config_is_refused_at_once(
    changed: dict[str, int], given: dict[str, int], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    start = time.monotonic()
    with pytest.raises(SizingError, match=message):
        size(tmp_path, **given)
    assert time.monotonic() - start < HANG_S


def test_very_many_tensors_are_refused_at_once(tmp_path: Path) -> None:
    header = {
        f"t{n}": {"dtype": "BF16", "shape": [1], "data_offsets": [2 * n, 2 * n + 2]}
        for n in range(100_001)
    }
    write_weights(tmp_path / "a.safetensors", header, 200_002)
    with pytest.raises(SizingError, match=r"a\.safetensors: more than 100000 tensors"):
        size(tmp_path)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 90 << 20))
    os.truncate(path, 91 << 20)
    with pytest.raises(SizingError, match=r"a\.safetensors: a header of 94371840 bytes, at most"):
        size(path)


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(SizingError, match=f"{tmp_path}: Permission denied"):
        size(tmp_path)


def test_a_measurement_is_small(tmp_path: Path) -> None:
    path = tmp_path / "drive.json"
    path.write_text('{"results": [' + "{}," * 2_000_000 + "{}]}")
    with pytest.raises(SizingError, match=r"drive\.json: not an output of `gds bench --json`"):
        measured_drives(path)


HUGE = 10**400
REFUSED: list[tuple[Any, str]] = [
    (lambda: Precision(optimizer="Lion"), "optimizer is 'Lion', known are Adadelta"),
    (lambda: Precision(dtype="int4"), "dtype is 'int4', known are bfloat16"),
    (lambda: Precision(state_dtype="fp8"), "state_dtype is 'fp8'"),
    (lambda: Precision(gradient_bytes=3), "gradient_bytes is 3"),
    (lambda: Machine(read_gbps=0.0), "read_gbps is 0.0, expected a positive number"),
    (lambda: Machine(link_gbps=float("nan")), "link_gbps is nan"),
    (lambda: Cluster(gpus=0), "gpus is 0"),
    (lambda: Cluster(efficiency=1.5), "efficiency is 1.5"),
    (lambda: Run(keep=0), "keep is 0"),
    (lambda: Run(backward_s=6.0), "backward_s needs forward_s"),
    (lambda: size(7e9, run=Run(upload_s=9.0)), "upload_s needs interval_s"),
    (lambda: size(7e9, shares=()), "shares is ()"),
    (lambda: size(7e9, shares=(1, 0)), "shares is (1, 0)"),
    (lambda: size(7e9, chunk_bytes=100), "chunk_bytes"),
    (lambda: Cluster(gpus=24, tp=2, pp=16), "24 GPUs cannot be divided into replicas of 2 x 16"),
    (lambda: Cluster(gpus=HUGE), "gpus is "),
    (lambda: size(7e9, shares=(1,) * 100_000), "shares is (1, 1"),
    (lambda: size(10**5000), "parameters, expected 1 to"),
    (lambda: size("1" * 5000), "1111"),
    (lambda: Run(interval_s=1e-200), "interval_s is 1e-200, expected a positive number, from"),
    (lambda: Run(mttf_s=10**5000), "mttf_s is "),
    (lambda: Machine(read_gbps=5e-324), "read_gbps is 5e-324"),
    (lambda: Precision(optimizer=["Adam"]), "optimizer is ['Adam'], known are"),  # type: ignore[arg-type]
    (lambda: Cluster(efficiency="1"), "efficiency is '1'"),  # type: ignore[arg-type]
    (lambda: size(7e9, num_groups=0), "num_groups is 0"),
    (lambda: size(7e9, train_state_bytes=-1), "train_state_bytes is -1"),
    (lambda: size(7e9, chunk_bytes=HUGE), "chunk_bytes is "),
    (lambda: size(7e9, chunk_bytes=1e6), "chunk_bytes is 1000000.0"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_values_that_are_impossible_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(SizingError) as caught:
        make()
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_extremes_of_the_ranges_have_figures() -> None:
    least, most = 1e-30, 1e30
    for low, high in ((least, most), (most, least)):
        plan = size(
            1e18 if low == least else 1,
            machine=Machine(read_gbps=low, write_gbps=low, link_gbps=low, drive_tbw=high),
            cluster=Cluster(storage_gbps=low, writer_gbps=low, efficiency=1e-30),
            run=Run(interval_s=low, budget=low, mttf_s=low, stall_s=low, upload_s=low),
        )
        json.dumps(plan.to_json(), allow_nan=False)
