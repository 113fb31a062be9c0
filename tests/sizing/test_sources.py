"""Models that `size` reads: numbers, configurations, safetensors, stores; measured drives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gds.cli import main as gds_main
from offload.sizing import Machine, SizingError, measured_drives, size
from tests.command_line import runner

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA_PARAMETERS = 2 * 96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (7_000_000_000, 7_000_000_000),
        (6.7e9, 6_700_000_000),
        ("7B", 7_000_000_000),
        ("6.7b", 6_700_000_000),
        ("135 M", 135_000_000),
        ("1.5e9", 1_500_000_000),
        ("1_000_000", 1_000_000),
        ("1T", 10**12),
        ("12", 12),
    ],
)
def test_numbers(model: float | str, expected: int) -> None:
    assert size(model).num_parameters == expected


@pytest.mark.parametrize(
    "model", [0, -7, 0.2, True, float("nan"), float("inf"), 1e30, "7Q", "", "B", "seven", "1e9e9"]
)
def test_what_is_no_number_is_refused(model: float | str) -> None:
    with pytest.raises(SizingError, match=r"parameters|is a directory|neither"):
        size(model)


def test_a_file_that_is_called_like_a_number_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("7B").mkdir()
    Path("7B/config.json").write_text(json.dumps(LLAMA))
    assert size("7B").num_parameters == LLAMA_PARAMETERS


def test_a_config_and_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert size(path).num_parameters == size(tmp_path).num_parameters == LLAMA_PARAMETERS
    assert size(path).disk.exact


def test_weights_in_one_file_and_in_several(tmp_path: Path) -> None:
    first = {"a": torch.zeros(100, 3), "b": torch.zeros(7, dtype=torch.bfloat16)}
    second = {"c": torch.zeros(11, dtype=torch.float16), "ids": torch.arange(5)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    places |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for path in (index, tmp_path):
        plan = size(path)
        assert plan.num_parameters == 300 + 7 + 11
        assert plan.parameter_bytes == 2 * 318 + 5 * 8  # a buffer keeps its dtype
        assert plan.state_bytes == 12 * 318
    assert size(tmp_path / "model-00001-of-00002.safetensors").num_parameters == 307


def test_weights_come_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    assert size(tmp_path).num_parameters == 10


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has neither safetensors files, nor config.json, nor a store"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "has a.safetensors, b.safetensors: name"),
        ({"config.json": b"[1]"}, "a JSON list, expected an object"),
        ({"config.json": b"{"}, "not a JSON file"),
        ({"config.json": b'{"a": 1, "a": 2}'}, "names a key twice"),
        ({"config.json": b"[" * 100_000}, "not a JSON file"),
        ({"config.json": b"{}"}, "model_type is None, known are gemma"),
        ({"model.safetensors": b"abc"}, "not a safetensors file"),
        ({"model.safetensors.index.json": b'{"weight_map": 3}'}, "weight_map is not a map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "b"}}'}, "No such file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_path(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SizingError) as caught:
        size(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert message in str(caught.value)


def test_a_directory_without_anything_to_train(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(5)}, tmp_path / "model.safetensors")
    with pytest.raises(SizingError, match="no tensor is of a dtype that is trained"):
        size(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "LOCK")  # of a store without checkpoints
    with pytest.raises(SizingError, match=str(tmp_path)):
        size(tmp_path)


SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
LAYERS = {**SMALL, "num_hidden_layers": 3, "num_attention_heads": 4}
TWO = {**LAYERS, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TWO),
    "llama tied": ("LlamaConfig", {**LAYERS, "tie_word_embeddings": True}),
    "llama biased": ("LlamaConfig", {**LAYERS, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**TWO, "head_dim": 16}),
    "qwen2": ("Qwen2Config", TWO),
    "qwen3": ("Qwen3Config", TWO),
    "gemma": ("GemmaConfig", {**LAYERS, "num_key_value_heads": 1}),
    "mixtral": ("MixtralConfig", {**TWO, "num_local_experts": 5}),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt2 inner": ("GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": 40}),
    "gpt_neox": ("GPTNeoXConfig", LAYERS),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_size_of_the_models_weights(name: str, tmp_path: Path) -> None:
    """To the byte: names and shapes of all tensors count in the disk's space."""
    transformers = pytest.importorskip("transformers")
    class_name, settings = CONFIGS[name]
    config = getattr(transformers, class_name)(**settings)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    found, expected = size(tmp_path / "config.json"), size(tmp_path / "model.safetensors")
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.disk == expected.disk
    assert found.fits == expected.fits


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "whisper"}, "model_type is 'whisper', known are .*"),
        *(({"hidden_size": v}, "hidden_size is ") for v in (None, "32", 0, 1.5, True)),
    ],
)
def test_a_field_of_a_config_is_refused_by_name(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    with pytest.raises(SizingError, match=rf"config\.json: {message}"):
        size(tmp_path)


def test_the_published_number_of_parameters(tmp_path: Path) -> None:
    wide = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32}
    gpt2 = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12}
    experts = {"num_key_value_heads": 8, "num_local_experts": 8, "intermediate_size": 14336}
    wide["num_attention_heads"] = 32
    for config, expected in (
        ({"model_type": "gpt2", **gpt2}, 124_439_808),
        ({"model_type": "llama", **wide, "intermediate_size": 11008}, 6_738_415_616),
        ({"model_type": "mixtral", **wide, **experts}, 46_702_792_704),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert size(tmp_path).num_parameters == expected


def test_the_drives_that_gds_bench_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner("gds", gds_main, monkeypatch, capsys)
    arguments = (
        *("--size", "64K", "--file-size", "1M", "--seconds", "0", "--ramp", "0", "--repeat", "1"),
        *("--allow-small", "--allow-volatile", "--json"),
    )
    code, out, err = run("bench", tmp_path, "--sweep", "rw=read,write,mixed", *arguments)
    assert code == 0, err
    path = tmp_path / "drive.json"
    path.write_text(out)
    medians = {r["workload"]["rw"]: r["median"]["bytes_per_s"] for r in json.loads(out)["results"]}
    rates = measured_drives(path).rates
    writes = next(r["median"] for r in json.loads(out)["results"] if r["workload"]["rw"] == "write")
    written = writes["bytes_per_s"] * 1.0
    sync_s = written / writes["durable_bytes_per_s"] - 1.0  # of as much as is written in a second
    assert rates.pop("flush_gbps") == pytest.approx(written / sync_s / 1e9)
    assert rates == {f"{rw}_gbps": pytest.approx(rate / 1e9) for rw, rate in medians.items()}
    plan = size(7e9, machine=Machine(**rates))
    assert plan.steps[1].seconds == pytest.approx(
        max(84e9 / medians["read"], 84e9 / medians["write"], 168e9 / medians["mixed"])
    )


def test_the_rate_of_flushes_is_that_of_the_syncs_after_plain_writes(tmp_path: Path) -> None:
    def result(written: float, durable: float, *, staged: bool = False) -> dict[str, object]:
        """Return a result of writes, with and without the time of the syncs after them."""
        workload = {"rw": "write", "mix": 50, "path": "direct", "staged": staged}
        median = {"bytes_per_s": written * 1e9, "durable_bytes_per_s": durable * 1e9}
        return {"workload": workload, "median": median}

    def rates(*results: dict[str, object]) -> dict[str, float]:
        """Return the rates in a file with some results."""
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"results": results}))
        return measured_drives(path).rates

    # 1 GB is written in 0.25 s and flushed in 0.5 s.
    assert rates(result(4.0, 1 / 0.75)) == pytest.approx({"write_gbps": 4.0, "flush_gbps": 2.0})
    # The fastest writes count; writes whose syncs took no time have no rate of flushes.
    assert rates(result(4.0, 4.0), result(2.0, 1.0)) == {"write_gbps": 4.0}
    assert rates(result(4.0, 1.0, staged=True)) == {"staged_write_gbps": 1.0}


