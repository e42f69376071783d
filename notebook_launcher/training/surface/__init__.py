"""The parts of the Accelerator that hand on to other modules, by topic."""
