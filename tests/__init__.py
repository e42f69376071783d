"""The test suite; a package so that tests can share `tests.kernels` under any working directory."""
