"""Shares of samplers: the indices of one rank in every round, drawn without a list of them all."""
