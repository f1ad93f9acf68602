"""Who writes what of a state that several ranks have: worked out by each of them, without asking another.

A mesh says which ranks hold the same chunks of a DTensor. Of all else, called plain here, nothing says who
has it, too: each rank writes all of its own, until a save has shown what the ranks have in common.

Invariants:
    * Ranks that share items agree on every one of them, or the save is not published: see `Shares`.
    * A rank leaves to others nothing but what it shares with them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from distckpt.errors import StagingError
from distckpt.manifest import plan_digest
from distckpt.plan import share_of
from distckpt.planner import local_rows, narrow_item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh

    from distckpt.manifest import PartialManifest

    _Place = tuple[str, tuple[int, ...] | None]


class Common(NamedTuple):
    """What plain items participants have in common, as a save has shown.

    Attributes:
        digests: Of the plain items of each participant.
        classes: Participants that have the same, as text, and names and offsets of these items; None: all of
            theirs.
    """

    digests: tuple[str, ...]
    classes: tuple[tuple[str, frozenset[_Place] | None], ...]

    @property
    def digest(self) -> str:
        """Digest of all of this."""
        classes = sorted(
            (text, None if places is None else sorted(places, key=str)) for text, places in self.classes
        )
        return hashlib.sha256(repr((self.digests, classes)).encode("utf-8", "surrogatepass")).hexdigest()


class Rules(NamedTuple):
    """By what a rank works out what it writes.

    Attributes:
        ranks: All participants, as ranks of the job.
        rank: This one, as rank of the job.
        is_parallel: Whether those that have the same share the writing; else the first of them writes it.
        trusts_meshes: Whether ranks that a mesh says hold the same are taken to do so.
        common: What plain items they have in common; None if that is unknown.
        splits: Whether what several have may be split by rows; else each item is written by one of them.
    """

    ranks: tuple[int, ...]
    rank: int
    is_parallel: bool = True
    trusts_meshes: bool = True
    common: Common | None = None
    splits: bool = True


class Shares(NamedTuple):
    """What a rank has taken for granted of the others; for its manifest, where it can be checked.

    Attributes:
        plain: Digest of its plain items.
        relies: `Common.digest`, if it has left plain items to others; else "".
        classes: Participants that hold the same chunks by their meshes, as text, and the digest of these.
    """

    plain: str = ""
    relies: str = ""
    classes: tuple[tuple[str, str], ...] = ()


class Piece(NamedTuple):
    """An item, or some of its rows, that this rank writes.

    Attributes:
        item: What torch calls it.
        whole: The item that it is some rows of, or itself.
        rows: First row and the one after the last of the local tensor; None for all of it.
        is_plain: Whether no mesh says who else has it.
        part: Which part of the local tensor it is, of one that was cut along a grid; None for all of it.
        grid: The shape of a chunk, if there is a grid.
    """

    item: WriteItem
    whole: WriteItem
    rows: tuple[int, int] | None = None
    is_plain: bool = True
    part: tuple[slice, ...] | None = None
    grid: tuple[int, ...] | None = None

    @property
    def plain_rows(self) -> int | None:
        """By how many rows it could be shared if others turn out to have it; None if a mesh says who has."""
        return local_rows(self.whole)[1] if self.is_plain else None


def divide(
    items: Sequence[WriteItem], value_of: Callable[[str], Any], rules: Rules
) -> tuple[list[Piece], Shares]:
    """Return what this rank writes of `items`, in their order, and what it relies upon.

    Args:
        items: All that it has.
        value_of: Returns the value of an entry by its fqn.
        rules: The rules.

    Raises:
        StagingError: No participant has one of the chunks of a DTensor.
    """
    if len(rules.ranks) == 1:
        return [Piece(item, item) for item in items], Shares()
    plain: list[int] = []
    classes: dict[tuple[int, ...], list[int]] = {}
    pieces: dict[int, Piece] = {}
    holders_of: dict[Any, tuple[int, ...]] = {}
    for number, item in enumerate(items):
        holders: tuple[int, ...] = ()
        value = value_of(item.index.fqn) if item.type is WriteItemType.SHARD else None
        if isinstance(value, DTensor):
            key = (id(value.device_mesh), value.placements)
            if key not in holders_of:
                holders_of[key] = _holders(value.device_mesh, value.placements, item.index.fqn, rules)
            holders = holders_of[key]
        if len(holders) < 2 or not rules.trusts_meshes:
            plain.append(number)
        else:
            classes.setdefault(holders, []).append(number)
    told = []
    for holders, numbers in classes.items():
        ordered = _ordered(items, numbers)
        told.append((_as_text([rules.ranks.index(rank) for rank in holders]), _digest(items, ordered, rules)))
        member = holders.index(rules.rank)
        pieces |= _share(items, ordered, len(holders), member, rules, is_plain=False)
    digest = _digest(items, _ordered(items, plain), rules)
    place = rules.ranks.index(rules.rank)
    common = rules.common
    relies = ""
    pieces |= {number: Piece(items[number], items[number]) for number in plain}
    for text, places in () if common is None or common.digests[place] != digest else common.classes:
        members = members_in(text)
        if place in members:
            assert common is not None
            relies = common.digest
            same = [number for number in plain if places is None or _place(items[number]) in places]
            for number in same:
                del pieces[number]
            ordered = _ordered(items, same)
            member = members.index(place)
            pieces |= _share(items, ordered, len(members), member, rules, is_plain=True)
    return [pieces[number] for number in sorted(pieces)], Shares(digest, relies, tuple(told))


def find_common(manifests: Sequence[PartialManifest]) -> Common:
    """Return what plain items the participants have in common, from a save in which each wrote all it has.

    Args:
        manifests: In the order of the participants.
    """
    digests = tuple(str(manifest.head["shares"]["plain"]) for manifest in manifests)
    holders: dict[tuple[Any, ...], list[int]] = {}
    counts: list[int] = []
    tables: dict[str, list[tuple[Any, ...]]] = {}
    for at, (manifest, digest) in enumerate(zip(manifests, digests, strict=True)):
        if digest not in tables:
            table = json.loads(manifest.items)
            tables[digest] = [
                (fqn, None if offset is None else tuple(offset), str(size), str(chunk_size), dtype, rows)
                for fqn, offset, (size, chunk_size, dtype, _, _, rows) in zip(
                    table["fqns"], table["chunks"], table["entries"], strict=True
                )
                if rows is not None
            ]
        for item in tables[digest]:
            holders.setdefault(item, []).append(at)
        counts.append(len(tables[digest]))
    places: dict[tuple[int, ...], set[_Place]] = {}
    for item, members in holders.items():
        if len(members) > 1:
            places.setdefault(tuple(members), set()).add(item[:2])
    return Common(
        digests,
        tuple(
            (
                _as_text(members),
                None if all(counts[at] == len(found) for at in members) else frozenset(found),
            )
            for members, found in places.items()
        ),
    )


def common_to_json(common: Common) -> dict[str, Any]:
    """Return `common` as plain values, small where many ranks have the same."""
    return {
        "digests": [[digest, len(list(same))] for digest, same in itertools.groupby(common.digests)],
        "classes": [[text, None if places is None else list(places)] for text, places in common.classes],
    }


def common_from_json(fields: Mapping[str, Any]) -> Common:
    """Return what `common_to_json` was given."""
    return Common(
        tuple(digest for digest, count in fields["digests"] for _ in range(count)),
        tuple(
            (
                text,
                None
                if places is None
                else frozenset((fqn, None if at is None else tuple(at)) for fqn, at in places),
            )
            for text, places in fields["classes"]
        ),
    )


def members_in(text: str) -> list[int]:
    """Return the positions of the participants that `text`, of `Shares.classes`, stands for."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _as_text(places: Sequence[int]) -> str:
    """Return positions as text: runs of them by their first and last."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _share(
    items: Sequence[WriteItem],
    numbers: Sequence[int],
    members: int,
    member: int,
    rules: Rules,
    *,
    is_plain: bool,
) -> dict[int, Piece]:
    """Return, by number, the part of `member` in the items `numbers`, which `members` ranks have.

    Objects are the first member's: under one name each rank may have its own.
    """
    if members == 1 or not rules.is_parallel:
        mine = numbers if member == 0 else ()
        return {number: Piece(items[number], items[number], None, is_plain) for number in mine}
    tensors = [number for number in numbers if items[number].type is not WriteItemType.BYTE_IO]
    pieces = {}
    if member == 0:
        blobs = [number for number in numbers if items[number].type is WriteItemType.BYTE_IO]
        pieces = {number: Piece(items[number], items[number], None, is_plain) for number in blobs}
    sizes = [local_rows(items[number]) for number in tensors]
    if not rules.splits:
        sizes = [(nbytes, 0) for nbytes, _ in sizes]
    for at, first, stop in share_of(sizes, members, member):
        whole, rows = items[tensors[at]], sizes[at][1]
        if rows < 2 or (first, stop) == (0, rows):
            pieces[tensors[at]] = Piece(whole, whole, None, is_plain)
        else:
            pieces[tensors[at]] = Piece(narrow_item(whole, first, stop), whole, (first, stop), is_plain)
    return pieces


def _place(item: WriteItem) -> _Place:
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def _ordered(items: Sequence[WriteItem], numbers: Sequence[int]) -> list[int]:
    """Return `numbers` in the order of their items' names, which is the same on all ranks."""
    return sorted(numbers, key=lambda number: (items[number].index.fqn, items[number].index.offset or ()))


