"""Operations on nested tensors: what one process does to a batch, and what all do together."""

from __future__ import annotations

from notebook_launcher.training.operations.checking import DistributedOperationException
from notebook_launcher.training.operations.collectives import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    pad_input_tensors,
    reduce,
)
from notebook_launcher.training.operations.nested import find_tensors, honor_type, recursively_apply
from notebook_launcher.training.operations.tensors import (
    TensorInformation,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    initialize_tensors,
    listify,
    send_to_device,
    slice_tensors,
)

__all__ = [
    "DistributedOperationException",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "find_tensors",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "initialize_tensors",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
