"""The process side: what runs outside the kernel."""
