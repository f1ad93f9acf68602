"""What a load makes of tensors that are more than their memory, and of those that it must not disturb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

from distckpt import CheckpointError, Sharded, StorageReader, StorageWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.device_mesh import DeviceMesh

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning"),
]

VALUES = torch.tensor([[0.0, 2.0, 0.0], [3.0, 4.0, 0.0]])
OTHERS = torch.tensor([[0.0, 0.0, 6.0], [0.0, 0.0, 0.0]])


class Kind(NamedTuple):
    """How a tensor is made of values to be saved, and how one to be loaded into."""

    saved: Callable[[torch.Tensor], torch.Tensor]
    target: Callable[[torch.Tensor], torch.Tensor]


def quantized(values: torch.Tensor, scale: float = 0.5, zero_point: int = 3) -> torch.Tensor:
    return torch.quantize_per_tensor(values, scale, zero_point, torch.quint8)


def by_channel(values: torch.Tensor, scale: float = 0.5, zero_point: float = 3) -> torch.Tensor:
    scales = torch.tensor([scale, scale / 2])
    zero_points = torch.tensor([zero_point, zero_point + 1])
    return torch.quantize_per_channel(values, scales, zero_points, 0, torch.quint8)


def twice(values: torch.Tensor) -> torch.Tensor:
    indices = torch.cat([values.nonzero(), values.nonzero()]).t()
    half = values[values != 0] / 2
    return torch.sparse_coo_tensor(indices, torch.cat([half, half]), values.shape, check_invariants=True)


KINDS = {
    "coo": Kind(torch.Tensor.to_sparse, torch.Tensor.to_sparse),
    "coo, not coalesced": Kind(twice, torch.Tensor.to_sparse),
    "coo with dense rows": Kind(lambda values: values.to_sparse(1), torch.Tensor.to_sparse),
    "csr": Kind(torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csr),
    "csc": Kind(torch.Tensor.to_sparse_csc, torch.Tensor.to_sparse_csc),
    "bsr": Kind(lambda values: values.to_sparse_bsr((2, 1)), lambda values: values.to_sparse_bsr((1, 3))),
    "bsc": Kind(lambda values: values.to_sparse_bsc((1, 1)), lambda values: values.to_sparse_bsc((1, 1))),
    "quantized": Kind(quantized, lambda values: quantized(values, 1.0, 0)),
    "quantized by channel": Kind(by_channel, lambda values: by_channel(values, 1.0, 0)),
    "quantized by channel, zero points between": Kind(
        lambda values: by_channel(values, 0.5, 1.5), lambda values: by_channel(values, 1.0, 0.5)
    ),
    "quantized, transposed": Kind(quantized, lambda values: quantized(values.t().contiguous(), 1.0, 0).t()),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def save(path: Path, tensor: torch.Tensor) -> None:
    # torch's own writer does not save sparse tensors.
    with StorageWriter(path, ckpt_host_memory="16MiB") as writer:
        state_dict_saver.save({"m": {"t": tensor}}, storage_writer=writer, no_dist=True)


def load(path: Path, target: torch.Tensor, planner: DefaultLoadPlanner | None = None) -> None:
    reader = StorageReader(path)
    state_dict_loader.load({"m": {"t": target}}, storage_reader=reader, planner=planner, no_dist=True)


def error_of_load(path: Path, target: torch.Tensor, planner: DefaultLoadPlanner | None = None) -> str:
    with pytest.raises(CheckpointException) as caught:
        load(path, target, planner)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, CheckpointError)
    assert "'m.t'" in str(error)
    assert "\n" not in str(error)
    return str(error)


def facts(tensor: torch.Tensor) -> list[Any]:
    """Return all that `tensor` is, for comparison."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        what: list[Any] = [tensor.qscheme(), tensor.int_repr().tolist()]
        if tensor.qscheme() is torch.per_tensor_affine:
            return [*what, tensor.q_scale(), tensor.q_zero_point()]
        return [*what, tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()]
    if tensor.layout is torch.sparse_coo:
        members = [tensor._indices(), tensor._values()]
        return [tensor.is_coalesced(), *[member.tolist() for member in members]]
    if tensor.layout is not torch.strided:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        members = [
            tensor.crow_indices() if by_row else tensor.ccol_indices(),
            tensor.col_indices() if by_row else tensor.row_indices(),
            tensor.values(),
        ]
        return [tensor.layout, *[member.tolist() for member in members]]
    return [tensor.tolist()]


def test_what_says_how_values_lie_and_what_they_mean_is_loaded(tmp_path: Path, kind: Kind) -> None:
    saved = kind.saved(VALUES)
    save(tmp_path, saved)
    for start in (OTHERS, VALUES):
        target = kind.target(start)
        load(tmp_path, target)
        assert facts(target) == facts(saved)


@pytest.mark.parametrize("name", ["coo", "csr"])
def test_parameters_that_require_grad_remain_leaves(tmp_path: Path, name: str) -> None:
    saved = KINDS[name].saved(VALUES)
    save(tmp_path, saved)
    target = torch.nn.Parameter(KINDS[name].target(OTHERS))
    load(tmp_path, target)
    assert facts(target) == facts(saved)
    assert target.requires_grad
    assert target.is_leaf
    target.to_dense().sum().backward()  # type: ignore[no-untyped-call]
    assert target.grad is not None


