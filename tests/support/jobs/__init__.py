"""Scripts that tests launch, and the functions that launch them."""
