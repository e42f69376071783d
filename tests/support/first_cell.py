"""Ways to start ranks, and the first cell of a kernel for tests that launch in all of them."""

from __future__ import annotations

FORKED = ("forkserver", "fork")
START_METHODS = (*FORKED, "spawn")
"""Spawned ranks are fresh interpreters, as frameworks expect, and import torch for seconds: few tests have them."""

DEFINITIONS = """
import asyncio, contextlib, io, os, random, signal, sys, threading, time, warnings
from pathlib import Path
import numpy as np
import torch, torch.distributed as dist

def total():
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()

def hello():
    print("out")
    print("err", file=sys.stderr)
    return "returned"
"""
