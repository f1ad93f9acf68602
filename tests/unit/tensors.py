"""Tensors of every layout, and the bytes that a file must hold of them, by way of torch alone."""

from __future__ import annotations

import ctypes

import torch
from hypothesis import strategies as st

DTYPES = [torch.uint8, torch.int32, torch.float64, torch.complex64, torch.bfloat16, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a strided tensor: any order of dims, with holes, with overlaps, empty, 0-dim, conj or neg."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(1, 6 ** len(shape) + 1).to(dtype)
    tensor = base[: torch.Size(shape).numel()].reshape(shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        kind = draw(st.sampled_from(["as it is", "every other", "offset", "expanded"]))
        if kind == "every other":
            tensor = tensor[..., ::2]
        elif kind == "offset":
            tensor = tensor[1:]
        elif kind == "expanded":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if dtype.is_complex and draw(st.booleans()):
        tensor = draw(st.sampled_from([torch.conj(tensor), torch.conj(tensor).imag]))
    return tensor


def payload_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of `tensor` in contiguous order."""
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def memory_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a dense tensor as they lie in its storage."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
