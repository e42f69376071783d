"""The ranks at this moment: stacks, hangs, samples, profiles."""
