"""`bench.kernel` on a CPU, all but the time: a device is lent for too short to find mistakes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from bench import device_calls, kernel
from bench._harness import BenchError, Result
from offload.device.kernels import digest
from offload.device.kernels.launches import form_of_run
from tests.device.test_update_arithmetic import group_of


def test_every_kernel_is_compared_with_a_copy_of_as_many_bytes(tmp_path, kernels, digests):
    launched: Counter[str] = Counter()

    def update(*arguments, **options) -> None:
        launched["update"] += 1
        kernels.update_run(*arguments, **options)

    def leaf_digests(data, workspace, out) -> None:
        launched["digests"] += 1
        digest._check(data, workspace, out)
        found = digests.leaf_digests(data)
        out.copy_(torch.frombuffer(bytearray(found), dtype=torch.int64))

    def seconds(work: Callable[[], object], num_launches: int) -> float:
        assert num_launches == 2
        work()
        return 1e-3

    forms = [
        form_of_run(torch.optim.AdamW, group, kernel._block(32, *form, torch.device("cpu")))
        for form in kernel._FORMS.values()
        for group in (group_of("AdamW", {}), group_of("AdamW", {}, fused=True))
    ]
    kernels.prepare(forms)  # all at once, which is much faster
    arguments = ["--quick", "--parameters", "4096", "--output", str(tmp_path)]
    args = kernel._arguments(["--directory", str(tmp_path), *arguments])
    result = Result("kernel", args, args.directory)
    # 4096 elements of the form with the most instructions take 1.3 times as long as the copy
    slowest = max(kernel.INSTRUCTIONS.values())
    bench = kernel.Bench(
        device=torch.device("cpu"),
        update=update,
        digests=leaf_digests,
        instructions_per_s=4096 * slowest / 1.3e-3,
        seconds=seconds,
    )
    kernel.measure(args, result, bench)
    assert launched == {"update": 8 * args.rounds, "digests": args.rounds}
    assert {tuple(claim["ratios"]) for claim in result.claims} == {(1.0,) * args.rounds}
    limits = {claim["numerator"].removesuffix("_s"): claim["limit"] for claim in result.claims}
    assert limits.keys() == {*kernel.INSTRUCTIONS, "digests"}
    assert limits.pop("digests") is None
    expected = {n: max(1 / 0.9, 1.3 * i / slowest) for n, i in kernel.INSTRUCTIONS.items()}
    assert limits == pytest.approx(expected)
    assert result.facts["exact_bytes_per_parameter"] == 30
    assert result.facts["split-int8 fused_bytes_per_parameter"] == 14.25


def test_pythons_time_is_measured_without_a_device(tmp_path):
    output = tmp_path / "results"
    device_calls.main(["--quick", "--directory", str(tmp_path), "--output", str(output)])
    (path,) = output.iterdir()
    claims = json.loads(path.read_text())["claims"]
    assert [claim["numerator"] for claim in claims] == [
        f"{state}_piece_s" for state in ("float32", "bfloat16", "int8")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_measurement_refuses_to_measure_something_else(tmp_path):
    with pytest.raises(BenchError, match="no CUDA device"):
        kernel.main(["--quick", "--directory", str(tmp_path), "--output", str(tmp_path)])