def test_what_gds_bench_doubts_is_said(tmp_path: Path) -> None:
    def result(
        rw: str, gbps: float, path: str = "direct", *, staged: bool = False, **others: object
    ) -> dict[str, object]:
        workload = {"rw": rw, "mix": 50, "path": path} | ({"staged": True} if staged else {})
        return {"workload": workload, "median": {"bytes_per_s": gbps * 1e9}, **others}

    report = {
        "results": [
            result("read", 2.0, verdict_reasons=["too short: a run of 0.1 s"]),
            result("read", 3.0, verdict_reasons=["unstable: 1.6 to 3 GB/s between runs"]),
            result("read", 30.0, "buffered"),
            result("write", 1.5, verdict_reasons=[]),
            result("read", 1.2, staged=True, verdict_reasons=["too short: a run of 0.2 s"]),
        ]
    }
    path = tmp_path / "drive.json"
    path.write_text(json.dumps(report))
    found = measured_drives(path)
    assert found.rates == {"read_gbps": 3.0, "write_gbps": 1.5, "staged_read_gbps": 1.2}
    assert found.doubts == [
        "read: unstable: 1.6 to 3 GB/s between runs",
        "staged read: too short: a run of 0.2 s",
    ]


@pytest.mark.parametrize("content", ["", "{}", '{"results": 3}', '{"results": [{}]}', "nothing"])
def test_another_file_is_not_taken_for_a_measurement(content: str, tmp_path: Path) -> None:
    path = tmp_path / "drive.json"
    path.write_text(content)
    with pytest.raises(SizingError, match=r"drive\.json: not an output of `gds bench --json`"):
        measured_drives(path)


def test_a_measurement_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "drive.json"
    path.write_text('{"results": []}')
    with pytest.raises(SizingError, match="no read, write or mixed rate was measured"):
        measured_drives(path)
    with pytest.raises(SizingError, match="No such file"):
        measured_drives(tmp_path / "missing.json")
