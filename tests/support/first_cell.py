"""Ways to start ranks, and the first cell of a kernel for tests that launch in all of them."""

from __future__ import annotations

__all__ = ["DEFINITIONS", "FORKED", "START_METHODS"]

START_METHODS = ("forkserver", "fork", "spawn")
FORKED = ("forkserver", "fork")

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
