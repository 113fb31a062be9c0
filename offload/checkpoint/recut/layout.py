"""Boxes of a rank in terms of the boxes that the owners of a checkpoint have stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.checkpoint.state_owners import Reach, StateOwner, StoredBox, stored_boxes
from offload.errors import CheckpointError, MismatchError, RanksError
from offload.format._manifest_fields import ScalarValue
from offload.format.arrays import BLOCK_ELEMENTS
from offload.format.boxes import Box, Cut, hull
from offload.format.layout import Layout, ParameterSpec
from offload.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements that are neighbours both in a stored box and in a wanted one."""

    source: int
    """First element, counted from the first element of the stored box."""

    target: int
    """First element, counted from the first element of the wanted box."""

    num: int
    """Number of elements."""


@dataclass(frozen=True, slots=True, eq=False)
class Recut:
    """The state of a checkpoint as one rank wants it."""

    layout: Layout
    """Layout of the rank's boxes."""

    scalars: tuple[tuple[ScalarValue, ...] | None, ...]
    """For each parameter of the layout, its scalar state; None if it has no state yet."""

    stored: Mapping[str, Sequence[StoredBox]]
    """All stored boxes of each parameter, by the parameter's name."""

    split_blocks: frozenset[str] = frozenset()
    """Names of the parameters with 8-bit state of which a block here has elements of several stored
    blocks, so that it can only be encoded anew."""


def recut(
    path: str,
    manifest: Manifest,
    owners: Sequence[StateOwner],
    cuts: Mapping[str, Cut] | None,
    *,
    reencode: bool = False,
    reach: Reach | None = None,
    shares: Sequence[int] = (1,),
) -> Recut:
    """Describe the state of a checkpoint in the cut of one rank.

    Args:
        path: Directory of the checkpoint, for messages.
        manifest: Manifest of the checkpoint.
        owners: All owners of its state that are seen here.
        cuts: Box of each parameter that the rank steps, by name; None for whole parameters.
        reencode: Whether 8-bit state may be encoded anew where the cut divides its blocks.
        reach: What is seen here of a checkpoint, if that may be a part of it.
        shares: Shares of the drives in the layout of this rank; see `Layout.shares`.

    Raises:
        MismatchError: The rank's cut is not possible with this state; names the parameter.
        RanksError: The rank needs state that is not seen here; names the parameter.
        CheckpointError: The owners contradict each other.
    """
    stored = stored_boxes(owners)
    specs: list[ParameterSpec] = []
    scalars: list[tuple[ScalarValue, ...] | None] = []
    split: set[str] = set()
    for tensor in manifest.layout.model:
        found = stored.get(tensor.name, ())
        with_state = found if reach is None else tensor.name in reach.with_state
        if not with_state or (cuts is not None and tensor.name not in cuts):
            continue
        cut = Cut(tensor.shape, Box.whole(tensor.shape)) if cuts is None else cuts[tensor.name]
        if cut.shape != tensor.shape:
            raise MismatchError(
                f"{path}: {tensor.name!r} has the shape {list(tensor.shape)}, and the model has "
                f"{list(cut.shape)}: build the model as it was when the checkpoint was made"
            )
        if cuts is not None and not cut.box.num_elements:
            continue
        _require_cover(path, tensor.name, cut.box, found, reach)
        spec, scalar = _common(path, found)
        kept = None if cut.box.sizes == cut.shape else cut
        specs.append(replace(spec, shape=cut.box.sizes, cut=kept))
        scalars.append(scalar)
        if manifest.layout.state_dtype == "int8" and scalar is not None:
            box = _splitting_box(cut.box, found)
            if box is not None and not reencode:
                raise _splits(path, tensor.name, cut.box, box)
            if box is not None:
                split.add(tensor.name)
    first = manifest.layout
    layout = Layout(
        tuple(specs), first.model, first.chunk_elements, first.state_dtype, tuple(shares)
    )
    return Recut(layout, tuple(scalars), stored, frozenset(split))


def stretches(stored: Box, wanted: Box, part: Box) -> Iterator[Stretch]:
    """Yield the common elements of a stored box and a part of a wanted one."""
    common = stored.intersection(part)
    if common is not None:
        yield from _stretches(stored, wanted, common)


