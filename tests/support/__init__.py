"""Support for tests: kernels, browsers, models, and the check that nothing is left."""
