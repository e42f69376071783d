"""Libraries in the places of a GPU's, compiled for tests: they tell of GPUs where there are none."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# Two GPUs; each look at one finds 1 GB more used. The second does not tell how busy it is, as one that is
# partitioned (MIG) does not. It counts who has it open.
NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { int used; const char *uuid; } device;
static device devices[2] = {{0, "GPU-aaaa"}, {0, "GPU-bbbb"}};
static int num_open = 0;
int num_left_open(void) { return num_open; }
/* PRETEND_UNLOADED: the driver is loaded by each start, which takes a while. */
int nvmlInit_v2(void) { num_open++; if (getenv("PRETEND_UNLOADED")) usleep(700000); return 0; }
int nvmlDeviceGetPersistenceMode(void *handle, unsigned *mode) { *mode = !getenv("PRETEND_UNLOADED"); return 0; }
int nvmlShutdown(void) { num_open--; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "535.183.01"); return 0; }
/* PRETEND_CODES: what NVML answers for each GPU, such as "0,4,15": usable, no permission, lost. */
static int code_of(unsigned index) {
    const char *codes = getenv("PRETEND_CODES");
    while (codes && index-- && (codes = strchr(codes, ','))) codes++;
    return codes ? atoi(codes) : 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *codes = getenv("PRETEND_CODES");
    for (*count = codes ? 1 : 2; codes && (codes = strchr(codes, ',')); codes++) ++*count;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &devices[index % 2];
    return code_of(index);
}
static device slice = {0, "MIG-cccc"};
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &slice;
    return strcmp(uuid, "MIG-cccc") ? 6 : 0;
}
int nvmlDeviceGetMaxMigDeviceCount(device *handle, unsigned *count) {
    *count = handle == &devices[1] ? 3 : 0;
    return handle == &devices[1] ? 0 : 3;
}
int nvmlDeviceGetMigDeviceHandleByIndex(device *handle, unsigned index, void **found) {
    *found = &slice;
    return index == 1 ? 0 : 6;
}
/* PRETEND_SECOND: the name of the second GPU, where the cards differ. */
int nvmlDeviceGetName(device *handle, char *name, unsigned size) {
    const char *second = getenv("PRETEND_SECOND");
    snprintf(name, size, "%s", second && handle == &devices[1] ? second : "Pretend");
    return 0;
}
int nvmlDeviceGetUUID(device *handle, char *uuid, unsigned size) { snprintf(uuid, size, "%s", handle->uuid); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(device *handle, unsigned long long *memory) {
    memory[0] = 80000000000ULL;
    memory[2] = getenv("PRETEND_USED") && handle == &devices[1] ? 79000000000ULL : 1000000000ULL * ++handle->used;
    memory[1] = memory[0] - memory[2];
    return 0;
}
/* Without peer access, on different NUMA nodes. */
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, unsigned *level) { *level = 50; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, unsigned kind, unsigned *status) { *status = 1; return kind ? 2 : 0; }
/* PRETEND_USED: process 1 uses the second, and nearly all of its memory. */
typedef struct { unsigned pid; unsigned long long used; unsigned a, b; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(device *handle, unsigned *count, process *found) {
    *count = getenv("PRETEND_USED") && handle == &devices[1]; found[0].pid = 1; return 0;
}
int nvmlDeviceGetUtilizationRates(device *handle, unsigned *rates) {
    rates[0] = 93; rates[1] = 40;
    return handle == &devices[1] ? 3 : 0;
}
"""


def compile_library(folder: Path, name: str, source: str) -> Path:
    """Compile a source in C to the library of this name; return the folder, for `LD_LIBRARY_PATH`."""
    (folder / "source.c").write_text(source)
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-w", "-o", str(folder / name), str(folder / "source.c")]
    subprocess.run(command, check=True)
    return folder