def _stretches(stored: Box, wanted: Box, common: Box) -> Iterator[Stretch]:
    num = common.num_elements
    (source, source_stop), (target, target_stop) = hull(stored, common), hull(wanted, common)
    if source_stop - source == num == target_stop - target:
        yield Stretch(source, target, num)
        return
    dim = next(d for d, size in enumerate(common.sizes) if size > 1)
    for offset in range(common.offsets[dim], common.stops[dim]):
        offsets = (*common.offsets[:dim], offset, *common.offsets[dim + 1 :])
        sizes = (*common.sizes[:dim], 1, *common.sizes[dim + 1 :])
        yield from _stretches(stored, wanted, Box(offsets, sizes))


def _common(
    path: str, found: Sequence[StoredBox]
) -> tuple[ParameterSpec, tuple[ScalarValue, ...] | None]:
    """Return what all owners of a parameter say of it; the shape and the cut are one owner's."""
    specs = [one.spec for one in found]
    scalars = [one.owner.scalars[one.index] for one in found]
    for one, spec, scalar in zip(found, specs, scalars, strict=True):
        if (spec.dtype, spec.group, spec.arrays, scalar) != (
            specs[0].dtype,
            specs[0].group,
            specs[0].arrays,
            scalars[0],
        ):
            raise CheckpointError(
                f"{path}: the owners {found[0].owner.number} and {one.owner.number} differ in "
                f"dtype, group, arrays or scalar state of {spec.name!r}: resume with as many "
                "ranks as it was made with, and the same sharding"
            )
    return specs[0], scalars[0]


def _require_cover(
    path: str, name: str, box: Box, found: Sequence[StoredBox], reach: Reach | None
) -> None:
    common = [one.box.intersection(box) for one in found]
    num = sum(one.num_elements for one in common if one is not None)
    if reach is not None and (num < box.num_elements or not found):
        raise out_of_reach(path, f"the state of {name!r} {box.notation()}", num, box)
    if num != box.num_elements:
        raise CheckpointError(
            f"{path}: the owners have stored {num} elements of {box.notation()} of {name!r}, "
            f"expected {box.num_elements}"
        )


def out_of_reach(path: str, what: str, num: int, box: Box) -> RanksError:
    """Return the error of a rank that needs more of a checkpoint than is seen on its host.

    Args:
        path: Directory of the checkpoint.
        what: What the rank needs, in words.
        num: Number of its elements that are seen.
        box: The elements.
    """
    return RanksError(
        f"{path} was made by other ranks, or in another sharding, and these ranks are on several "
        f"hosts: this one needs {what}, and its host sees {num} of these {box.num_elements} "
        "elements. Mount or move the directories that have the others there, and name them in "
        "directory=; or go on with as many ranks as made it, in the same sharding"
    )


def _splitting_box(box: Box, found: Sequence[StoredBox]) -> StoredBox | None:
    """Return a stored box whose blocks of 8-bit values do not go into the blocks of a wanted box.

    The values of a wanted block can be copied if they are all from one stored block: they then keep
    its scale.
    """
    for one in found:
        for run in stretches(one.box, box, box):
            first, last = run.source // BLOCK_ELEMENTS, run.source + run.num - 1
            if (
                run.target % BLOCK_ELEMENTS
                or (run.source % BLOCK_ELEMENTS and first != last // BLOCK_ELEMENTS)
                or (run.num % BLOCK_ELEMENTS and run.target + run.num != box.num_elements)
            ):
                return one
    return None


def _splits(path: str, name: str, box: Box, stored: StoredBox) -> MismatchError:
    return MismatchError(
        f"{path}: its 8-bit state has one scale for {BLOCK_ELEMENTS} neighbouring elements, and "
        f"the new cut of {name!r} ({box.notation()}; stored is {stored.box.notation()}) falls "
        "between such neighbours. Resume with as many ranks as it was made with, and the same "
        "sharding; or call restore(reencode=True) on every rank, which encodes this state anew, "
        "so that later results differ from those without the change"
    )