@pytest.mark.parametrize("made_in", [False, True])
@pytest.mark.parametrize("loaded_in", [False, True])
@pytest.mark.parametrize("name", ["coo", "csr", "quantized"])
def test_inference_mode(tmp_path: Path, name: str, made_in: bool, loaded_in: bool) -> None:
    kind = KINDS[name]
    saved = kind.saved(VALUES)
    save(tmp_path, saved)
    with torch.inference_mode(made_in):
        target = kind.target(OTHERS)
    with torch.inference_mode(loaded_in):
        load(tmp_path, target)
    assert facts(target) == facts(saved)
    assert target.is_inference() == made_in
    if target.is_sparse:
        # Or a training could not go on with it.
        assert target._values().is_inference() == made_in


@pytest.mark.parametrize("name", ["coo", "quantized", "quantized by channel"])
def test_what_a_module_has_registered(tmp_path: Path, name: str) -> None:
    """`state_dict` hands out aliases of buffers, which `load_state_dict` copies from."""

    def make(tensor: torch.Tensor) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("t", tensor)
        return module

    saved = KINDS[name].saved(VALUES)
    save(tmp_path, saved)
    module = make(KINDS[name].target(OTHERS))
    state_dict_loader.load({"m": module}, storage_reader=StorageReader(tmp_path), no_dist=True)
    buffer: Any = module.t
    assert facts(buffer) == facts(saved)


def test_what_lies_within_a_subclass(tmp_path: Path) -> None:
    make: Any = TwoTensor
    with torch.serialization.safe_globals([TwoTensor]):
        save(tmp_path, make(VALUES.to_sparse(), VALUES.to_sparse() * 2))
        target = make(OTHERS.to_sparse(), OTHERS.to_sparse())
        load(tmp_path, target)
    assert torch.equal(target.a.to_dense(), VALUES)
    assert torch.equal(target.b.to_dense(), VALUES * 2)


def test_a_dtensor_hands_out_what_it_holds(tmp_path: Path, mesh: DeviceMesh) -> None:
    def make(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)

    save(tmp_path, quantized(VALUES))
    target = make(quantized(OTHERS, 1.0, 0))
    load(tmp_path, target)
    assert facts(target._local_tensor) == facts(quantized(VALUES))


def test_more_elements_than_there_is_memory(tmp_path: Path) -> None:
    shape = (10_000_000, 10_000_000)
    place, value = torch.tensor([[5], [7]]), torch.tensor([3.0])
    saved = torch.sparse_coo_tensor(place, value, shape, check_invariants=True)
    save(tmp_path, saved)
    target = torch.sparse_coo_tensor(place[:, :0], value[:0], shape, check_invariants=True)
    load(tmp_path, target)
    assert facts(target) == facts(saved)


def rows(values: torch.Tensor, scale: float) -> Sharded:
    first, second = quantized(values[:1], scale), quantized(values[1:], scale)
    return Sharded(values.shape, [((0, 0), first), ((1, 0), second)])


def test_parts_of_a_quantized_tensor(tmp_path: Path) -> None:
    """A part takes values, and leaves scale and zero point to the whole."""
    save(tmp_path, rows(VALUES, 0.5))
    target = quantized(OTHERS, 0.5)
    load(tmp_path, target)
    assert facts(target) == facts(quantized(VALUES, 0.5))
    assert "in parts" in error_of_load(tmp_path, quantized(OTHERS, 1.0))


class Aliases(DefaultLoadPlanner):
    """Hands out tensors that share the memory of those in the state."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor.detach()


def test_a_planner_that_hands_out_aliases(tmp_path: Path, kind: Kind) -> None:
    """The state has what was saved, or there is an error."""
    saved = kind.saved(VALUES)
    save(tmp_path, saved)
    target = kind.target(OTHERS)
    if target.is_sparse or target.is_quantized:
        assert "view" in error_of_load(tmp_path, target, Aliases())
    else:
        load(tmp_path, target, Aliases())
        assert facts(target) == facts(saved)


UNLIKE: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "sparse into dense": lambda: (VALUES.to_sparse(), OTHERS.clone()),
    "dense into sparse": lambda: (VALUES, OTHERS.to_sparse()),
    "csr into coo": lambda: (VALUES.to_sparse_csr(), OTHERS.to_sparse()),
    "csr into csc": lambda: (VALUES.to_sparse_csr(), OTHERS.to_sparse_csc()),
    "quantized into dense": lambda: (quantized(VALUES), OTHERS.clone()),
    "quantized into quantized by channel": lambda: (quantized(VALUES), by_channel(OTHERS)),
    "into what overlaps": lambda: (VALUES, torch.zeros(3).expand(2, 3)),
    "parts into sparse": lambda: (rows(VALUES, 0.5), OTHERS.to_sparse()),
}


@pytest.mark.parametrize("case", list(UNLIKE))
def test_what_cannot_be_copied_is_named(tmp_path: Path, case: str) -> None:
    saved, target = UNLIKE[case]()
    save(tmp_path, saved)
    assert "cannot be copied" in error_of_load(tmp_path, target)
