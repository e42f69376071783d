"""Tensor parallelism: the layers of a plan are cut over the ranks of a group, which compute them together.

A plan gives modules by name, `*` for any number, each with a style: `"colwise"` cuts a linear layer's outputs,
`"rowwise"` its inputs. Models of transformers bring one (`model.tp_plan`). torch's `parallelize_module` carries it out.
Layers that the plan does not name are whole on every rank of the group; they compute the same there.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.parallelism.wrapping import places_of, return_own_tensors
from notebook_launcher.training.random import capture_rng_states, restore_rng_states
from notebook_launcher.training.spread_tensors import is_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

CUT_OUTPUTS = ("colwise", "colwise_gather_output", "colwise_rep")
CUT_INPUTS = ("rowwise", "rowwise_rep", "rowwise_split_input")
EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
WHOLE = "replicate"
STYLES = (*CUT_OUTPUTS, *CUT_INPUTS, *EMBEDDINGS, WHOLE)
"""The styles of transformers' plans that torch has; the others belong to experts, fused weights and quantisation."""
HEADS = ("num_attention_heads", "num_key_value_heads")

Place = tuple[torch.nn.Module, str]
"""A module, and the name that one of its parameters has there."""


def apply_plan(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any] | None,
    *,
    settle: Callable[[torch.nn.Module], object],
) -> None:
    """Cut the layers of a plan over a group of ranks, which call this together.

    A model whose parameters are cut already, as transformers loads it on request, is left as it is.

    Args:
        model: The model.
        mesh: The ranks of the group.
        plan: Names of modules with their styles: text, or torch's `ParallelStyle`. None: the model's own plan.
        settle: Called with each module before it is cut, to give it the same weights on all ranks.

    Raises:
        ValueError: The model has no plan, the plan names nothing in the model or an unknown style, or a layer cannot be
            cut into equal parts.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    if any(is_spread(parameter) for parameter in model.parameters()):
        return
    size = mesh.size()
    if plan is None:
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not plan:
            raise ValueError(
                f"tp_size: {type(model).__name__} has no plan for tensor parallelism. Models of transformers have one "
                'as `tp_plan`; for others write ParallelismConfig(tp_size=..., tp_plan={"layers.*.up": "colwise", '
                '"layers.*.down": "rowwise"}).'
            )
    chosen = _expand(model, plan)
    _check_heads(model, chosen, size)
    found: dict[int, list[Place]] = {}
    for module, name, parameter in places_of(model):
        found.setdefault(id(parameter), []).append((module, name))
    for name, style in chosen.items():
        module = model.get_submodule(name)
        if isinstance(style, str):
            _check_sizes(name, module, style, size)
        settle(module)
        made = _make_style(style) if isinstance(style, str) else style
        if made is not None:
            parallelize_module(module, mesh, made)
            return_own_tensors(module)
    _tie_again([places for places in found.values() if len(places) > 1])


def share_generators(group: Any) -> None:
    """Give the ranks of a group the random numbers of its first rank from now on.

    Each of them computes the layers that are not cut, so that dropout must drop the same elements.
    """
    states = [capture_rng_states()]
    dist.broadcast_object_list(states, src=dist.get_global_rank(group, 0), group=group)
    by_device = states[0].pop("torch_cuda_manual_seed", None)
    if by_device is not None:
        torch.cuda.set_rng_state(by_device[states[0]["torch_cuda_device"]])
    restore_rng_states(states[0])


def _expand(model: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the style of each module that the plan names, outermost names first."""
    names = [name for name, _ in model.named_modules()]
    found: dict[str, Any] = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise ValueError(
                f"tp_plan[{pattern!r}]={style!r}: this style is not supported. It can be "
                f"{', '.join(map(repr, STYLES))}, or a ParallelStyle of torch.distributed.tensor.parallel."
            )
        wanted = pattern.split(".")
        matched = [
            name
            for name in names
            if name.count(".") == pattern.count(".") and all(map(fnmatch.fnmatchcase, name.split("."), wanted))
        ]
        if not matched:
            raise ValueError(f"tp_plan[{pattern!r}]: no module of {type(model).__name__} has such a name.")
        found.update(dict.fromkeys(matched, style))
    return found


def _check_heads(model: torch.nn.Module, chosen: Mapping[str, Any], size: int) -> None:
    """Raise ValueError if a cut through the projections of attention would go through one of its heads."""
    config = getattr(model, "config", None)
    projections = [name for name, style in chosen.items() if style == "colwise" and "attn" in name]
    for name in HEADS if projections else ():
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"tp_size={size} does not divide {type(model).__name__}'s {name}={heads}, so {projections[0]} would be "
                f"cut through a head. It can be a divisor of {heads}."
            )


def _check_sizes(name: str, module: torch.nn.Module, style: str, size: int) -> None:
    if style == WHOLE:
        return
    attribute = {
        **dict.fromkeys(CUT_OUTPUTS, "out_features"),
        **dict.fromkeys(CUT_INPUTS, "in_features"),
        "embedding_rowwise": "num_embeddings",
        "embedding_colwise": "embedding_dim",
    }[style]
    length = int(getattr(module, attribute))
    if length % size:
        raise ValueError(
            f"tp_size={size} does not divide {name}.{attribute}={length}, which {style!r} cuts. Use another size, or "
            f"write a tp_plan without {name}."
        )


def _make_style(style: str) -> Any:
    """Return torch's style for a name in a plan; None for a layer that stays whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if style == WHOLE:
        return None
    if style == "colwise":
        return ColwiseParallel()
    if style in (*CUT_OUTPUTS, "embedding_colwise"):
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise":
        return RowwiseParallel()
    return RowwiseParallel(input_layouts=Replicate())


def _tie_again(tied: list[list[Place]]) -> None:
    """Let modules share a parameter again that were cut one after the other."""
    for places in tied:
        (first, name), *others = places
        shared = first._parameters[name]  # noqa: SLF001 - as above
        for module, its_name in others:
            other = module._parameters[its_name]  # noqa: SLF001
            if getattr(other, "placements", None) != getattr(shared, "placements", None):
                raise ValueError(
                    f"tp_plan cuts the weight that {type(first).__name__} and {type(module).__name__} share in two "
                    "ways. Give both modules styles that cut the same dimension, such as 'embedding_rowwise' and "
                    "'colwise_gather_output'."
                )
            module._parameters[its_name] = shared  # noqa: SLF001
