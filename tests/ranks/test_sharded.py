"""Ranks of FSDP2 and tensor parallelism step their local shards, as torch does in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dying import dying

LIMIT_S = 300


def run(root: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Run `tests.ranks.sharded` on several ranks; return what each has found."""
    processes = [
        subprocess.Popen(
            dying(
                [sys.executable, "-m", "tests.ranks.sharded", *map(str, (root, rank, num_ranks))]
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("case", ["uneven", "momentum", "mixed", "columns"])
def test_local_shards_are_stepped_sealed_and_restored(case: str, two: list[dict[str, Any]]) -> None:
    for found in (rank[case] for rank in two):
        assert "error" not in found, found["error"]
        assert found["equal"] == [True] * 5
        assert found["restored"] == 3
        assert found["current"]


def test_uneven_and_empty_shards_are_stored_by_their_boxes(two: list[dict[str, Any]]) -> None:
    first, second = (rank["uneven"] for rank in two)
    assert first["sizes"] == [[4, 9], [4], [1, 7], [1]]
    assert second["sizes"] == [[3, 9], [3], [0, 7], [0]]
    assert first["names"] == ["0.weight[0:4, 0:9]", "0.bias[0:4,]", "1.weight", "1.bias"]
    assert second["names"] == ["0.weight[4:7, 0:9]", "0.bias[4:7,]"]


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_compressed_state_of_shards_has_the_bits_of_one_process(
    state_dtype: str, two: list[dict[str, Any]]
) -> None:
    for found in (rank[state_dtype] for rank in two):
        assert "error" not in found, found["error"]
        assert found["equal"] == [True] * 12


def test_what_has_no_single_box_is_refused_by_name(two: list[dict[str, Any]]) -> None:
    for found in (rank["refused"] for rank in two):
        assert "error" not in found, found["error"]
        assert "'partial' is a DTensor with the placement P" in found["partial"]
        assert "'apart' is a DTensor" in found["apart"]
        assert "several boxes, expected one. Shard dimension 0" in found["apart"]
        assert "'lies' is a DTensor of shape [4, 2]" in found["lies"]
        assert "the gradient of 'gradient' is a DTensor" in found["gradient"]
        assert "p.grad.redistribute" in found["gradient"]


def test_the_local_part_is_taken_anew_at_every_use(two: list[dict[str, Any]]) -> None:
    assert [rank["refused"]["anew"] for rank in two] == [[[5.0, 5.0], [5.0, 5.0]]] * 2


def test_boxes_on_meshes_of_two_dimensions_have_the_values_of_the_whole(
    four: list[dict[str, Any]],
) -> None:
    for rank in four:
        assert "error" not in rank["meshes"], rank["meshes"]["error"]
        for found in rank["meshes"].values():
            assert found["equal"]
            assert all(found["equal"])
            assert found["owned"] == four[0]["meshes"][_case(rank, found)]["owned"]


def _case(rank: dict[str, Any], found: dict[str, Any]) -> str:
    return next(case for case, other in rank["meshes"].items() if other is found)


def test_replicas_on_a_mesh_have_one_owner(four: list[dict[str, Any]]) -> None:
    owned = four[0]["meshes"]["replicated"]["owned"]
    assert {tuple(holders) for *_, holders in owned} == {(0, 2), (1, 3)}
    assert {owner for _, _, owner, _ in owned} == {0, 1, 2, 3}
    odd = {box for name, box, *_ in owned if name == "odd.weight"}
    assert odd == {"[0:4, 0:5]", "[4:7, 0:5]"}


def test_tensor_parallelism_beneath_fsdp_gives_the_norm_to_one_of_its_holders(
    four: list[dict[str, Any]],
) -> None:
    found = four[0]["meshes"]["both"]
    assert "_StridedShard" in found["placements"]["up.weight"]
    boxes = {(name, box): (owner, holders) for name, box, owner, holders in found["owned"]}
    assert {holders for (name, _), (_, holders) in _tuples(boxes) if name == "up.weight"} == {
        (0,),
        (1,),
        (2,),
        (3,),
    }
    assert {holders for (name, _), (_, holders) in _tuples(boxes) if name == "norm.weight"} == {
        (0, 1),
        (2, 3),
    }


def _tuples(boxes: dict[Any, Any]) -> list[Any]:
    return [(key, (owner, tuple(holders))) for key, (owner, holders) in boxes.items()]
