"""Training scripts that tests launch, and functions that launch them."""
