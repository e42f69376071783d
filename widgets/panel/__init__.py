"""The panel: the form that configures and launches, drawn from its model."""
