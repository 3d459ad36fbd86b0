"""Fakes of libraries that need a GPU."""
