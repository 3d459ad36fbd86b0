"""Stand-ins for libraries that need a GPU."""
