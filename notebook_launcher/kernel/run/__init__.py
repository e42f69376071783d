"""One run: its handle, the thread that carries it out, its data, and the steps that lead to its outcome."""
