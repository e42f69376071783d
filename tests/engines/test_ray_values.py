"""The engine `Ray` as a value: what it takes and refuses, without a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from notebook_launcher import ConfigError, Ray
from notebook_launcher.engines.cluster.ray_engine import NodeShare, RayNodes

NODE = NodeShare(node_id="a", host="gpu1", address="10.0.0.1", cpus=16.0, gpus=8, kind="H100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "ray://head:10001"}, "address='ray://head:10001': Ray Client has no streams"),
        ({"address": "head"}, "address='head' is not an address of a Ray cluster: pass 'auto', or one such as"),
    ],
)
def test_value_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Ray(**options)
    assert caught.value.field == "engine"


def test_equal_engines_share_their_agents() -> None:
    engine = Ray("10.0.0.1:6379", runtime_env={"pip": ["x"]})
    assert engine == Ray("10.0.0.1:6379", runtime_env={"pip": ["x"]})
    assert hash(engine) == hash(Ray("10.0.0.1:6379"))


def test_agent_asks_for_what_its_ranks_need() -> None:
    part = NODE.part(2, use_gpus=True, cpus=None)
    assert (part.cpus, part.gpus) == (2.0, 2)
    assert (NODE.part(20, use_gpus=True, cpus=None).cpus, NODE.part(20, use_gpus=True, cpus=None).gpus) == (16.0, 8)
    assert (NODE.part(2, use_gpus=False, cpus=0.5).cpus, NODE.part(2, use_gpus=False, cpus=0.5).gpus) == (0.5, 0)
    assert NODE.info(3).gpus == ("H100",) * 8


def test_agents_serve_a_launch_that_needs_no_more() -> None:
    held = RayNodes(Ray(), (NODE, dataclasses.replace(NODE, node_id="b")))
    assert held.covers(RayNodes(Ray(), (NODE.part(2, use_gpus=True, cpus=None),)))
    assert not held.covers(RayNodes(Ray(), (dataclasses.replace(NODE, node_id="b"),)))
    assert not RayNodes(Ray(), (NODE.part(2, use_gpus=True, cpus=None),)).covers(held)
