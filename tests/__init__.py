"""The test suite; a package so that tests can share `tests.support.kernels` under any working directory."""
