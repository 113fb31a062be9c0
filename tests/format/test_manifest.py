"""What a manifest can hold and may take, what it refuses, and what is not sealed because of it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import offload
from offload.errors import CheckpointError, ManifestError, OffloadError, UnsupportedOptimizerError
from offload.format import Layout, Manifest, ModelTensor, ParameterSpec, document, manifest
from offload.format._manifest_fields import TENSOR_DTYPES
from offload.format.boxes import Box, Cut
from offload.format.document import MAX_CONTENT_BYTES
from offload.format.manifest import (
    MAX_MANIFEST_BYTES,
    decode,
    num_model_blocks,
    reserved_bytes,
)
from offload.format.shares.owners import ModelBox, encode_model_boxes
from offload.format.strict_json import MAX_VALUES, num_marks, parse_json
from tests.attacks import good
from tests.attacks.manifests import put
from tests.ranks_store import synthetic

PATH = "run/step-00000002/manifest.json"
RESERVED = 1 << 16


def a_manifest(**changes) -> Manifest:
    return dataclasses.replace(decode(good.manifest(), PATH), **changes)


def through_the_file(written: Manifest) -> Manifest:
    return decode(written.encode(RESERVED), PATH)


# Values


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        -(2**63) + 1,
        2**63 - 1,
        0.1,
        1e308,
        float("inf"),
        "é\n",
        (1, (2.0, "x")),
        [1, [None]],
        torch.tensor(0.25),
        torch.tensor([[7]], dtype=torch.int64),
        torch.tensor(1e-3, dtype=torch.bfloat16),
        *(torch.ones(1, dtype=getattr(torch, name)) for name in TENSOR_DTYPES),
    ],
    ids=repr,
)
def test_a_hyperparameter_comes_back_the_same(value):
    (found,) = through_the_file(a_manifest(groups=({"lr": value},))).groups
    assert type(found["lr"]) is type(value)
    if isinstance(value, torch.Tensor):
        assert (found["lr"].dtype, found["lr"].shape) == (value.dtype, value.shape)
    assert found["lr"] == value


@pytest.mark.parametrize(
    "value",
    [2**63, -(2**64), "\ud800", torch.tensor(True), torch.tensor(1j), torch.ones(2), object()],
    ids=lambda value: "object" if type(value) is object else repr(value),
)
def test_what_would_not_come_back_is_refused_when_it_is_sealed(value):
    with pytest.raises(TypeError, match=r"param_groups\[1\]\['x'\]"):
        a_manifest(groups=({}, {"x": value})).encode(RESERVED)
    with pytest.raises(TypeError, match=r"param_groups\[0\] has the key"):
        a_manifest(groups=({"\ud800": 1},)).encode(RESERVED)


def test_scalars_of_numpy_are_numbers_and_two_that_say_nan_say_the_same():
    scalars = ((("mu", "float", np.float64(0.5)), ("n", "int", 3)), None, None, None)
    found = through_the_file(a_manifest(scalars=scalars))
    assert found.scalars[0] == (("mu", "float", 0.5), ("n", "int", 3))
    nan = a_manifest(scalars=((("eta", "f32", float("nan")),), None, None, None))
    assert through_the_file(nan).digest == nan.digest
    assert nan.digest != a_manifest().digest


@pytest.mark.parametrize("field", ["generation", "step"])
def test_numbers_that_could_not_be_read_again_are_not_sealed(field):
    for good_value in (0, 2**63 - 1):
        found = through_the_file(a_manifest(**{field: good_value}))
        assert getattr(found, field) == good_value
    for bad in (-1, 2**63):
        with pytest.raises(OffloadError, match="remove it, and continue from another one"):
            a_manifest(**{field: bad}).encode(RESERVED)


def test_a_state_array_must_be_able_to_name_a_file(tmp_path):
    class Keeping(torch.optim.SGD):
        key = ""

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault(self.key, torch.zeros_like(p)).add_(p.grad)

    def stepped():
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        options = offload.Options(allow_volatile=True)
        with offload.OffloadedOptimizer(
            Keeping, [parameter], lr=0.1, directory=tmp_path / "run", options=options
        ) as optimizer:
            optimizer.step()
            return [path.name for path in Path(optimizer.checkpoint().result().path).iterdir()]

    for Keeping.key in ("../../x", "model", "a\0b", "", "a" * 65):
        with pytest.raises(UnsupportedOptimizerError, match="a state array names a file"):
            stepped()
    Keeping.key = "sum_of_gradients"
    assert "sum_of_gradients.safetensors" in stepped()


def test_a_store_has_no_more_directories_than_are_read(tmp_path):
    places = [tmp_path / str(n) for n in range(65)]
    with pytest.raises(ValueError, match="at most 64 directories, got 65"):
        offload.AdamW([torch.nn.Parameter(torch.zeros(1))], directory=places)
    assert list(tmp_path.iterdir()) == []


# Lies

HUGE_INTEGER = {"tensor": str(2**64), "dtype": "int64", "shape": []}

LIES = {
    "a-group-just-beyond-the-last": (put("parameters", 0, 3, value=1), "a group that does not"),
    "no-share": (put("shares", value=[]), r"shares are \[\]"),
    "too-many-shares": (put("shares", value=[1] * 65), "shares are"),
    "a-share-of-nothing": (put("shares", value=[1, 0]), r"shares are \[1, 0\]"),
    "too-large-a-share": (put("shares", value=[2**16 + 1]), r"shares are \[65537\]"),
    "blocks-of-another-size": (put("model_block_bytes", value=4096), "model_block_bytes is 4096"),
    "no-digests-of-the-model": (put("model_digests", value=[]), "each block of the model file"),
    "an-order-of-no-groups": (put("order", value=[]), "the order of parameters"),
    "an-order-of-more-groups": (put("order", value=[[0, 1], [2, 3]]), "the order of parameters"),
    "an-order-beyond-the-last": (put("order", value=[[0, 1, 2, 4]]), "the order of parameters"),
    "state-given-up-that-is-there": (put("dropped_arrays", value=["exp_avg"]), "has given up"),
    "a-file-of-others-given-up": (put("dropped_arrays", value=["model"]), "name of a state array"),
    "a-path-given-up": (put("dropped_arrays", value=["../LOCK"]), "name of a state array"),
    "an-array-given-up-twice": (put("dropped_arrays", value=["m", "m"]), "a name occurs twice"),
    "parameters-as-a-hyperparameter": (put("groups", 0, "params", value=[]), "hyper-parameter"),
    "a-tensor-of-65-bits": (put("groups", 0, "lr", value=HUGE_INTEGER), ""),
    **{
        f"numpy-{said}-{dtype}": (put("groups", 0, "lr", value={"numpy": said, "dtype": dtype}), "")
        for said, dtype in [("1e9", "float16"), ("x", "float32"), ("1", "object"), (0.5, "float64")]
    },
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(name):
    change, reason = LIES[name]
    body = good.body()
    change(body)
    with pytest.raises(ManifestError, match=rf"^{PATH}: contradictory content .*{reason}"):
        decode(good.manifest(body), PATH)


def test_parts_are_one_for_each_directory_and_those_of_its_digests():
    body = good.two_drives()
    assert decode(good.manifest(body), PATH).parts[0].name == "part-1"
    for num_parts in (0, 2):
        wrong = {**body, "parts": body["parts"] * num_parts}
        with pytest.raises(ManifestError, match=f"{num_parts} parts for 2 directories"):
            decode(good.manifest(wrong), PATH)
    body["parts"][0]["digest"] = "0" * 32
    with pytest.raises(ManifestError, match="the parts on other drives are not those"):
        decode(good.manifest(body), PATH)


# Room


def test_it_fits_its_room_to_the_last_byte():
    num_bytes = len(a_manifest().encode(RESERVED).rstrip())
    fitting = a_manifest().encode(num_bytes + 1)
    assert len(fitting) == num_bytes + 1
    assert decode(fitting, PATH) == a_manifest()
    with pytest.raises(OffloadError, match=f"needs {num_bytes + 1} bytes, but {num_bytes} "):
        a_manifest().encode(num_bytes)


def long_names() -> Layout:
    name = "\N{SNOWMAN}" * 60
    model = tuple(
        ModelTensor(f"{name}{n}", "U8", (1,), tuple(f"{name}{n}.{k}" for k in range(3)))
        for n in range(300)
    )
    return Layout((), model, 1024)


def many_arrays():
    arrays = tuple(f"array_{number:02}".ljust(40, "x") for number in range(12))
    specs = tuple(ParameterSpec(f"w{number}", "F32", (8,), 0, arrays) for number in range(500))
    return Layout(specs, tuple(ModelTensor(spec.name, "F32", (8,)) for spec in specs), 1024)


def many_chunks() -> Layout:
    shape = (5000 * 1024,)
    spec = ParameterSpec("w", "BF16", shape, 0, synthetic.ARRAYS)
    return Layout((spec,), (ModelTensor("w", "BF16", shape),), 1024)


@pytest.mark.parametrize("make", [long_names, many_arrays, many_chunks])
def test_a_manifest_fits_the_room_of_its_layout(make):
    layout = make()
    written = a_manifest(
        layout=layout,
        scalars=((("step", "f32", 1e30),),) * len(layout.parameters),
        digests=synthetic.digests_of(layout),
        model_digests=("0" * 16,) * num_model_blocks(layout),
    )
    assert decode(written.encode(reserved_bytes(layout, 1)), PATH) == written


def test_boxes_of_the_model_have_room_if_there_are_owners():
    """All boxes are of one tensor. A store without owners has no room for them."""
    name, shape = "\N{SNOWMAN}" * 100, (1000,)
    cuts = [Cut(shape, Box((at,), (1,))) for at in range(1000)]
    specs = tuple(ParameterSpec(name, "F32", cut.box.sizes, 0, ("exp_avg",), cut) for cut in cuts)
    layout = Layout(specs, (ModelTensor(name, "F32", shape),), 1024)
    boxes = [ModelBox(name, cut.box, ("0" * 16,)) for cut in cuts]
    more = reserved_bytes(layout, 1, ["/data"]) - reserved_bytes(layout, 1)
    assert more > len(json.dumps(encode_model_boxes(boxes)))


# Limits: a reader knows nothing of a manifest before it has parsed it, because its digest is inside


def test_the_limits_are_those_of_the_page():
    assert (MAX_MANIFEST_BYTES, MAX_CONTENT_BYTES, MAX_VALUES) == (128 << 20, 64 << 20, 5_000_000)


@pytest.mark.parametrize("limit", ["MAX_CONTENT_BYTES", "MAX_VALUES"])
def test_it_may_be_as_large_as_readers_accept(limit, monkeypatch):
    described = a_manifest()
    text = described.encode(RESERVED).rstrip()
    size = len(text) if limit == "MAX_CONTENT_BYTES" else num_marks(text)
    monkeypatch.setattr(document, limit, size)
    assert described.encode(RESERVED).rstrip() == text
    monkeypatch.setattr(document, limit, size - 1)
    with pytest.raises(OffloadError, match=r"at most .* are read: raise Options\(chunk_bytes"):
        described.encode(RESERVED)


def test_one_that_readers_would_refuse_gets_no_room(monkeypatch):
    """A chunk has one value here; the parameter and the tensor have 20 values together."""

    def layout_of(num_chunks):
        shape = (1024 * num_chunks,)
        spec = ParameterSpec("w", "F32", shape, 0, ("exp_avg",))
        return Layout((spec,), (ModelTensor("w", "F32", shape),), 1024)

    monkeypatch.setattr(manifest, "MAX_VALUES", 1000)
    assert reserved_bytes(layout_of(980), 1) <= MAX_MANIFEST_BYTES
    with pytest.raises(OffloadError, match=r"1001 values, at most 1000 .*chunk_bytes"):
        reserved_bytes(layout_of(981), 1)
    nothing = Layout((), (), 1024)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", reserved_bytes(nothing, 1))
    with pytest.raises(OffloadError, match=r"bytes, at most .* are read"):
        reserved_bytes(nothing, 2)


def test_more_than_the_limits_is_refused_before_it_is_parsed(tmp_path):
    assert len(parse_json(b"[1,1,1,1]", max_values=4)) == 4
    with pytest.raises(ValueError, match="about 5 values, at most 4 are read"):
        parse_json(b"[1,1,1,1,this is no JSON", max_values=4)
    directory = tmp_path / "step-00000002"
    directory.mkdir()

    def refused(make):
        make(directory / "manifest.json")
        with pytest.raises(CheckpointError) as caught:
            offload.open_checkpoint(directory)
        return str(caught.value)

    num_bytes = MAX_CONTENT_BYTES + 1
    said = refused(lambda path: path.write_bytes(b"x" * num_bytes + b" " * 99))  # padding is none
    assert f"{num_bytes} bytes of content, expected at most {MAX_CONTENT_BYTES}" in said
    said = refused(lambda path: os.truncate(path, MAX_MANIFEST_BYTES + 1))
    assert f"expected a file of at most {MAX_MANIFEST_BYTES}" in said


CHILD = """
import resource, sys
import offload
from offload.errors import CheckpointError

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    offload.open_checkpoint(sys.argv[1])
except CheckpointError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, str(error)[:300])
"""


def test_small_values_which_take_more_memory_than_text_are_refused_in_little(tmp_path):
    """In a process of its own, whose memory is compared: it is read twice, and copied once."""
    head, unit, tail = b'{"format":1,"digest":"x","body":{"a":[', b"[],", b"0]}}"
    count = (MAX_CONTENT_BYTES - len(head) - len(tail)) // len(unit)
    directory = tmp_path / "step-00000002"
    directory.mkdir()
    (directory / "manifest.json").write_bytes(head + unit * count + tail)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory)], capture_output=True, text=True, check=True
    )
    grown_kib, _, message = done.stdout.partition(" ")
    assert f"at most {MAX_VALUES} are read" in message
    assert str(tmp_path) in message
    assert int(grown_kib) << 10 < 6 * MAX_MANIFEST_BYTES
