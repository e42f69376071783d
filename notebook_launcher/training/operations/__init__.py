"""Operations on nested tensors: what one process does to a batch, and what all do together."""

from __future__ import annotations

from notebook_launcher.training.operations.checking import (
    DistributedOperationException as DistributedOperationException,
)
from notebook_launcher.training.operations.collectives import broadcast as broadcast
from notebook_launcher.training.operations.collectives import broadcast_object_list as broadcast_object_list
from notebook_launcher.training.operations.collectives import copy_tensor_to_devices as copy_tensor_to_devices
from notebook_launcher.training.operations.collectives import gather as gather
from notebook_launcher.training.operations.collectives import gather_object as gather_object
from notebook_launcher.training.operations.collectives import pad_across_processes as pad_across_processes
from notebook_launcher.training.operations.collectives import pad_input_tensors as pad_input_tensors
from notebook_launcher.training.operations.collectives import reduce as reduce
from notebook_launcher.training.operations.nested import TensorInformation as TensorInformation
from notebook_launcher.training.operations.nested import concatenate as concatenate
from notebook_launcher.training.operations.nested import convert_to_fp32 as convert_to_fp32
from notebook_launcher.training.operations.nested import find_batch_size as find_batch_size
from notebook_launcher.training.operations.nested import find_device as find_device
from notebook_launcher.training.operations.nested import find_tensors as find_tensors
from notebook_launcher.training.operations.nested import get_data_structure as get_data_structure
from notebook_launcher.training.operations.nested import honor_type as honor_type
from notebook_launcher.training.operations.nested import initialize_tensors as initialize_tensors
from notebook_launcher.training.operations.nested import listify as listify
from notebook_launcher.training.operations.nested import recursively_apply as recursively_apply
from notebook_launcher.training.operations.nested import send_to_device as send_to_device
from notebook_launcher.training.operations.nested import slice_tensors as slice_tensors