def _digest(items: Sequence[WriteItem], numbers: Sequence[int], rules: Rules) -> str:
    """Return a digest of items and of how they are shared: a rank with another setting has not the same."""
    chosen = [items[number] for number in numbers]
    kinds = [
        (
            item.index.offset,
            data and (data.chunk.sizes, data.size, data.properties.dtype),
            local_rows(item)[1],
        )
        for item in chosen
        for data in [item.tensor_data]
    ]
    names = [item.index.fqn for item in chosen]
    return plan_digest([str(rules.is_parallel), *names], [None, *kinds])[:32]


def _holders(mesh: DeviceMesh, placements: Sequence[Any], fqn: str, rules: Rules) -> tuple[int, ...]:
    """Return the participants that hold the chunk that this rank holds, in the order of the mesh.

    Raises:
        StagingError: No participant has one of its chunks.
    """
    split = [dim for dim, placement in enumerate(placements) if hasattr(placement, "dim")]
    copied = [dim for dim in range(len(placements)) if dim not in split]
    # One row for each chunk, one column for each of its copies.
    ranks = mesh.mesh.permute(*split, *copied)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "torch plans nothing for a rank outside the mesh"
    participants = set(rules.ranks)
    rows: list[list[int]] = ranks.reshape(-1, ranks.shape[len(split) :].numel()).tolist()
    for row in rows:
        if participants.isdisjoint(row):
            raise StagingError(
                f"{fqn!r} has a chunk that no participant holds: rank {row[0]} of its mesh is none of "
                f"{_first(rules.ranks)}"
            )
    own = ranks[tuple(coordinate[dim] for dim in split)].reshape(-1).tolist()
    return tuple(rank for rank in own if rank in participants)


def _first(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def shares_from(fields: Mapping[str, Any]) -> Shares:
    """Return what a manifest says that its rank relies upon."""
    classes = tuple((str(members), str(digest)) for members, digest in fields.get("classes", ()))
    return Shares(str(fields.get("plain", "")), str(fields.get("relies", "")), classes)
